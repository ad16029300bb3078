"""The Replay protocol: a short replay of a user's own satisfies it and returns batches like those of ReplayBuffer."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch

from rlframe.core.struct import map_tree
from rlframe.core.types import Samples
from rlframe.replay import NStep, Replay, Transitions
from tests.replay.buffers import replay_for, same
from tests.replay.history import History


class UniformReplay:
    """One-step transitions, uniform, without overwriting: the least that DQN, TD3 and SAC need."""

    def __init__(self, discount: float, seed: int = 0) -> None:
        self.discount, self.rng = discount, np.random.default_rng(seed)
        self.batches: list[Samples] = []
        self.rows: list[tuple[int, int, int]] = []  # batch, time, environment of each row that may be sampled

    @property
    def n_rows(self) -> int:
        return len(self.rows)

    def append(self, samples: Samples) -> None:
        self.rows += [(len(self.batches), int(t), int(b)) for t, b in torch.nonzero(samples.valid)]
        self.batches.append(samples.map(torch.clone))

    def sample(self, n: int, beta: float = 0.0) -> Transitions:
        index = self.rng.integers(len(self.rows), size=n)
        drawn = [(self.batches[i], t, b) for i, t, b in (self.rows[k] for k in index)]
        return Transitions(
            inputs=_stack([each.inputs[t, b] for each, t, b in drawn]),
            action=_stack([each.action[t, b] for each, t, b in drawn]),
            return_=_stack([each.reward[t, b] for each, t, b in drawn]),
            bootstrap=_stack([self.discount * ~each.terminated[t, b] for each, t, b in drawn]),
            next_inputs=_stack([each.inputs[t + 1, b] for each, t, b in drawn]),
            weight=torch.ones(n),
            index=index,
        )

    def update_priorities(self, index: np.ndarray, priority: np.ndarray | torch.Tensor) -> None:
        pass

    def state_dict(self) -> dict[str, Any]:
        return copy.deepcopy({"batches": self.batches, "rows": self.rows, "rng": self.rng.bit_generator.state})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.batches, self.rows = state["batches"], state["rows"]
        self.rng.bit_generator.state = state["rng"]


def _stack(parts: list[Any]) -> Any:
    return map_tree(lambda *x: torch.stack(x), *parts)


def replays(kind: str) -> tuple[Replay[Transitions], Replay[Transitions]]:
    """A user's replay and a ReplayBuffer, filled with the same batches."""
    history = History(2, kind, ends=0.1)
    own: Replay[Transitions] = UniformReplay(0.5)
    buffer: Replay[Transitions] = replay_for(history, NStep(0.5), L=60, previous=True)
    for _ in range(5):
        batch = history.batch(4)
        batch = Samples(**{**vars(batch), "info": ()})
        own.append(batch)
        buffer.append(batch)
    return own, buffer


@pytest.mark.parametrize("kind", ["vector", "frames", "both"])
def test_a_users_replay_samples_the_shapes_and_types_of_a_replay_buffer(kind: str) -> None:
    own, buffer = replays(kind)
    assert own.n_rows == buffer.n_rows
    one, other = own.sample(7), buffer.sample(7)
    equal: list[bool] = []
    map_tree(lambda a, b: equal.append((a.shape, a.dtype) == (b.shape, b.dtype)), one, other)
    assert all(equal)
    assert len(equal) >= 12


def test_a_users_replay_samples_the_same_transitions_as_a_replay_buffer() -> None:
    own, buffer = replays("vector")

    def rows(replay: Replay[Transitions]) -> set[tuple[float, ...]]:
        found = replay.sample(2_000)
        columns = found.inputs.observation[:, 0], found.action, found.return_, found.bootstrap
        return set(zip(*(x.tolist() for x in columns), strict=True))

    assert rows(own) == rows(buffer)
    assert len(rows(own)) == own.n_rows


@pytest.mark.parametrize("which", [0, 1], ids=["own", "buffer"])
def test_every_replay_restores_its_state_and_takes_priorities(which: int) -> None:
    replay, restored = replays("vector")[which], replays("vector")[which]
    replay.update_priorities(replay.sample(5).index, torch.ones(5))
    restored.load_state_dict(replay.state_dict())
    assert same(replay.sample(8), restored.sample(8))
