"""The interface of a batch of environments, implemented by every backend, and the means of what `info` reports."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from gymnasium import Space

from rlframe.core.arguments import check_fields
from rlframe.core.errors import ReadableError, one_line
from rlframe.core.multi_agent import PolicyMap
from rlframe.core.ranks import current_ranks
from rlframe.core.reduction import reduction_of
from rlframe.core.struct import Struct, Tree
from rlframe.envs.options import EnvOptions, clip_bounds
from rlframe.system.signals import DeadlinePassed, deadline

RewardTransform = Callable[[np.ndarray, np.ndarray], Any]  # (reward, out), see `reward_transform`

_log = logging.getLogger("rlframe")


@dataclass(frozen=True)
class EnvConfig:
    """Which environment to make. Picklable, so that a worker process can make its own copies."""

    id: str | Callable[..., Any]  # a Gymnasium id, "package.module:callable", or a picklable callable
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    backend: str = "auto"  # auto | native | envpool | python
    n_threads: int = 0  # of a native vector environment or EnvPool; 0: one per CPU, at most one per environment
    options: EnvOptions = field(default_factory=EnvOptions)  # time limit, rewards, wrappers
    mode: str = "train"  # train | eval, for a creator that takes it
    rank: int | None = None  # for a creator that takes it; None: that of this process
    gpus: tuple[int, ...] = ()  # on which workers render MuJoCo's images in turn, with MUJOCO_GL=egl; (): all
    whole_episodes: bool = False  # start an episode only where the rest of the batch has room for it
    restarts: int = 0  # times that an environment which raised is made again
    policies: PolicyMap = field(default_factory=PolicyMap)  # of an environment of several agents

    def __post_init__(self) -> None:
        """Raise TypeError for a part in the wrong place."""
        check_fields(self, EnvConfig)

    def own_rank(self) -> int:
        """What a creator is told."""
        return current_ranks().rank if self.rank is None else self.rank


@dataclass(frozen=True, eq=False)
class EnvStep(Struct):
    """The arrays that `Envs.step` writes in place: NumPy, with leading dimension [B].

    For step t they are views of row t of a batch, except `observation`, `first` and `reward`, which are row t + 1.
    """

    observation: Tree  # after the step
    first: np.ndarray  # bool: that observation starts an episode for the agent (after a reset or a lost life)
    reward: np.ndarray  # float32, for learning: clipped if configured
    terminated: np.ndarray  # bool, for learning: also set by a lost life if configured
    truncated: np.ndarray  # bool
    valid: np.ndarray  # bool: False if this step was the reset, which ignores the action
    raw_reward: np.ndarray  # float32: the environment's own reward
    ended: np.ndarray  # bool: the real episode ended; the next step resets


class EnvError(ReadableError):
    """An environment raised an exception (the cause), or returned a value that its spaces do not allow."""

    shows_cause = True


def env_error(problem: str, remedy: str, **facts: Any) -> EnvError:
    """An EnvError whose message is the problem, the facts needed to reproduce it, and the remedy."""
    listed = ", ".join(f"{name} {one_line(value)}" for name, value in facts.items())
    return EnvError(f"{problem} ({listed}); {remedy}")


class Envs(ABC):
    """B environments that step together under NEXT_STEP autoreset."""

    observation_space: Space  # of one environment
    action_space: Space  # of one environment, before it is made canonical (see core.spaces)
    n: int
    env: EnvConfig | None = None  # that they were made from, by make_envs
    transform: RewardTransform | None = None  # which writes `reward` from `raw_reward`; None: they are the same
    backend: str  # for the log: the implementation and its number of threads
    render_fps: float = 30.0  # frames per second of real time, for films and windows

    @abstractmethod
    def reset(self, out: EnvStep, round_: int = 0) -> None:
        """Reset every environment from its seed; writes `observation` and sets `first`.

        Round 0 uses the environments' own seeds, every other round seeds derived from them (see `round_seed`).
        """

    @abstractmethod
    def step(self, action: Tree, out: EnvStep) -> None:
        """Apply canonical actions [B, ...]; writes every field of `out`.

        Raises EnvError if an environment raised, or returned NaN, Inf, a wrong shape or a wrong dtype.
        """

    def write_outcome(self, out: EnvStep, reward: Any, terminated: Any, truncated: Any, was_reset: np.ndarray) -> None:
        """Write what a step gave [n], but its observation; `was_reset`: whether it was the reset."""
        out.raw_reward[...] = reward
        out.reward[...] = out.raw_reward
        if self.transform is not None:
            self.transform(out.raw_reward, out.reward)
        out.terminated[...] = terminated
        out.truncated[...] = truncated
        np.logical_or(out.terminated, out.truncated, out=out.ended)
        out.first[...] = was_reset
        np.logical_not(was_reset, out=out.valid)

    can_wait = False  # whether it has `hold`
    time_limit = 0  # env steps of the longest episode; 0: not known
    restarts = 0  # times that each environment which raises is made again
    restarted: Sequence[int] = ()  # those that raised in the last step, and whose new episode starts with its row

    def hold(self, which: frozenset[int], at_once: bool = False) -> None:
        """Make these environments wait at the end of their episode instead of resetting, until the next call.

        With `at_once` they wait in the middle of their episode. While one waits, its rows are not valid and its
        observation is not written.
        """
        raise NotImplementedError(f"the environments of {self.backend} step all at once")

    @abstractmethod
    def pop_diagnostics(self, index: int) -> dict[str, float]:
        """Means of the numbers in `info` over the running episode of environment `index`; resets them."""

    def state(self) -> list[Any]:
        """The state of each environment as arrays and plain values, for `restore`; None if it cannot be saved."""
        return [None] * self.n

    def restore(self, states: Sequence[Any], out: EnvStep, tick: Callable[[], None]) -> list[str]:
        """Restore freshly made environments to saved states; `out` holds the saved observations.

        An environment that cannot be restored starts a new episode; its `observation` and `first` are overwritten.
        Returns for each environment the reason, or "" if it was restored. Raises EnvError if one cannot be reset.
        `tick` is called after each step of a replayed episode, as a heartbeat.
        """
        self.reset(out)
        return [f"{self.backend} cannot save its state"] * self.n

    def counters(self) -> dict[str, float]:
        """Metrics of what steps them, for the log."""
        return {}

    @abstractmethod
    def frame(self, index: int) -> np.ndarray:
        """An image [H, W, 3] uint8 of environment `index` now. Raises EnvError if it cannot be rendered."""

    @abstractmethod
    def close(self) -> None:
        """Close the environments. May be called twice."""


CLOSE_S = 5.0  # for environments of this process to close


def close_envs(envs: Sequence[Any], first: int = 0) -> None:
    """Close environments; one whose `close` does not return within CLOSE_S is left as it is, with a warning.

    An error in closing must not hide the error that led to it.
    """
    last = time.monotonic() + CLOSE_S
    for index, env in enumerate(envs, first):
        try:
            with deadline(max(0.1, last - time.monotonic())):
                env.close()
        except DeadlinePassed:
            _log.warning(f"environment {index} did not close within {CLOSE_S:g} s and is left open; fix its close()")
        except (Exception, SystemExit):
            continue


_NUMBERS = (int, float, np.bool_, np.integer, np.floating)  # bool is an int
# Types that can be added to a float directly. An int may overflow, and float32 would lower the sum's precision.
_ADDABLE = frozenset({float, bool, np.bool_, np.float64, np.int64, np.int32})
_MAX_PENDING = 32  # infos


class InfoMeans:
    """Running means, by name, of the numbers in one environment's `info`. Other values are ignored.

    A name that ends in _sum, _last, _min or _max has that instead of the mean (see core.reduction).
    """

    def __init__(self) -> None:
        self._sums: dict[str, list[float]] = {}  # name: [sum, count]
        self._others: dict[str, float] = {}  # name: its number so far, not a mean
        self._pending: list[dict[Any, Any]] = []

    def add(self, info: Mapping[Any, Any]) -> None:
        """Add one step's `info`; never raises. Sums 32 at a time, which is faster than one by one."""
        self._pending.append(
            {  # the environment may reuse its dict, and an array in it
                name: value[()] if isinstance(value, np.ndarray) and not value.shape else value
                for name, value in info.items()
            }
        )
        if len(self._pending) >= _MAX_PENDING:
            self._add_pending()

    def _add_pending(self) -> None:
        sums = self._sums
        for info in self._pending:
            for name, value in info.items():
                entry = sums.get(name)
                if entry is not None and type(value) in _ADDABLE:  # HalfCheetah's four entries: 0.6 instead of 2 us
                    entry[0] += value
                    entry[1] += 1.0
                elif isinstance(value, _NUMBERS):
                    try:
                        number = float(value)
                    except OverflowError:  # an int too large for a float
                        continue
                    self._add(str(name), number)
        self._pending.clear()

    def _add(self, name: str, number: float) -> None:
        if reduce := reduction_of(name):
            self._others[name] = reduce(self._others[name], number) if name in self._others else number
        else:
            entry = self._sums.setdefault(name, [0.0, 0.0])
            entry[0] += number
            entry[1] += 1.0

    def clear(self) -> None:
        self._sums, self._others = {}, {}
        self._pending.clear()

    def pop(self) -> dict[str, float]:
        """The numbers so far; starts over."""
        found = {name: total / count if count else total for name, (total, count) in self.state().items()}
        self.clear()
        return found

    def state(self) -> dict[str, list[float]]:
        """By name: [sum, count], or [number, 0] if it is not a mean."""
        self._add_pending()
        means = {name: [float(total), float(count)] for name, (total, count) in self._sums.items()}
        return means | {name: [number, 0.0] for name, number in self._others.items()}

    def load(self, saved: Mapping[str, Sequence[float]]) -> None:
        self.clear()
        self._sums = {name: list(entry) for name, entry in saved.items() if entry[1]}
        self._others = {name: entry[0] for name, entry in saved.items() if not entry[1]}


_VECTOR_REDUCTIONS: Mapping[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "last": lambda before, values: values,
    "min": np.minimum,
    "max": np.maximum,
}


class VectorInfoMeans:
    """InfoMeans for a vector environment, whose infos are arrays [n], with Gymnasium's `_name` masks if present."""

    def __init__(self, n: int) -> None:
        self._n = n
        self._sums: dict[str, np.ndarray] = {}  # name: [2, n], sums (or other reductions) and counts

    def add(self, infos: Any, valid: np.ndarray) -> None:
        """Add one step's infos for the environments that are `valid` [n]; never raises."""
        for key, values in infos.items():
            name = str(key)
            is_mask = name.startswith("_") and name[1:] in infos
            numbers = isinstance(values, np.ndarray) and values.shape == (self._n,) and values.dtype.kind in "biuf"
            if is_mask or not numbers:
                continue
            mask = infos.get(f"_{name}")
            counted = valid & mask if isinstance(mask, np.ndarray) and mask.dtype == np.bool_ else valid
            entry = self._sums.setdefault(name, np.zeros((2, self._n)))
            if reduction_of(name) and (reduce := _VECTOR_REDUCTIONS.get(name.rpartition("_")[2])):
                combined = np.where(entry[1] > 0, reduce(entry[0], values), values)
                np.copyto(entry[0], combined, where=counted)
            else:
                np.add(entry[0], values, out=entry[0], where=counted)
            entry[1] += counted

    def clear(self, which: np.ndarray) -> None:
        """Start over for the environments in the mask `which` [n]."""
        for entry in self._sums.values():
            entry[:, which] = 0.0

    def pop(self, index: int) -> dict[str, float]:
        """The means of environment `index` so far; starts over."""
        entries = {name: entry[:, index] for name, entry in self._sums.items() if entry[1, index]}
        means = {
            name: float(value if reduction_of(name) else value / count) for name, (value, count) in entries.items()
        }
        for entry in entries.values():
            entry[:] = 0.0
        return means

    def state(self) -> dict[str, np.ndarray]:
        return {name: entry.copy() for name, entry in self._sums.items()}

    def load(self, saved: Mapping[str, np.ndarray]) -> None:
        self._sums = {name: entry.copy() for name, entry in saved.items()}


def reward_transform(options: EnvOptions) -> RewardTransform:
    """A function (reward, out) that writes clip(scale * reward) into `out`; both are float32 arrays of any shape."""
    scale = np.float32(options.reward_scale)
    if options.reward_clip == "sign":
        return lambda reward, out: np.sign(reward, out=out)
    low, high = clip_bounds(options.reward_clip)

    def transform(reward: np.ndarray, out: np.ndarray) -> None:
        np.multiply(reward, scale, out=out)
        np.clip(out, low, high, out=out)

    return transform
