"""EnvPool, if installed: Gymnasium's spaces, one seed per environment, no influence of threads."""

import gymnasium
import numpy as np
import pytest

from rlframe.core.errors import ConfigError
from tests.envs.rows import made, rows_for, walk

pytest.importorskip("envpool")


@pytest.mark.parametrize("id_", ["Pendulum-v1", "Acrobot-v1", "MountainCar-v0", "FrozenLake-v1", "CliffWalking-v1"])
def test_spaces_are_gymnasiums(id_: str) -> None:
    pool, plain = made(id_, 1, backend="envpool"), gymnasium.make(id_).unwrapped
    assert pool.action_space == plain.action_space
    assert pool.observation_space.shape == plain.observation_space.shape
    assert pool.observation_space.dtype == plain.observation_space.dtype


@pytest.mark.parametrize("id_", ["Hopper-v5", "LunarLander-v3"])
def test_simulators_give_observations_of_gymnasiums_form(id_: str) -> None:
    pytest.importorskip("mujoco" if id_ == "Hopper-v5" else "Box2D")
    pool, plain = made(id_, 2, backend="envpool"), made(id_, 2, backend="python")
    assert pool.observation_space.shape == plain.observation_space.shape
    a, b = walk(pool, 5), walk(plain, 5)
    assert a.observation.dtype == b.observation.dtype == np.float32
    assert a.valid.all()


def test_threads_change_nothing() -> None:
    a, b = (walk(made("Acrobot-v1", 5, backend="envpool", num_threads=k), 50) for k in (1, 2))
    np.testing.assert_array_equal(a.observation, b.observation)


def test_each_environment_has_its_own_seed() -> None:
    pair = walk(made("Acrobot-v1", 2, seeds=[5, 6], backend="envpool"), 1)
    alone = walk(made("Acrobot-v1", 1, seeds=[6], backend="envpool"), 1)
    np.testing.assert_array_equal(pair.start[1], alone.start[0])


def test_infos_are_averaged_without_bookkeeping() -> None:
    envs = made("HalfCheetah-v5", 2, backend="envpool")
    walk(envs, 4)
    names = set(envs.pop_diagnostics(0))
    assert "x_velocity" in names
    assert not names & {"env_id", "elapsed_step", "players"}


def test_a_wrong_argument_is_named() -> None:
    with pytest.raises(ConfigError, match=r"has no argument env_kwargs.max_episode_step"):
        made("Acrobot-v1", 1, backend="envpool", max_episode_step=3)


def test_each_round_has_its_own_episodes_which_are_the_same_each_time() -> None:
    envs = made("LunarLander-v3", 2, backend="envpool")
    out, starts = rows_for(envs), []
    for round_ in (0, 1, 0):
        envs.reset(out, round_)
        starts.append(out.observation.copy())
        envs.step(np.zeros(2, np.int64), out)
    assert (starts[0] == starts[2]).all()
    assert (starts[0] != starts[1]).any()


def test_its_episodes_restart_with_other_seeds_and_it_says_so() -> None:
    one, other = (made("LunarLander-v3", 2, backend="envpool") for _ in range(2))
    out = rows_for(one)
    one.reset(out)
    first = out.observation.copy()
    assert all("cannot save its state" in reason for reason in other.restore(one.state(), out, lambda: None))
    assert (out.observation != first).any()
