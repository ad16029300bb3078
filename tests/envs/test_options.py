"""EnvOptions: time limits, rewards, wrappers, images and what creators are told, with every back end."""

from __future__ import annotations

from contextlib import closing
from functools import partial
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from rlframe.core.errors import ConfigError
from rlframe.core.ranks import SamplerRank, use_ranks
from rlframe.envs import EnvConfig, EnvOptions, Envs, make_envs
from rlframe.envs.wrappers import ImageObservation
from rlframe.experiment.settings import from_flat
from rlframe.experiment.trust import foreign
from rlframe.rollout.worker_pool import WorkerPool
from tests.envs import wrapping
from tests.envs.rows import walk

ENDLESS, PIXELS = "tests.envs.wrapping:Endless", "tests.envs.wrapping:Pixels"
PLUS, TIMES_TEN, TWICE = (f"tests.envs.wrapping:{name}" for name in ("Plus", "times_ten", "Twice"))


def made(id_: Any, n: int = 2, backend: str = "auto", kwargs: Any = None, **options: Any) -> Envs:
    return make_envs(EnvConfig(id_, kwargs or {}, backend, options=EnvOptions(**options)), n, range(10, 10 + n))


@pytest.mark.parametrize(
    ("id_", "backend"),
    [(ENDLESS, "auto"), ("CartPole-v1", "python"), ("CartPole-v1", "native"), ("ALE/Pong-v5", "native")],
)
def test_a_time_limit_truncates_and_the_last_observation_is_a_row(id_: str, backend: str) -> None:
    if id_.startswith("ALE"):
        pytest.importorskip("ale_py")
    with closing(made(id_, backend=backend, max_episode_steps=3)) as envs:
        seen = walk(envs, 8)
    expected = np.array([False, False, True, False, False, False, True, False])
    for env in range(2):
        np.testing.assert_array_equal(seen.truncated[:, env], expected)
        np.testing.assert_array_equal(seen.valid[1:, env], ~expected[:-1])  # the row after the end is its observation
    assert not seen.terminated.any()


def test_a_time_limit_replaces_that_of_the_environment_in_both_directions() -> None:
    with closing(made("Pendulum-v1", 1, max_episode_steps=2)) as envs:
        assert walk(envs, 3).truncated[:, 0].tolist() == [False, True, False]
    with closing(made("Pendulum-v1", 1, max_episode_steps=201)) as envs:
        assert np.flatnonzero(walk(envs, 210).truncated[:, 0]).tolist() == [200]


@pytest.mark.parametrize(
    ("options", "learned"),
    [
        ({"reward_scale": 0.5}, [-1.5, 1.5]),
        ({"reward_clip": "sign"}, [-1, 1]),
        ({"reward_clip": "[-1,2]"}, [-1, 2]),
        ({"reward_clip": "-inf,0.5", "reward_scale": 0.1}, [-0.3, 0.3]),
        ({"normalize_reward": True, "reward_clip": "[-1,1]"}, [-3, 3]),  # the sampler does it
    ],
)
def test_rewards_are_scaled_and_then_clipped_for_learning_and_scores_are_not(
    options: Any, learned: list[float]
) -> None:
    with closing(made(ENDLESS, **options)) as envs:
        seen = walk(envs, 2)
    np.testing.assert_array_equal(seen.raw_reward, [[-3, -3], [3, 3]])
    np.testing.assert_allclose(seen.reward, np.repeat(np.array(learned)[:, None], 2, 1), rtol=1e-6)


def test_rewards_are_changed_in_native_environments_too() -> None:
    with closing(made("CartPole-v1", 8, "native", reward_scale=0.25)) as envs:
        seen = walk(envs, 40)
    np.testing.assert_array_equal(seen.reward, 0.25 * seen.raw_reward)
    assert 0.0 in seen.reward
    assert 0.25 in seen.reward


def test_ales_own_clipping_is_replaced() -> None:
    pytest.importorskip("ale_py")
    with closing(made("ALE/Qbert-v5", 2, reward_scale=0.01)) as envs:
        seen = walk(envs, 300)
    assert seen.raw_reward.max() >= 25
    np.testing.assert_allclose(seen.reward, 0.01 * seen.raw_reward, rtol=1e-6)


def test_ale_makes_the_images_that_the_options_ask_for() -> None:
    pytest.importorskip("ale_py")
    with closing(made("ALE/Pong-v5", 1, frame_stack=2, resize=(42, 48))) as envs:
        assert envs.observation_space.shape == (2, 42, 48)
        assert envs.backend.startswith("native")


def test_wrappers_apply_in_order_inside_the_other_options() -> None:
    with closing(made(ENDLESS, wrappers=(PLUS, TIMES_TEN), reward_scale=0.1, max_episode_steps=2)) as envs:
        seen = walk(envs, 2)
    assert seen.raw_reward[:, 0].tolist() == [-20, 40]
    np.testing.assert_allclose(seen.reward[:, 0], [-2, 4], rtol=1e-6)
    assert seen.truncated[:, 0].tolist() == [False, True]


def test_the_environments_own_limit_counts_its_steps_and_the_options_those_of_the_agent() -> None:
    with closing(made("Pendulum-v1", 1, wrappers=(TWICE,))) as envs:
        assert np.flatnonzero(walk(envs, 101).truncated[:, 0]).tolist() == [99]
    with closing(made("Pendulum-v1", 1, wrappers=(TWICE,), max_episode_steps=5)) as envs:
        assert np.flatnonzero(walk(envs, 6).truncated[:, 0]).tolist() == [4]


def test_a_creator_is_told_what_it_names_and_its_own_arguments_win() -> None:
    config = EnvConfig(ENDLESS, {"rank": 7}, mode="eval")
    with closing(make_envs(config, 2, [30, 31], first=4)) as envs:
        start = walk(envs, 0).start
    np.testing.assert_array_equal(start[:, 1:], [[4, 7, 30, 1, 0], [5, 7, 31, 1, 0]])


def test_what_a_partial_gives_its_function_wins_over_what_it_is_told() -> None:
    creator = partial(wrapping.Endless, mode="eval", seed=5)
    with closing(make_envs(EnvConfig(creator), 2, [30, 31], first=4)) as envs:
        np.testing.assert_array_equal(walk(envs, 0).start[:, 1:], [[4, 0, 5, 1, 0], [5, 0, 5, 1, 0]])


@pytest.mark.parametrize(("rank", "told"), [(None, 1), (0, 0)])
def test_a_process_that_samples_for_a_learner_tells_creators_the_learners_rank(rank: int | None, told: int) -> None:
    with use_ranks(SamplerRank(1, 2)), closing(make_envs(EnvConfig(ENDLESS, rank=rank), 1, [30])) as envs:
        assert walk(envs, 0).start[0, 2] == told


def test_a_creator_in_a_worker_is_told_the_same() -> None:
    config = EnvConfig("tests.envs.test_options:placed")
    with closing(WorkerPool(config, 4, [30, 31, 32, 33], 2, first=8)) as pool:
        assert pool.observation_space.shape == (1,)  # otherwise its spaces would say what it was told
    with pytest.raises(ConfigError, match="env_index=7 seed=33 mode=train"):
        WorkerPool(EnvConfig("tests.envs.test_options:placed", {"wanted": -1}), 1, [33], 1, first=7)


def placed(env_index: int, seed: int, mode: str, wanted: int = 22) -> wrapping.Endless:
    if seed - env_index != wanted:
        raise ConfigError(f"made with {env_index=} {seed=} mode={mode}")
    env = wrapping.Endless()
    env.observation_space = type(env.observation_space)(-1, 1, (1,))
    return env


@pytest.mark.parametrize("shape", [(16, 12, 3), (3, 16, 12)])
def test_images_become_gray_small_and_stacked(shape: tuple[int, ...]) -> None:
    options = {"grayscale": True, "resize": (8, 9), "frame_stack": 3}
    with closing(made(PIXELS, 2, kwargs={"shape": shape}, **options)) as envs:
        seen = walk(envs, 6)
        space: Any = envs.observation_space
    assert (space.shape, space.dtype, space.n_frames) == ((3, 8, 9), np.uint8, 3)
    found = [step.observation[0].reshape(3, -1) for step in seen.steps]
    assert all((frames == frames[:, :1]).all() for frames in found), "a plain image stays plain"
    assert seen.start[0, :, 0, 0].tolist() == [1, 1, 1]
    newest = [frames[:, 0].tolist() for frames in found]
    assert newest == [[1, 1, 11], [1, 11, 21], [11, 21, 31], [21, 31, 41], [1, 1, 1], [1, 1, 11]]  # none leaks


def test_a_stack_keeps_colours_and_stacks_vectors() -> None:
    with closing(made(PIXELS, 1, frame_stack=2)) as envs:
        assert envs.observation_space.shape == (6, 16, 12)
        assert walk(envs, 1).steps[0].observation[0, :, 0, 0].tolist() == [1, 1, 1, 11, 11, 11]
    with closing(made(ENDLESS, 1, frame_stack=2)) as envs:
        assert walk(envs, 2).steps[-1].observation[0, [0, 6]].tolist() == [1, 2]


def test_a_bit_of_a_smaller_image_is_that_of_most_of_its_pixels() -> None:
    image = np.array([[1, 0, 1, 1], [0, 0, 1, 0]], bool)[..., None]
    env: Any = wrapping.Pixels(image.shape)
    env.observation_space = spaces.Box(0, 1, image.shape, np.bool_)  # type: ignore[arg-type]
    assert ImageObservation(env, False, (1, 2)).observation(image)[0, :, 0].tolist() == [False, True]


def test_a_white_image_that_is_resized_is_within_its_space() -> None:
    env: Any = wrapping.Pixels((100, 75, 3))
    env._observe = lambda: np.full((100, 75, 3), 255, np.uint8)
    resized = ImageObservation(env, True, (64, 64))
    assert resized.observation_space.contains(resized.reset()[0])


@pytest.mark.parametrize(("low", "high"), [(0.0, np.inf), (-np.inf, np.inf), (-np.inf, 1.0)])
@pytest.mark.parametrize("grayscale", [False, True])
def test_bounds_that_are_infinite_stay_so_in_another_size(low: float, high: float, grayscale: bool) -> None:
    env: Any = wrapping.Pixels((4, 6, 3))
    env.observation_space = spaces.Box(low, high, (4, 6, 3), np.float32)
    space = ImageObservation(env, grayscale, (2, 3)).observation_space
    assert space == spaces.Box(low, high, (2, 3) if grayscale else (2, 3, 3), np.float32)


def test_resizing_averages_over_areas() -> None:
    env: Any = wrapping.Pixels((2, 4))
    env._observe = lambda: np.array([[0, 10, 20, 30], [40, 50, 60, 70]], np.uint8)
    assert ImageObservation(env, False, (1, 2)).reset()[0].tolist() == [[25, 45]]
    assert ImageObservation(env, False, (2, 3)).reset()[0].tolist() == [[2, 15, 28], [42, 55, 68]]
    assert ImageObservation(env, False, (2, 8)).reset()[0][0].tolist() == [0, 0, 10, 10, 20, 20, 30, 30]


@pytest.mark.parametrize(
    ("id_", "backend", "options", "said"),
    [
        ("CartPole-v1", "native", {"frame_stack": 4}, "env.frame_stack needs Python environments"),
        ("CartPole-v1", "native", {"wrappers": (PLUS,)}, "env.wrappers needs Python environments"),
        ("CartPole-v1", "auto", {"grayscale": True}, "env.grayscale needs observations that are images"),
        ("CartPole-v1", "auto", {"resize": (8, 8)}, "env.resize needs observations that are images"),
        ("ALE/Pong-v5", "auto", {"wrappers": (PLUS,)}, "env_backend=python, which gives raw frames"),
        (ENDLESS, "auto", {"wrappers": ("tests.envs.wrapping:Plas",)}, "has no Plas; did you mean Plus"),
        (ENDLESS, "auto", {"wrappers": ("tests.envs.wrapping:NUMBER",)}, "NUMBER is 3, not a wrapper"),
        (ENDLESS, "auto", {"wrappers": ("tests.envs.wrapping:nothing",)}, "returned a NoneType"),
        ("tests.envs.custom:Scripted", "auto", {"frame_stack": 2, "kwargs": {"observe": "discrete"}}, "frame_stack=2"),
    ],
)
def test_what_an_environment_cannot_do_is_refused_in_one_line(
    id_: str, backend: str, options: dict[str, Any], said: str
) -> None:
    if id_.startswith("ALE"):
        pytest.importorskip("ale_py")
    with pytest.raises(ConfigError) as error:
        made(id_, 8, backend, **options)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_native_environments_give_way_to_python_with_auto() -> None:
    with closing(made("CartPole-v1", 8)) as envs, closing(made("CartPole-v1", 8, frame_stack=2)) as stacked:
        assert envs.backend.startswith("native")
        assert stacked.backend.startswith("python")


@pytest.mark.parametrize(
    ("id_", "kwargs", "options", "said"),
    [
        ("CartPole-v1", {"max_episode_steps": 5}, {"max_episode_steps": 6}, "the same limit"),
        ("ALE/Pong-v5", {"reward_clipping": True}, {"reward_clip": "sign"}, "env_kwargs.reward_clipping"),
        ("ALE/Pong-v5", {"stack_num": 3}, {"frame_stack": 4}, "env_kwargs.stack_num"),
    ],
)
def test_one_thing_is_not_set_twice(id_: str, kwargs: dict[str, Any], options: dict[str, Any], said: str) -> None:
    if id_.startswith("ALE"):
        pytest.importorskip("ale_py")
    with pytest.raises(ConfigError, match=said):
        made(id_, 8, kwargs=kwargs, **options)


@pytest.mark.parametrize(
    "word",
    [
        "reward_clip=[1,-1]",
        "reward_clip=[0,0]",
        "reward_clip=3",
        "reward_clip=[nan,1]",
        "reward_clip=signs",
        "reward_scale=0",
        "reward_scale=inf",
        "reward_scale=1e39",
        "reward_scale=1e-50",
        "resize=[84]",
        "resize=[84,9999]",
        "resize=[0,84]",
        "frame_stack=129",
        "wrappers=[Plus]",
        "max_episode_steps=-1",
    ],
)
def test_a_value_that_means_nothing_is_refused_before_anything_starts(word: str) -> None:
    key, _, value = word.partition("=")
    with pytest.raises(ConfigError, match=f"env.{key}"):
        from_flat({f"env.{key}": value})


@pytest.mark.parametrize("changed", ["env.reward_scale=2", "env.normalize_reward=true"])
def test_what_a_sign_leaves_nothing_of_is_refused(changed: str) -> None:
    with pytest.raises(ConfigError, match=f"{changed} changes nothing with env.reward_clip=sign"):
        from_flat({"env.reward_clip": "sign", **dict([changed.split("=")])})


def test_evaluation_has_the_same_options_and_its_own_time_limit_wins() -> None:
    given = {"env": "CartPole-v1", "env.max_episode_steps": 7, "env.frame_stack": 2}
    env = from_flat(given).eval_env_config()
    assert (env.mode, env.options.max_episode_steps, env.options.frame_stack) == ("eval", 7, 2)
    other = from_flat({**given, "eval.env_kwargs.max_episode_steps": 9}).eval_env_config()
    assert (other.options.max_episode_steps, other.kwargs) == (0, {"max_episode_steps": 9})


def test_a_strangers_wrappers_need_trust() -> None:
    assert foreign({"env.wrappers": ["os:getpid"]})
    assert not foreign({"env.wrappers": [], "env.reward_clip": "[-1,0.5]", "env.resize": [84, 84]})
