"""Observations and actions of every supported space pass between environments and canonical rows."""

from typing import Any, ClassVar

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from rlframe.core.errors import ConfigError
from rlframe.core.spaces import action_parts
from rlframe.core.struct import leaves, map_tree
from rlframe.envs import EnvConfig, EnvError, make_envs
from rlframe.envs.observations import BoundsCheck, InvalidValue, batch_checker, batch_writer
from rlframe.envs.python import PythonEnvs
from tests.envs.custom import SPACES, Converted, Scripted
from tests.envs.rows import made, rows_for, walk

ROUND_TRIP = [name for name in SPACES if name not in ("text", "integers", "gray")]


def scripts_of(envs: Any) -> list[Scripted]:
    assert isinstance(envs, PythonEnvs)
    return envs._envs  # type: ignore[return-value]


def canonical(space: spaces.Space, value: Any) -> list[np.ndarray]:
    """The expected leaves for `value`."""
    match space:
        case spaces.Dict():
            return [leaf for key, sub in space.spaces.items() for leaf in canonical(sub, value[key])]
        case spaces.Tuple():
            return [leaf for sub, part in zip(space.spaces, value, strict=True) for leaf in canonical(sub, part)]
        case spaces.Discrete() | spaces.MultiDiscrete():
            return [np.asarray(value - space.start)]
    return [np.asarray(value)]


@pytest.mark.parametrize("kind", [*ROUND_TRIP, "integers"])
def test_observations_arrive_canonical(kind: str) -> None:
    envs = made("tests.envs.custom:scripted", 2, observe=kind, length=3)
    seen = walk(envs, 9)
    for index, env in enumerate(scripts_of(envs)):
        for step, given in zip(seen.steps, env.observations[1:], strict=True):
            for leaf, expected in zip(leaves(step.observation), canonical(SPACES[kind], given), strict=True):
                np.testing.assert_allclose(leaf[index], expected, rtol=1e-6)


def test_float64_is_kept_as_float32() -> None:
    seen = walk(made("tests.envs.custom:scripted", 1, observe="float64"), 1)
    assert seen.observation.dtype == np.float32


@pytest.mark.parametrize("kind", [name for name in ROUND_TRIP if name not in ("scalar", "image", "nested")])
def test_actions_arrive_as_the_environment_wants_them(kind: str) -> None:
    envs = made("tests.envs.custom:scripted", 2, act=kind)
    walk(envs, 7)
    for env in scripts_of(envs):
        assert env.actions
        assert all(env.action_space.contains(action) for action in env.actions), env.actions[0]


def test_discrete_choices_count_from_zero_for_the_agent() -> None:
    envs = made("rlframe.envs.debug_envs:discrete_start", 4)
    seen = walk(envs, 30)
    assert set(np.unique(seen.observation)) == {0, 1, 2}


@pytest.mark.parametrize(("kind", "said"), [("text", "is not supported; use Box"), ("integers", "holds integers")])
def test_an_unsupported_action_space_is_an_error(kind: str, said: str) -> None:
    with pytest.raises(ConfigError, match=f"action space .* {said}"):
        made("tests.envs.custom:scripted", 1, act=kind)


@pytest.mark.parametrize(
    "kind", ["discrete", "discrete_start", "box", "multi_discrete", "multi_binary", "dict", "tuple"]
)
def test_identity_rewards_the_right_answer_fully(kind: str) -> None:
    envs = made("rlframe.envs.debug_envs:identity", 3, action=kind)
    rows = rows_for(envs)
    envs.reset(rows)
    for _ in range(5):
        answer = map_tree(np.copy, rows.observation)
        for (_, space), leaf in zip(action_parts(envs.action_space), leaves(answer), strict=True):
            if isinstance(space, spaces.Box):  # observed as it is, answered in [-1, 1]
                leaf[...] = 2 * (leaf - space.low) / (space.high - space.low) - 1
        envs.step(answer, rows)
        np.testing.assert_allclose(rows.reward, 1.0, atol=1e-6)


def test_memory_shows_its_cue_once_and_asks_at_the_end() -> None:
    envs = made("rlframe.envs.debug_envs:memory", 2, delay=3, cues=2)
    seen = walk(envs, 4)
    cue = seen.start
    assert (cue[:, :2].sum(axis=1) == 1).all()
    assert not seen.observation[:2].any()
    np.testing.assert_array_equal(seen.observation[2], [[0, 0, 1]] * 2)
    assert seen.terminated[3].all()


def test_a_delayed_reward_is_for_the_first_action() -> None:
    envs = made("rlframe.envs.debug_envs:delayed_reward", 1, delay=2)
    rows = rows_for(envs)
    for first, expected in ((1, 1.0), (0, 0.0)):
        envs.reset(rows)
        rewards = []
        for action in (first, 2, 2):
            envs.step(np.array([action]), rows)
            rewards.append(float(rows.reward[0]))
        assert rewards == [0.0, 0.0, expected]
        assert rows.terminated.all()


def test_an_observation_at_a_float64_bound_is_within_it_as_it_is_rounded_to_float32() -> None:
    check = BoundsCheck(spaces.Box(-np.pi, np.pi, (2,), np.float64))
    at_bound = np.full((2, 1, 2), np.pi, np.float32)
    check.check(at_bound)
    assert check.n_outside == 0
    check.check(np.nextafter(at_bound, np.float32(4.0)))
    assert check.n_outside == 1
    largest = np.finfo(np.float64).max
    check = BoundsCheck(spaces.Box(-largest, np.array([largest, 1.0]), (2,), np.float64))
    check.check(at_bound)
    assert check.n_outside == 1, "of the bound that is finite in float32"


class Small(gymnasium.Env[Any, Any]):
    """Rewards by the largest int8; its observation space may depend on its index."""

    action_space = spaces.Discrete(2)
    closed: ClassVar[list[int]] = []

    def __init__(self, env_index: int, same: bool = True) -> None:
        self.observation_space, self.index = spaces.Box(-1, 1, (1 if same else 1 + env_index,)), env_index

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        return np.zeros(1, np.float32), np.int8(127), False, False, {}

    def close(self) -> None:
        self.closed.append(self.index)


def test_rewards_that_are_small_integers_are_checked_without_overflow() -> None:
    assert walk(make_envs(EnvConfig(Small), 2, [1, 2]), 2).reward.tolist() == [[127, 127]] * 2


def test_environments_whose_spaces_differ_are_closed() -> None:
    Small.closed.clear()
    with pytest.raises(EnvError, match="environment 1 has different spaces"):
        make_envs(EnvConfig(Small, {"same": False}), 2, [1, 2])
    assert Small.closed == [0, 1]


@pytest.mark.parametrize("number", [2, -1, 256, 257])
def test_a_bit_that_is_none_is_an_error_and_not_its_last_byte(number: int) -> None:
    space = spaces.MultiBinary(2)
    envs = PythonEnvs([lambda: Converted(space, lambda: np.array([0, number]))], [0], 0)
    with pytest.raises(EnvError, match=r"the observation is outside MultiBinary\(2\)"):
        envs.reset(rows_for(envs))
    rows, write = np.zeros((1, 2), np.int8), batch_writer(space, 1, lambda text: None)

    def receive() -> None:
        write(rows, np.array([[0, number]]))
        batch_checker(space)(rows)

    with pytest.raises(InvalidValue, match=r"the observation is outside MultiBinary\(2\)"):
        receive()
