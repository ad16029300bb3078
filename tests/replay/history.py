"""A synthetic history of a few environments with unique rows, as batches and as plain rows to compare with."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from rlframe.core.struct import Tree, map_tree
from rlframe.core.types import AgentInputs, Samples

SIZE = (4, 4)  # of a frame


@dataclass
class History:
    """The rows of each environment so far; `batch` adds more. Row t of environment b has the counter t * B + b + 1.

    Args:
        kind: of observations: "vector" [3], "frames" [n_frames, 4, 4] or "both" in a dict.
        ends: probability per row of each of: termination, truncation, a lost life.
        black: whether stacks are padded with zeros at a reset, else with the first frame.
    """

    B: int
    kind: str = "vector"
    n_frames: int = 3
    ends: float = 0.1
    black: bool = True
    seed: int = 0
    stream: int = 0
    rows: list[list[dict[str, Any]]] = field(default_factory=list)  # by time, by environment

    def __post_init__(self) -> None:
        self.rng = np.random.default_rng(self.seed)
        self.stacks = [self._padded(self._frame(0, b)) for b in range(self.B)]
        self.rows.append([self._row(0, b, first=True) for b in range(self.B)])

    def _frame(self, t: int, b: int) -> np.ndarray:
        counter = t * self.B + b + 1
        return np.frombuffer(np.array([counter, counter * 7], np.int64).tobytes(), np.uint8).reshape(SIZE).copy()

    def _padded(self, frame: np.ndarray) -> np.ndarray:
        older = np.zeros_like(frame) if self.black else frame
        return np.stack([older] * (self.n_frames - 1) + [frame])

    def _row(self, t: int, b: int, first: bool) -> dict[str, Any]:
        counter = t * self.B + b + 1
        vector = np.array([counter, -counter, counter % 7], np.float32)
        stack = self.stacks[b].copy()
        observation = {"vector": vector, "frames": stack, "both": {"vector": vector, "frames": stack}}[self.kind]
        return {"observation": observation, "first": first, "env": b, "time": t}

    def _step(self) -> None:
        t = len(self.rows) - 1
        new = []
        for b, row in enumerate(self.rows[-1]):
            before = self.rows[-2][b] if t else None
            row["valid"] = before is None or not before["ended"]
            kind = _kind(self.rng.random() / self.ends if row["valid"] and self.ends else np.inf)
            row["terminated"], row["truncated"] = kind in ("terminated", "life"), kind == "truncated"
            row["ended"] = kind in ("terminated", "truncated")
            row["action"] = int(self.rng.integers(1000))
            row["reward"] = float(self.rng.integers(1, 9)) if row["valid"] else 0.0
            frame = self._frame(t + 1, b)
            self.stacks[b] = np.concatenate([self.stacks[b][1:], frame[None]]) if row["valid"] else self._padded(frame)
            new.append(self._row(t + 1, b, first=not row["valid"] or kind == "life"))
        self.rows.append(new)

    def batch(self, T: int) -> Samples:
        """The next T steps."""
        start = len(self.rows) - 1
        for _ in range(T):
            self._step()
        rows, steps = self.rows[start:], self.rows[start:-1]
        null = {"action": 0, "reward": 0.0}
        before = [self.rows[start - 1] if start else [null] * self.B, *steps]
        observation = _stacked([[row["observation"] for row in each] for each in rows])
        return Samples(
            inputs=AgentInputs(
                observation,
                _column(before, "action", torch.int64),
                _column(before, "reward", torch.float32),
                _column(rows, "first", torch.bool),
            ),
            action=_column(steps, "action", torch.int64),
            reward=_column(steps, "reward", torch.float32),
            terminated=_column(steps, "terminated", torch.bool),
            truncated=_column(steps, "truncated", torch.bool),
            valid=_column(steps, "valid", torch.bool),
            info=None,  # type: ignore[arg-type]  # not read by replay
            state=(torch.full((self.B, 2), float(start)) + torch.arange(self.B)[:, None] / 8,),
            final_state=(),
            n_env_steps=sum(row["valid"] for each in steps for row in each),
            start=start,
            stream=self.stream,
        )

    def at(self, time: int, env: int) -> dict[str, Any]:
        """One row."""
        return self.rows[time][env]

    def transition(self, time: int, env: int, n: int, discount: float) -> tuple[float, float, dict[str, Any]]:
        """Return, factor of the bootstrap and the row to bootstrap from, computed reward by reward."""
        return_, k = 0.0, 0
        while True:
            row = self.at(time + k, env)
            assert row["valid"]
            return_ += discount**k * row["reward"]
            k += 1
            if row["terminated"]:
                return return_, 0.0, self.at(time + k, env)
            if row["truncated"] or k == n:
                return return_, discount**k, self.at(time + k, env)


def _kind(number: float) -> str:
    return "terminated" if number < 1 else "truncated" if number < 2 else "life" if number < 3 else "none"


def _column(rows: list[list[dict[str, Any]]], name: str, dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor([[row[name] for row in each] for each in rows], dtype=dtype)


def _stacked(rows: list[list[Tree]]) -> Tree:
    each_time = [map_tree(lambda *x: np.stack(x), *row) for row in rows]
    return map_tree(lambda *x: torch.from_numpy(np.stack(x)), *each_time)
