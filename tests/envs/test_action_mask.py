"""Action masks of environments: taken from info, checked in every row that acts, and refused if they do not fit."""

import math
import re
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from rlframe.core.errors import warn_once
from rlframe.core.spaces import mask_parts, random_allowed, without
from rlframe.envs import EnvConfig, EnvError, EnvOptions, make_envs
from rlframe.envs.observations import InvalidValue, check_mask
from rlframe.envs.wrappers import ActionMaskFromInfo
from tests.envs.rows import made, rows_for

THREE = spaces.Discrete(3)
BOX = spaces.Box(-1, 1, (2,), np.float32)


class Shrinking(gymnasium.Env):
    """Step k of an episode allows the actions from k on; the episode ends at step `length`, or when none is left."""

    def __init__(self, length: int = 2, info: bool = False, multi: bool = False) -> None:
        self.action_space = spaces.MultiDiscrete([2, 3]) if multi else THREE
        plain, mask = spaces.Discrete(9), spaces.MultiBinary(5 if multi else 3)
        self.observation_space = plain if info else spaces.Dict({"action_mask": mask, "observation": plain})
        self._info, self._multi, self._length, self._time = info, multi, length, 0

    def _row(self) -> Any:
        mask = (np.arange(3) >= self._time).astype(np.int8)
        whole: Any = (np.ones(2, np.int8), mask) if self._multi else mask
        if self._info:
            return self._time, {"action_mask": whole}
        return {"action_mask": np.concatenate(whole) if self._multi else mask, "observation": self._time}, {}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self._time = 0
        return self._row()

    def step(self, action: Any) -> Any:
        self._time += 1
        observation, info = self._row()
        return observation, 0.0, self._time == self._length, False, info


def stepped(n: int, **kwargs: Any) -> Any:
    envs = made(Shrinking, 2, seeds=[101, 102], **kwargs)
    rows = rows_for(envs)
    envs.reset(rows)
    for _ in range(n):
        action = np.zeros((2, 2) if kwargs.get("multi") else 2, np.int64)
        envs.step(action, rows)
    return rows


@pytest.mark.parametrize("multi", [False, True], ids=["discrete", "multi_discrete"])
def test_a_mask_that_forbids_everything_names_environment_step_and_seed(multi: bool) -> None:
    with pytest.raises(EnvError) as caught:
        stepped(3, length=9, multi=multi)
    assert "\n" not in str(caught.value)
    assert re.search(
        r"environment 0 returned .*the action mask forbids every action.*: \[.*0 0 0\] \(seed 101, episode 0, step 3",
        str(caught.value),
    )


def test_the_last_observation_of_an_episode_may_forbid_everything() -> None:
    assert not stepped(3, length=3).observation["action_mask"].any()
    assert stepped(4, length=3).observation["action_mask"].all()  # the next episode's first


def test_each_part_of_a_multi_discrete_mask_needs_an_allowed_action() -> None:
    check_mask(np.array([[1, 0, 0, 1]]), (2, 2), np.array([False]))
    with pytest.raises(InvalidValue, match=r"forbids every action of action\[1\]: \[1 1 0 0\]"):
        check_mask(np.array([[1, 0, 0, 1], [1, 1, 0, 0]]), (2, 2), np.zeros(2, np.bool_))


def test_a_mask_that_is_to_be_added_to_logits_is_refused() -> None:
    """There 0 allows an action, which would be forbidden."""
    with pytest.raises(InvalidValue, match=r"negative numbers.*: \[ 0\.e\+00 -1\.e\+09\]; let 1 allow") as caught:
        check_mask(np.array([[1, 1], [0, -1e9]]), (2,), np.ones(2, np.bool_))
    assert caught.value.index == 1
    with pytest.raises(InvalidValue, match="negative numbers"):
        check_mask(np.array([[-1, 0]], np.int8), (2,), np.ones(1, np.bool_))


@pytest.mark.parametrize("multi", [False, True], ids=["discrete", "multi_discrete"])
def test_a_mask_in_info_becomes_an_observation(multi: bool) -> None:
    env = ActionMaskFromInfo(Shrinking(info=True, multi=multi))
    start, _ = env.reset(seed=0)
    then, *_ = env.step(0)
    expected = [[1] * 5, [1, 1, 0, 1, 1]] if multi else [[1, 1, 1], [0, 1, 1]]
    assert [start["action_mask"].tolist(), then["action_mask"].tolist()] == expected
    assert env.observation_space.contains(then)
    assert mask_parts(env.observation_space, env.action_space) == ((2, 3) if multi else (3,))


def test_taxi_allows_what_it_says() -> None:
    env = ActionMaskFromInfo(gymnasium.make("Taxi-v4").unwrapped)
    observation, info = env.reset(seed=0)
    assert observation["action_mask"].tolist() == info["action_mask"].tolist()


@pytest.mark.parametrize("wrapped", [False, True], ids=["alone", "wrapped"])
def test_a_mask_in_info_that_no_agent_sees_is_warned_of(wrapped: bool, caplog: pytest.LogCaptureFixture) -> None:
    wrappers = ("rlframe.envs.wrappers:ActionMaskFromInfo",) if wrapped else ()
    warn_once.cache_clear()
    envs = make_envs(EnvConfig("Taxi-v4", options=EnvOptions(wrappers=wrappers)), 2, [0, 1])
    envs.reset(rows_for(envs))
    warned = [record.getMessage() for record in caplog.records]
    assert any("info['action_mask'] of the environment has no effect" in text for text in warned) != wrapped


def test_an_info_without_a_mask_says_so() -> None:
    with pytest.raises(KeyError, match=r"info has no 'action_mask'"):
        ActionMaskFromInfo(gymnasium.make("CartPole-v1").unwrapped).reset(seed=0)
    nothing = ActionMaskFromInfo(gymnasium.make("CartPole-v1").unwrapped)
    with pytest.raises(KeyError, match=r"info\['action_mask'\] is None; give it in every reset and step"):
        nothing._with_mask(np.zeros(4), {"action_mask": None})
    with pytest.raises(KeyError, match=r"info has no 'action_mask', only \[3, 'x'\]"):
        nothing._with_mask(np.zeros(4), {3: 1, "x": 2})


@pytest.mark.parametrize(
    "mask", ["abc", {"a": 1}, [None] * 3, [1, 1, 0.5], [1, 1, math.nan], [1, 1, 256], [2, 1, 1]], ids=str
)
def test_a_mask_in_info_that_has_other_values_is_refused_as_it_is(mask: Any) -> None:
    env = ActionMaskFromInfo(gymnasium.make("CartPole-v1").unwrapped)
    with pytest.raises(ValueError, match=r"info\['action_mask'\] must have 0 or 1 for each action, got") as error:
        env._with_mask(np.zeros(4), {"action_mask": mask})
    assert str(np.asarray(mask)) in str(error.value)


@pytest.mark.parametrize(
    ("mask", "action", "message"),
    [
        (spaces.MultiBinary(4), THREE, r"shape \(3,\)"),
        (THREE, THREE, "must be a MultiBinary or Box"),
        (spaces.MultiBinary(4), spaces.MultiBinary(4), "needs Discrete or MultiDiscrete actions"),
        (spaces.MultiBinary(2), spaces.Tuple((THREE, BOX)), "needs Discrete or MultiDiscrete actions"),
    ],
)
def test_a_mask_that_does_not_fit_is_refused_in_one_line(mask: Any, action: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        mask_parts(spaces.Dict({"action_mask": mask, "observation": BOX}), action)
    assert "\n" not in str(caught.value)


def test_there_must_be_something_to_see_and_it_is_seen_as_without_a_mask() -> None:
    mask = spaces.MultiBinary(3)
    with pytest.raises(ValueError, match="alone"):
        mask_parts(spaces.Dict({"action_mask": mask}), THREE)
    assert mask_parts(BOX, THREE) == mask_parts(spaces.Dict({"action_mask": BOX}), BOX) == ()
    assert without(spaces.Dict({"action_mask": mask, "observation": BOX}), "action_mask") == BOX
    several = {"one": BOX, "two": BOX}
    assert without(spaces.Dict({**several, "action_mask": mask}), "action_mask") == spaces.Dict(several)


def test_random_moves_are_uniform_among_the_allowed() -> None:
    rngs = [np.random.default_rng(i) for i in range(4_000)]
    masks = np.tile([1, 0, 1, 0, 1], (4_000, 1))
    action = random_allowed(spaces.MultiDiscrete([3, 2]), (3, 2), masks, rngs)
    values, counts = np.unique(action[:, 0], return_counts=True)
    assert values.tolist() == [0, 2]
    assert counts.min() > 1_800  # 6 deviations
    assert (action[:, 1] == 1).all()
