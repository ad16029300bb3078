"""What a batch of environments is: the interface that every backend serves."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from gymnasium import Space

from rlframe.core.errors import ReadableError
from rlframe.core.struct import Struct, Tree


@dataclass(frozen=True)
class EnvConfig:
    """Which environment: everything a process needs to make its own copies."""

    id: str | Callable[..., Any]  # a Gymnasium id, "package.module:callable", or a picklable callable
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    backend: str = "auto"  # auto | native | envpool | python
    n_threads: int = 0  # of a native vector environment; 0: one per CPU of the process, at most one per environment


@dataclass(frozen=True, eq=False)
class EnvStep(Struct):
    """Where `Envs.step` writes, in place: NumPy arrays with leading dimension [B].

    A sampler hands in views of its rows: the action's row t, and for `observation` and `first` the next row.
    """

    observation: Tree  # after the step (row t+1)
    first: np.ndarray  # bool: that observation begins an episode for the agent: after a reset or a lost life (row t+1)
    reward: np.ndarray  # float32, as learned from: clipped where asked
    terminated: np.ndarray  # bool, as learned from: set also by a lost life where asked
    truncated: np.ndarray  # bool
    valid: np.ndarray  # bool: False where the action was ignored because the episode had ended: this step was the reset
    score: np.ndarray  # float32: the environment's own reward
    ended: np.ndarray  # bool: the episode really ended; the next step resets


class EnvError(ReadableError):
    """An environment raised, or returned what its spaces forbid. Names environment index, seed, step and action.

    The cause is the environment's own exception, if there was one.
    """

    shows_cause = True


def fault(what: str, remedy: str, **facts: Any) -> EnvError:
    """An EnvError that says what is wrong, the facts to find it again by, and what to do."""
    known = ", ".join(f"{name} {_short(value)}" for name, value in facts.items())
    return EnvError(f"{what} ({known}); {remedy}")


def _short(value: Any) -> str:
    text = " ".join(str(value).split())
    return text if len(text) <= 200 else f"{text[:200]}..."


class Envs(ABC):
    """B environments stepped together under NEXT_STEP autoreset."""

    observation_space: Space  # of one environment
    action_space: Space  # of one environment, not canonical
    n: int
    backend: str  # for the log: what steps, on how many threads

    @abstractmethod
    def reset(self, out: EnvStep, round_: int = 0) -> None:
        """Start every environment anew, from its seed; writes `observation`, sets `first`.

        In another round than 0 all seeds are others, which follow from it and theirs.
        """

    @abstractmethod
    def step(self, action: Tree, out: EnvStep) -> None:
        """Decode and apply canonical actions [B, ...]; writes every field of `out`.

        Raises:
            EnvError: an environment raised, or gave NaN, Inf, a wrong shape or dtype.
        """

    @abstractmethod
    def pop_diagnostics(self, index: int) -> dict[str, float]:
        """Means of the numeric infos of environment `index` since its episode began; forgets them."""

    def state(self) -> list[Any]:
        """What `restore` needs of each environment, between two steps: arrays and plain values; None: it tells none."""
        return [None] * self.n

    def restore(self, states: Sequence[Any], out: EnvStep, tick: Callable[[], None]) -> list[str]:
        """Bring fresh environments to where those were whose `state` this is; `out` has their observations then.

        Where that cannot be, an episode begins: its observation and `first` are written into `out`.

        Args:
            tick: called while an episode is played again, step by step, as a sign of life.
        Returns:
            Why an episode had to begin, for each environment; empty where it goes on.
        Raises:
            EnvError: an environment could not be reset.
        """
        self.reset(out)
        return [f"{self.backend} does not tell its state"] * self.n

    @abstractmethod
    def frame(self, index: int) -> np.ndarray:
        """A picture [H, W, 3] uint8 of environment `index` now.

        Raises:
            EnvError: it cannot be drawn.
        """

    @abstractmethod
    def close(self) -> None:
        """Free what the environments hold. May be called twice."""
