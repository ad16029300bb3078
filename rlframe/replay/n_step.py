"""Replay of transitions: those over n steps, and the first priorities of new rows by the errors of acting."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rlframe.core.spaces import ACTION_MASK, allowed
from rlframe.core.struct import Tree, as_numpy, map_tree
from rlframe.core.types import Array, Samples
from rlframe.ops.returns import n_step_return
from rlframe.replay.arrays import HostMemory, concatenate, read_rows, spans, write_rows
from rlframe.replay.base import Transitions
from rlframe.replay.buffer import Reader, ReaderConfig
from rlframe.replay.select import PRIORITY_EPSILON, Candidates
from rlframe.replay.storage import Storage

_LONGEST_GAP = 1_000  # absent rows over which returns reach
_LOOK_BACK = 32  # rows of a device whose returns are computed again after absent rows, which nobody counts there


class TransitionConfig(ReaderConfig[Transitions]):
    """Base class of configs of transitions, any row of which may be a candidate."""

    def spacing(self, T: int) -> int:
        return 1

    def join(self, parts: list[Transitions]) -> Transitions:
        return map_tree(concatenate, *parts)


class TransitionReader(Reader[Transitions]):
    """Base class of readers of transitions, whose subclasses compute what is known of each. Candidates: row indices."""

    _return: Array  # [L, B] G
    _bootstrap: Array  # [L, B] γ^k; 0 after termination
    _steps: Array  # [L, B] k, from a row to the one that it bootstraps from; [1, 1] where that is always the next

    def __init__(self, storage: Storage, config: TransitionConfig, prioritized: bool) -> None:
        ring, memory = storage.ring, storage.memory
        self._storage, self.config = storage, config
        # the tree of priorities is on the host
        self.candidates = Candidates(ring.n_slots, HostMemory(memory.device) if prioritized else memory)

    def read(self, numbers: Array, weight: torch.Tensor) -> Transitions:
        storage, B = self._storage, self._storage.ring.B
        rows = storage.memory.own(numbers)
        at = storage.locate(rows)
        if len(self._steps) == 1:
            inputs, next_inputs = storage.inputs_pair(at, storage.locate(rows + B))
        else:
            steps = self._steps.reshape(-1).take(at) + 0 * at  # int64
            inputs, next_inputs = storage.inputs(at), storage.inputs(storage.locate(rows + steps * B))
        return Transitions(
            inputs=inputs,
            action=storage.actions(at),
            return_=storage.values(self._return, at),
            bootstrap=storage.values(self._bootstrap, at),
            next_inputs=next_inputs,
            weight=weight,
            index=numbers,
        )

    def state_dict(self) -> dict[str, Any]:
        return {name: as_numpy(array[: self._storage.ring.n_used]) for name, array in self._arrays().items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for name, array in self._arrays().items():
            array[: len(state[name])] = self._storage.memory.own(state[name])

    def _arrays(self) -> dict[str, Array]:
        """The arrays of its own, by name."""
        return {"return": self._return, "bootstrap": self._bootstrap, "steps": self._steps}


@dataclass(frozen=True)
class NStep(TransitionConfig):
    """Transitions over up to n rewards. Every valid row is a candidate, except the newest n - 1 per environment.

    With `td_priorities` the newest n: of those after them, the Q-value of the bootstrap is known.
    """

    discount: float  # γ per env step
    n: int = 1
    td_priorities: bool = False  # new rows have the TD error of acting as priority (see InitialPriorities)

    def __post_init__(self) -> None:
        if not 0 <= self.discount <= 1 or not 1 <= self.n <= 255:
            raise ValueError(f"discount={self.discount} must be from 0 to 1, and n={self.n} from 1 to 255")

    def n_absent(self, T: int) -> int:
        return max(0, self.n - 2)  # with the last observation n - 1

    def made_with(self) -> dict[str, Any]:
        return {"discount": self.discount, "n_step": self.n}

    def make_reader(self, storage: Storage, T: int, state: Tree, prioritized: bool) -> Reader[Transitions]:
        return NStepReader(storage, self, T, prioritized)


class NStepReader(TransitionReader):
    """Computes a row's n-step return once, when its n steps are complete.

    Absent rows are skipped. While an environment is absent, its last transitions bootstrap from the newest row, and
    are computed again when it is back.
    """

    def __init__(self, storage: Storage, config: NStep, T: int, prioritized: bool) -> None:
        super().__init__(storage, config, prioritized)
        self._discount, self._n = config.discount, config.n
        self.n_rows = config.n + config.td_priorities
        ring, memory = storage.ring, storage.memory
        held = T + self.n_rows + storage.rows_before + 2
        self._acting = [InitialPriorities(held, ring.B)] if config.td_priorities else []
        self._bootstrap = memory.zeros((ring.L, ring.B), np.float32)
        self._return, self._steps = storage.reward, memory.zeros((1, 1), np.uint8)
        if config.n > 1:
            self._return, self._steps = (memory.zeros((ring.L, ring.B), dtype) for dtype in (np.float32, np.uint8))
        self._gaps = False  # there may have been absent rows, so that steps may be more than n
        self._open = 0  # if so, the time from which returns may change

    def append(self, samples: Samples, start: int) -> np.ndarray:
        storage, ring, B = self._storage, self._storage.ring, self._storage.ring.B
        lo = ring.oldest + storage.rows_before
        hi = max(lo, ring.t + 1 - self.n_rows)
        complete = max(lo, self.candidates.hi // B)
        if storage.may_be_absent:
            self._expect_gaps()
            self._open = min(self._open, start - self._n)
        self._compute_returns(max(lo, min(complete, self._open)) if self._gaps else complete, hi)
        valid = read_rows(storage.valid, complete, hi - complete).reshape(-1)
        removed = self.candidates.advance(lo * B, hi * B, valid)
        for acting in self._acting:
            acting.append(samples, start)
            self.priorities = self._priorities(acting, self.candidates.newest)
        return removed

    def _expect_gaps(self) -> None:
        """Make room for steps over absent rows."""
        if not self._gaps:
            ring, self._gaps, self._open = self._storage.ring, True, self._storage.ring.t
            steps = self._storage.memory.zeros((ring.L, ring.B), np.int32)
            steps[...] = self._steps if self._n > 1 else 1
            self._steps = steps

    def _priorities(self, acting: InitialPriorities, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Those of the candidates [n] whose error is known, and their priorities."""
        (time, env), L = np.divmod(numbers, self._storage.ring.B), self._storage.ring.L
        at = time % L, env
        steps = as_numpy(self._steps[at]).astype(np.int64) if len(self._steps) > 1 else 1
        error = acting.of(time, env, steps, as_numpy(self._return[at]), as_numpy(self._bootstrap[at]))
        known = np.isfinite(error)
        return numbers[known], error[known] + PRIORITY_EPSILON

    def _compute_returns(self, start: int, stop: int) -> None:
        """Returns of the time steps from `start` to `stop` - 1."""
        storage, n = self._storage, self._storage.ring.t - start
        if n <= 0:
            return
        if self._n == 1 and not self._gaps:
            for places, _ in spans(start, n, storage.ring.L):
                self._bootstrap[places] = self._discount * ~storage.terminated[places]
            return
        reward, terminated, truncated, valid = map(torch.as_tensor, storage.outcomes(start, n))
        return_, bootstrap, index = n_step_return(reward, terminated, truncated, valid, self._discount, self._n)
        done, own = slice(0, stop - start), storage.memory.own
        if self._n > 1:
            write_rows(self._return, start, own(return_[done]))
        write_rows(self._bootstrap, start, own(bootstrap[done]))
        write_rows(self._steps, start, own((index - torch.arange(n, device=index.device)[:, None])[done]))
        if self._gaps:
            self._open = max(start + self._first_open(valid, index, stop - start), stop - _LONGEST_GAP)

    def _first_open(self, valid: torch.Tensor, index: torch.Tensor, n_done: int) -> int:
        """The first of the rows that bootstraps from the newest row because its environment is absent."""
        n = len(valid)
        if self._storage.memory.on_device:
            return n - _LOOK_BACK
        whole = valid.flip(0).cumprod(0).flip(0).bool()  # valid up to the newest row
        waits = (valid & (index == n) & ~whole)[:n_done].any(1)
        return int(waits.byte().argmax()) if waits.any() else n

    def state_dict(self) -> dict[str, Any]:
        acting = [acting.state_dict() for acting in self._acting]
        return {**super().state_dict(), "gaps": self._gaps, "open": self._open, "acting": acting}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state["gaps"]:
            self._expect_gaps()
        self._open = state["open"]
        super().load_state_dict(state)
        for acting, saved in zip(self._acting, state["acting"], strict=True):
            acting.load_state_dict(saved)

    def _arrays(self) -> dict[str, Array]:
        of_n = {"return": self._return} if self._n > 1 else {}
        of_steps = {"steps": self._steps} if len(self._steps) > 1 else {}
        return {"bootstrap": self._bootstrap, **of_n, **of_steps}


class InitialPriorities:
    """|G[t] + γ^k max_a Q(row t+k, a) - Q(row t, a[t])|, where Q of a row is what the agent acted by there.

    (Horgan et al. 2018, arXiv 1803.00933, algorithm 1.) Holds Q of the newest rows only.
    """

    def __init__(self, n_times: int, B: int) -> None:
        """`n_times`: time steps held: more than those of a batch, of a return and between two batches together."""
        self._taken, self._best = (np.full((n_times, B), np.nan, np.float32) for _ in range(2))
        self._end = 0  # the time after the newest batch

    def append(self, samples: Samples, start: int) -> None:
        """Hold Q of a batch whose row 0 has the time `start`; `samples.info.q` is [T, B, A]."""
        q = as_numpy(samples.info.q)  # type: ignore[attr-defined]  # QInfo
        observation, choices = samples.inputs.observation, q
        if isinstance(observation, Mapping) and ACTION_MASK in observation:
            choices = np.where(allowed(as_numpy(observation[ACTION_MASK])[:-1]), q, -np.inf)
        unknown = np.full((start - self._end, q.shape[1]), np.nan, np.float32)  # nothing acted between the batches
        write_rows(self._best, self._end, unknown)
        write_rows(self._best, start, choices.max(-1))
        write_rows(self._taken, start, np.take_along_axis(q, as_numpy(samples.action)[..., None], -1)[..., 0])
        self._end = start + len(q)
        write_rows(self._best, self._end, np.full((1, q.shape[1]), np.nan, np.float32))  # not known yet

    def of(self, time: np.ndarray, env: np.ndarray, steps: Any, return_: np.ndarray, bootstrap: np.ndarray) -> Any:
        """Errors [n] of the rows (time, env) [n]; NaN where the agent did not act at row t+k."""
        L = len(self._best)
        value = np.where(bootstrap > 0, bootstrap * self._best[(time + steps) % L, env], 0)
        return np.abs(return_ + value - self._taken[time % L, env])

    def state_dict(self) -> dict[str, Any]:
        """The Q-values held; arrays are views."""
        return {"taken": self._taken, "best": self._best, "end": self._end}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state of the same shapes."""
        self._taken[...], self._best[...], self._end = state["taken"], state["best"], state["end"]
