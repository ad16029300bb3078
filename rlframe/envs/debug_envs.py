"""Small environments for tests and debugging: each needs one ability of an algorithm, or shows one kind of fault."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.spaces import Space
from gymnasium.wrappers import TransformObservation

from rlframe.core.config import check_one_of
from rlframe.core.errors import ConfigError
from rlframe.core.spaces import action_parts
from rlframe.core.struct import Tree, leaves

Info = dict[str, Any]

_N_CHOICES = 3


def _space(kind: str) -> Space:
    level = spaces.Box(-2.0, 4.0, (1,), np.float32)  # not centred on 0, so that a missed rescaling shows
    known: dict[str, Space] = {
        "discrete": spaces.Discrete(_N_CHOICES),
        "discrete_start": spaces.Discrete(_N_CHOICES, start=5),
        "box": level,
        "multi_discrete": spaces.MultiDiscrete([2, 3]),
        "multi_binary": spaces.MultiBinary(2),
        "dict": spaces.Dict({"which": spaces.Discrete(_N_CHOICES), "level": level}),
        "tuple": spaces.Tuple((spaces.Discrete(2), spaces.MultiBinary(2))),
    }
    check_one_of("env_kwargs.action", kind, known)
    return known[kind]


class Identity(gymnasium.Env):
    """The observation is an element of the action space (see `_space`), and the right action is that element.

    The reward is the mean score over the parts of the space: 1 for a correct choice; for a Box, 1 minus twice the
    distance relative to its range, at least 0. A new random element is observed at each step.
    """

    def __init__(self, action: str = "discrete", length: int = 8) -> None:
        self.action_space = self.observation_space = _space(action)
        self._length, self._time = length, 0
        self._target: Tree = None

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[Tree, Info]:
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        self._time, self._target = 0, self.observation_space.sample()
        return self._target, {}

    def step(self, action: Tree) -> tuple[Tree, float, bool, bool, Info]:
        parts = zip(action_parts(self.action_space), leaves(action), leaves(self._target), strict=True)
        reward = float(np.mean([_part_score(space, given, target) for (_, space), given, target in parts]))
        self._time, self._target = self._time + 1, self.observation_space.sample()
        return self._target, reward, self._time >= self._length, False, {}


def _part_score(space: Space, given: Any, target: Any) -> float:
    if isinstance(space, spaces.Box):
        distance = np.abs(given - target) / (space.high - space.low)
        return float(np.maximum(0.0, 1.0 - 2.0 * distance).mean())
    return float(np.mean(given == target))


class MemoryTask(gymnasium.Env):
    """The first observation [cue one-hot, last step] shows a cue; naming it in the last action gives a reward of 1."""

    def __init__(self, delay: int = 4, cues: int = 2) -> None:
        self.observation_space = spaces.Box(0.0, 1.0, (cues + 1,), np.float32)
        self.action_space = spaces.Discrete(cues)
        self._delay, self._cues = delay, cues
        self._time = self._cue = 0

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[np.ndarray, Info]:
        super().reset(seed=seed)
        self._time, self._cue = 0, int(self.np_random.integers(self._cues))
        return self._observation(), {}

    def _observation(self) -> np.ndarray:
        observation = np.zeros(self._cues + 1, np.float32)
        if self._time == 0:
            observation[self._cue] = 1.0
        if self._time == self._delay:
            observation[-1] = 1.0
        return observation

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, Info]:
        last = self._time == self._delay
        reward = float(last and action == self._cue)
        self._time += 1
        return self._observation(), reward, last, False, {}


class TimeLimit(gymnasium.Env):
    """A reward of 1 for each of `length` steps, whatever the action. The observation is the number of steps so far.

    The value is 1 / (1 - γ) with truncation, and (1 - γ^(length - k)) / (1 - γ) at step k with termination.
    """

    def __init__(self, ends: str = "truncated", length: int = 5) -> None:
        check_one_of("env_kwargs.ends", ends, ("truncated", "terminated"))
        self.observation_space = spaces.Discrete(length + 1)
        self.action_space = spaces.Discrete(2)
        self._terminates, self._length, self._time = ends == "terminated", length, 0

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[int, Info]:
        super().reset(seed=seed)
        self._time = 0
        return 0, {}

    def step(self, action: int) -> tuple[int, float, bool, bool, Info]:
        self._time += 1
        over = self._time >= self._length
        return self._time, 1.0, over and self._terminates, over and not self._terminates, {}


class DelayedReward(gymnasium.Env):
    """Rewards the first action by 1, `delay` steps later, at the end. The observation is the number of steps so far."""

    right = 1  # the action to take first

    def __init__(self, delay: int = 4) -> None:
        self.observation_space = spaces.Discrete(delay + 2)
        self.action_space = spaces.Discrete(_N_CHOICES)
        self._delay, self._time, self._first = delay, 0, 0

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[int, Info]:
        super().reset(seed=seed)
        self._time = 0
        return 0, {}

    def step(self, action: int) -> tuple[int, float, bool, bool, Info]:
        if self._time == 0:
            self._first = int(action)
        over = self._time == self._delay
        self._time += 1
        return self._time, float(over and self._first == self.right), over, False, {}


def _grid(size: int, n: int, shuffled: bool) -> np.ndarray:
    """The cell [size * size, n] that each of n actions leads to from each cell, -1 where it is forbidden."""
    rng, last = np.random.default_rng(0), size - 1
    found = np.full((size * size, n), -1)
    for cell, of_cell in enumerate(found):
        y, x = divmod(cell, size)
        moves = [(y > 0, cell - size), (y < last, cell + size), (x > 0, cell - 1), (x < last, cell + 1)]
        places = rng.permutation(n)[:4] if shuffled else np.arange(4)
        of_cell[places] = [to if allowed else -1 for allowed, to in moves]
    return found


class Masked(gymnasium.Env):
    """A square grid to cross from one corner to the other, where each cell allows some moves only; others raise.

    The observation is {"observation": cell one-hot, "action_mask"}. Moves: up, down, left, right, and `n_traps` more,
    never allowed; `shuffled`: which actions are the moves differs from cell to cell. `kind` multi_discrete: two moves
    at once, with half a mask each. A step costs 0.1, the goal gives 1. With `penalty`, a forbidden move ends the
    episode with a reward of -1 instead of an error, and there is no mask.
    """

    def __init__(
        self, size: int = 4, n_traps: int = 4, kind: str = "discrete", penalty: bool = False, shuffled: bool = False
    ) -> None:
        check_one_of("env_kwargs.kind", kind, ("discrete", "multi_discrete"))
        n, n_parts = 4 + n_traps, 2 if kind == "multi_discrete" else 1
        self.action_space = spaces.MultiDiscrete([n, n]) if n_parts == 2 else spaces.Discrete(n)
        cell, mask = spaces.Box(0.0, 1.0, (size * size,), np.float32), spaces.MultiBinary(n * n_parts)
        self.observation_space = cell if penalty else spaces.Dict({"observation": cell, "action_mask": mask})
        self._next = _grid(size, n, shuffled)
        self._masks = np.tile(self._next >= 0, n_parts).astype(np.int8)
        self._cells, self._penalty = np.eye(size * size, dtype=np.float32), penalty
        self._at = self._time = 0

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[Tree, Info]:
        super().reset(seed=seed)
        self._at = self._time = 0
        return self._observation(), {}

    def _observation(self) -> Tree:
        cell = self._cells[self._at].copy()
        return cell if self._penalty else {"observation": cell, "action_mask": self._masks[self._at].copy()}

    def step(self, action: Any) -> tuple[Tree, float, bool, bool, Info]:
        cells = self._next[self._at, action]
        self._time += 1
        if np.min(cells) < 0:
            if not self._penalty:
                raise ValueError(f"move {action} is forbidden in cell {self._at}, which has {self._masks[self._at]}")
            return self._observation(), -1.0, True, False, {}
        self._at = int(cells.flat[0])
        done = self._at == len(self._cells) - 1
        return self._observation(), float(done) - 0.1, done, self._time >= 50, {}


class Corridor(gymnasium.Env):
    """Cells in a row, the observation is the cell one-hot; reaching the last one gives the only reward, 1, and ends.

    In each cell one of the actions goes a cell on and the others a cell back; from the first they do not. Which one was
    drawn once for all corridors, so that no constant action leads on. An episode ends after `max_episode_steps`, by
    default twice as many as cells; random actions reach the end of 60 cells in one of 16 million episodes.
    """

    def __init__(self, length: int = 60, n_actions: int = 2, max_episode_steps: int = 0) -> None:
        self.observation_space = spaces.Box(0.0, 1.0, (length,), np.float32)
        self.action_space = spaces.Discrete(n_actions)
        self._on = np.random.default_rng(0).integers(n_actions, size=length)  # the action that goes on
        self._length, self._longest, self._at, self._time = length, max_episode_steps or 2 * length, 0, 0

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[np.ndarray, Info]:
        super().reset(seed=seed)
        self._at = self._time = 0
        return self._observation(), {}

    def _observation(self) -> np.ndarray:
        observation = np.zeros(self._length, np.float32)
        observation[self._at] = 1.0
        return observation

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, Info]:
        self._at = max(self._at + (1 if action == self._on[self._at] else -1), 0)
        self._time += 1
        done = self._at == self._length - 1
        return self._observation(), float(done), done, self._time >= self._longest, {}


FAULTS = ("raise", "nan", "inf", "shape", "dtype", "info", "reward_nan", "reward_inf", "reward_type", "reset")


class Faulty(gymnasium.Env):
    """Behaves correctly until step `at` of an episode, then shows one of FAULTS; "reset" raises in the next reset."""

    def __init__(self, fault: str = "raise", at: int = 3) -> None:
        check_one_of("env_kwargs.fault", fault, FAULTS)
        self.observation_space = spaces.Box(-1.0, 1.0, (2,), np.float32)
        self.action_space = spaces.Discrete(2)
        self._fault, self._at, self._time, self._broken = fault, at, 0, False

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[np.ndarray, Info]:
        super().reset(seed=seed)
        if self._broken:
            raise RuntimeError("the simulator did not come back")
        self._time = 0
        return np.zeros(2, np.float32), {}

    def step(self, action: int) -> tuple[np.ndarray, Any, bool, bool, Info]:
        self._time += 1
        observation: np.ndarray = np.zeros(2, np.float32)
        if self._time < self._at:
            return observation, 0.0, False, False, {}
        self._broken = self._fault == "reset"
        if self._fault == "raise":
            raise RuntimeError("the simulator diverged")
        observations: dict[str, np.ndarray] = {
            "nan": np.array([0, np.nan], np.float32),
            "inf": np.array([np.inf, 0], np.float32),
            "shape": np.zeros(3, np.float32),
            "dtype": np.zeros(2, np.complex64),
        }
        rewards: Info = {"reward_nan": float("nan"), "reward_inf": float("inf"), "reward_type": "a lot"}
        info: Any = None if self._fault == "info" else {}
        return observations.get(self._fault, observation), rewards.get(self._fault, 0.0), self._broken, False, info


class HiddenActions(gymnasium.Wrapper):
    """Hides the two actions of an environment among `n` candidates, in a new random order at every step.

    The observation is {"available_actions" [n, size], "observation"}. The two are fixed vectors of ±1, the others
    uniform in [-1, 1]; choosing one of these takes one of the two actions at random. With `masked`, an entry
    `action_mask` forbids them, and choosing one raises.
    """

    def __init__(self, env: gymnasium.Env, n: int = 20, size: int = 8, masked: bool = False) -> None:
        if n < 2 or size < 2:
            raise ConfigError(f"env_kwargs.n={n} and env_kwargs.size={size} must be at least 2")
        super().__init__(env)
        places = np.arange(size)
        self._true = np.stack([1 - 2 * (places % 2), 1 - 2 * (places // 2 % 2)]).astype(np.float32)  # left and right
        self._order, self._masked = np.arange(n), masked  # 0 and 1 of the order are the two
        entries: dict[str, Space] = {"observation": env.observation_space}
        entries["available_actions"] = spaces.Box(-1.0, 1.0, (n, size), np.float32)
        if masked:
            entries["action_mask"] = spaces.MultiBinary(n)
        self.observation_space, self.action_space = spaces.Dict(entries), spaces.Discrete(n)

    def reset(self, **kwargs: Any) -> tuple[Tree, Info]:
        observation, info = self.env.reset(**kwargs)
        return self._with_candidates(observation), info

    def step(self, action: Any) -> tuple[Tree, Any, bool, bool, Info]:
        hidden = int(self._order[action])
        if hidden > 1:
            if self._masked:
                raise ValueError(f"action {action} is forbidden; {np.flatnonzero(self._order < 2)} are allowed")
            hidden = int(self.np_random.integers(2))
        observation, reward, terminated, truncated, info = self.env.step(hidden)
        return self._with_candidates(observation), reward, terminated, truncated, info

    def _with_candidates(self, observation: Any) -> Tree:
        self._order = self.np_random.permutation(len(self._order))
        features = self.np_random.uniform(-1.0, 1.0, (len(self._order), self._true.shape[1])).astype(np.float32)
        is_true = self._order < 2
        features[is_true] = self._true[self._order[is_true]]
        entries = {"observation": observation, "available_actions": features}
        return entries | {"action_mask": is_true.astype(np.int8)} if self._masked else entries


def _cartpole(**kwargs: Any) -> gymnasium.Env:
    """CartPole-v1 without its time limit."""
    return gymnasium.make("CartPole-v1", max_episode_steps=-1, disable_env_checker=True, **kwargs).unwrapped


def hidden_cartpole(
    n: int = 20, size: int = 8, masked: bool = False, max_episode_steps: int = 500, **kwargs: Any
) -> gymnasium.Env:
    """CartPole-v1 whose two actions are hidden among `n` candidates (see HiddenActions)."""
    return gymnasium.wrappers.TimeLimit(HiddenActions(_cartpole(**kwargs), n, size, masked), max_episode_steps)


def masked_cartpole(max_episode_steps: int = 500, **kwargs: Any) -> gymnasium.Env:
    """CartPole-v1 without velocities: [cart position, pole angle]. Needs memory."""
    env = _cartpole(**kwargs)
    whole = env.observation_space
    assert isinstance(whole, spaces.Box)
    positions = spaces.Box(whole.low[::2], whole.high[::2], dtype=np.float32)
    masked = TransformObservation(env, lambda observation: observation[::2], positions)
    return gymnasium.wrappers.TimeLimit(masked, max_episode_steps)


# Used as ids, for example env=rlframe.envs.debug_envs:identity
identity, memory, time_limit, delayed_reward, faulty = Identity, MemoryTask, TimeLimit, DelayedReward, Faulty
masked, corridor = Masked, Corridor


def discrete_start(**kwargs: Any) -> Identity:
    """`Identity` whose actions begin at 5."""
    return Identity("discrete_start", **kwargs)
