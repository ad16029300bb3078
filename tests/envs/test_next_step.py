"""All backends write the same rows at the end of an episode (NEXT_STEP autoreset)."""

from importlib.util import find_spec

import gymnasium
import numpy as np
import pytest

from rlframe.core.seeding import EpisodeSeeds
from rlframe.envs import debug_envs
from rlframe.envs.python import PythonEnvs
from tests.envs.custom import Scripted
from tests.envs.rows import Walk, made, rows_for, walk

WITHOUT_ENVPOOL = pytest.mark.skipif(find_spec("envpool") is None, reason="envpool is not installed")
every_backend = pytest.mark.parametrize("backend", ["python", "native", pytest.param("envpool", marks=WITHOUT_ENVPOOL)])


def check_rows(seen: Walk) -> None:
    """The contract of every backend for the steps after a reset."""
    ended = np.concatenate([np.zeros_like(seen.ended[:1]), seen.ended])[:-1]  # at the step before
    assert ended.any(), "the walk ends no episode"
    np.testing.assert_array_equal(seen.valid, ~ended)
    np.testing.assert_array_equal(seen.first, ended)
    assert not seen.reward[ended].any()
    assert not seen.raw_reward[ended].any()
    assert not (seen.terminated | seen.truncated)[ended].any()
    np.testing.assert_array_equal(seen.ended, seen.terminated | seen.truncated)


@every_backend
def test_the_step_after_an_end_resets_and_the_last_observation_is_a_row(backend: str) -> None:
    seen = walk(made("CartPole-v1", 3, backend=backend), 100)
    check_rows(seen)
    np.testing.assert_array_equal(seen.reward, seen.valid.astype(np.float32))  # CartPole gives 1 a step
    assert (np.abs(seen.observation[seen.first]) <= 0.05).all(), "a reset observation is near the origin"
    position, angle = seen.observation[seen.terminated][:, 0], seen.observation[seen.terminated][:, 2]
    assert ((np.abs(position) > 2.4) | (np.abs(angle) > 0.2095)).all()


@every_backend
def test_a_time_limit_truncates(backend: str) -> None:
    seen = walk(made("CartPole-v1", 2, backend=backend, max_episode_steps=5), 18)
    check_rows(seen)
    assert not seen.terminated.any()
    np.testing.assert_array_equal(np.flatnonzero(seen.truncated[:, 0]), [4, 10, 16])


def test_an_action_on_the_step_that_resets_is_ignored() -> None:
    one, other = (made("CartPole-v1", 1, backend="python", max_episode_steps=3) for _ in range(2))
    a, b = walk(one, 3), walk(other, 3)
    rows_a, rows_b = a.steps[-1], b.steps[-1]
    assert rows_a.ended.all()
    one.step(np.array([0]), rows_a)
    other.step(np.array([1]), rows_b)
    np.testing.assert_array_equal(rows_a.observation, rows_b.observation)


@pytest.mark.parametrize("ends", ["truncated", "terminated"])
def test_truncation_and_termination_are_told_apart(ends: str) -> None:
    seen = walk(made("rlframe.envs.debug_envs:time_limit", 2, ends=ends, length=4), 12)
    check_rows(seen)
    np.testing.assert_array_equal(np.flatnonzero(seen.ended[:, 0]), [3, 8])
    np.testing.assert_array_equal(seen.ended, seen.terminated if ends == "terminated" else seen.truncated)
    np.testing.assert_array_equal(seen.observation[:6, 0], [1, 2, 3, 4, 0, 1])


def test_an_end_on_the_time_limit_is_both() -> None:
    seen = walk(PythonEnvs([lambda: Scripted(length=2)], [0], time_limit=2), 2)
    assert seen.terminated[1, 0]
    assert seen.truncated[1, 0]


@every_backend
def test_a_seed_gives_one_result_and_another_differs(backend: str) -> None:
    a, b = (walk(made("CartPole-v1", 3, backend=backend), 60) for _ in range(2))
    np.testing.assert_array_equal(a.observation, b.observation)
    c = walk(made("CartPole-v1", 3, seeds=[20, 21, 22], backend=backend), 60)
    assert (a.observation[0] != c.observation[0]).any(axis=1).all()


@every_backend
def test_environments_of_a_batch_differ(backend: str) -> None:
    starts = walk(made("CartPole-v1", 4, backend=backend), 1).observation[0]
    assert len(np.unique(starts, axis=0)) == 4


@pytest.mark.parametrize("backend", ["python", "native"])
def test_each_round_has_its_own_episodes_which_are_the_same_each_time(backend: str) -> None:
    envs = made("CartPole-v1", 2, backend=backend)
    out, starts = rows_for(envs), []
    for round_ in (0, 1, 0, 2):
        envs.reset(out, round_)
        starts.append(out.observation.copy())
    assert (starts[0] == starts[2]).all()
    assert len({start.tobytes() for start in starts}) == 3


def test_an_environment_depends_on_its_seed_and_not_on_its_place() -> None:
    pair = walk(made("CartPole-v1", 2, seeds=[5, 6], backend="python"), 1)
    alone = walk(made("CartPole-v1", 1, seeds=[6], backend="python"), 1)
    np.testing.assert_array_equal(pair.start[1], alone.start[0])


@pytest.mark.parametrize(("length", "limit"), [(3, 0), (9, 4), (4, 4)])
@pytest.mark.parametrize("script", ["plain", "numpy", "array_reward"])
def test_a_batch_of_one_writes_the_same_flags_as_a_larger_batch(script: str, length: int, limit: int) -> None:
    def scripted() -> gymnasium.Env:
        return Scripted(length=length, script=script)

    alone = walk(PythonEnvs([scripted], [0], limit), 14)
    among = walk(PythonEnvs([scripted, scripted], [0, 1], limit), 14)
    check_rows(alone)
    for name in ("first", "reward", "terminated", "truncated", "valid", "raw_reward", "ended"):
        one, all_ = getattr(alone, name), getattr(among, name)
        assert one.dtype == all_.dtype
        np.testing.assert_array_equal(one[:, 0], all_[:, 0], err_msg=name)


def test_a_batch_steps_as_the_plain_environment_does() -> None:
    plain = gymnasium.make("CartPole-v1")
    observation, _ = plain.reset(seed=10)
    envs = made("CartPole-v1", 1, backend="python")
    seen = walk(envs, 40, seed=3)
    rng = np.random.default_rng(3)
    np.testing.assert_array_equal(seen.start[0], observation)
    over, episode = False, 0
    for step in seen.steps:
        action = int(rng.integers(2, size=1)[0])
        if over:
            episode += 1
            EpisodeSeeds(10).seek(plain.unwrapped.np_random, episode)
            observation, _ = plain.reset()
            over = False
        else:
            observation, _, terminated, truncated, _ = plain.step(action)
            over = terminated or truncated
        np.testing.assert_array_equal(step.observation[0], observation)
        assert step.ended[0] == over


def test_masked_cartpole_keeps_positions_and_the_limit() -> None:
    seen = walk(made(debug_envs.masked_cartpole, 2, max_episode_steps=6), 8)
    whole = walk(made("CartPole-v1", 2, backend="python", max_episode_steps=6), 8)
    np.testing.assert_array_equal(seen.observation, whole.observation[..., ::2])
    np.testing.assert_array_equal(seen.truncated, whole.truncated)
    assert seen.truncated[5].all()
