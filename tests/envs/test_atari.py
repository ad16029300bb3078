"""Atari: clipping, lives, stacking and threads, on the real ALE."""

import numpy as np
import pytest

from rlframe.core.errors import ConfigError
from rlframe.envs import EnvError
from tests.envs.rows import Walk, made, rows_for, walk

pytest.importorskip("ale_py")

N_STEPS = 250  # random play of Breakout loses all five lives in 100 to 250


@pytest.fixture(scope="module")
def breakout() -> Walk:
    return walk(made("ALE/Breakout-v5", 2), N_STEPS)


def test_the_defaults_are_deepmind_preprocessing() -> None:
    envs = made("ALE/Breakout-v5", 2, num_threads=1)
    assert envs.backend == "native AtariVectorEnv, 1 thread"
    assert envs.observation_space.shape == (4, 84, 84)
    assert envs.observation_space.dtype == np.uint8
    assert envs.action_space.n == 4  # type: ignore[attr-defined]


def test_lost_lives_terminate_while_the_game_continues(breakout: Walk) -> None:
    lost = breakout.terminated & ~breakout.ended
    assert lost.any()
    after = np.argwhere(lost[:-1])
    for t, env in after:
        assert breakout.first[t, env]
        assert breakout.valid[t + 1, env]


def test_a_game_has_four_lives_lost_before_its_end(breakout: Walk) -> None:
    ends = np.flatnonzero(breakout.ended[:, 0])
    assert breakout.terminated[ends[0], 0]
    assert breakout.terminated[: ends[0], 0].sum() == 4
    assert not breakout.first[ends[0], 0], "the last observation begins nothing"
    assert not breakout.valid[ends[0] + 1, 0]
    assert breakout.first[ends[0] + 1, 0]


def test_episodic_life_can_be_turned_off_and_changes_no_game_and_threads_change_nothing(breakout: Walk) -> None:
    other = walk(made("ALE/Breakout-v5", 2, num_threads=1, episodic_life=False), N_STEPS)
    np.testing.assert_array_equal(other.terminated, other.ended)
    np.testing.assert_array_equal(other.valid[1:], ~other.ended[:-1])
    np.testing.assert_array_equal(other.first[1:], other.ended[:-1])
    np.testing.assert_array_equal(breakout.observation, other.observation)
    np.testing.assert_array_equal(breakout.raw_reward, other.raw_reward)
    np.testing.assert_array_equal(breakout.ended, other.ended)


def test_games_of_other_seeds_differ(breakout: Walk) -> None:
    other = walk(made("ALE/Breakout-v5", 2, seeds=[20, 21]), 30)
    assert (other.observation[:30] != breakout.observation[:30]).any()
    assert (breakout.observation[:, 0] != breakout.observation[:, 1]).any()


def test_rewards_are_clipped_and_scores_are_not() -> None:
    seen = walk(made("ALE/Qbert-v5", 2), 60)
    assert seen.raw_reward.max() >= 25
    np.testing.assert_array_equal(seen.reward, np.clip(seen.raw_reward, -1, 1))
    unclipped = walk(made("ALE/Qbert-v5", 2, reward_clipping=False), 60)
    np.testing.assert_array_equal(unclipped.reward, seen.raw_reward)


def test_frames_are_stacked_and_none_leaks_into_the_next_game() -> None:
    seen = walk(made("ALE/Breakout-v5", 2, max_num_frames_per_episode=40), 24)
    assert seen.truncated.any()
    assert not seen.terminated[seen.truncated].any()
    for t in range(1, 24):
        for env in range(2):
            now, before = seen.observation[t, env], seen.observation[t - 1, env]
            if seen.first[t, env]:
                assert not now[:3].any(), "older frames of a new game are empty"
            else:
                np.testing.assert_array_equal(now[:3], before[1:])


def test_a_frame_is_the_newest_of_the_stack() -> None:
    envs = made("ALE/Breakout-v5", 2)
    with pytest.raises(EnvError, match="before the first reset"):
        envs.frame(0)
    seen = walk(envs, 3)
    frame = envs.frame(1)
    assert frame.shape == (84, 84, 3)
    np.testing.assert_array_equal(frame[:, :, 2], seen.observation[-1, 1, -1])


def test_colour_frames_are_stacked_as_channels() -> None:
    envs = made("ALE/Breakout-v5", 1, grayscale=False, stack_num=2)
    assert envs.observation_space.shape == (6, 84, 84)
    seen = walk(envs, 3)
    np.testing.assert_array_equal(envs.frame(0).transpose(2, 0, 1), seen.observation[-1, 0, 3:])


def test_options_reach_the_emulator() -> None:
    assert made("ALE/Breakout-v5", 1, full_action_space=True).action_space.n == 18  # type: ignore[attr-defined]
    envs = made("ALE/Breakout-v5", 1, img_height=64, img_width=48, stack_num=3)
    assert envs.observation_space.shape == (3, 64, 48)
    envs.reset(rows_for(envs))


def test_continuous_actions_are_accepted() -> None:
    walk(made("ALE/Breakout-v5", 2, continuous=True), 3)


@pytest.mark.parametrize(
    ("kwargs", "what"),
    [
        ({"frame_skip": 4}, "ALE/Pong-v5 has no option env_kwargs.frame_skip; did you mean frameskip"),
        ({"autoreset_mode": "SameStep"}, "has no option env_kwargs.autoreset_mode"),
        ({"frameskip": 0}, "env_kwargs.frameskip=0 must be a whole number of at least 1"),
        ({"num_threads": "two"}, "env_kwargs.num_threads='two' must be a whole number"),
        ({"repeat_action_probability": 1.5}, "env_kwargs.repeat_action_probability=1.5 must be a number from 0 to 1"),
        ({"episodic_life": "no"}, "env_kwargs.episodic_life='no' must be true or false"),
    ],
)
def test_a_wrong_option_is_an_error(kwargs: dict[str, object], what: str) -> None:
    with pytest.raises(ConfigError) as caught:
        made("ALE/Pong-v5", 1, **kwargs)
    assert what in str(caught.value)


def test_an_unknown_game_is_an_error_with_the_nearest_id() -> None:
    with pytest.raises(ConfigError, match="did you mean ALE/Breakout-v5"):
        made("ALE/Breakot-v5", 1)


def test_the_python_backend_makes_the_plain_game() -> None:
    envs = made("ALE/Pong-v5", 1, backend="python", obs_type="ram")
    assert envs.observation_space.shape == (128,)
    walk(envs, 3)
