"""Every sampled row equals the history that was appended, while the ring wraps around many times."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from rlframe.core.struct import map_tree
from rlframe.replay import FixedSequence, NStep, Sequences, Transitions
from tests.replay.buffers import replay_for, same
from tests.replay.history import History

CPU = torch.device("cpu")
STORAGES: list[Any] = [  # kind, config
    ("vector", {}),
    ("frames", {}),
    ("both", {}),
    pytest.param("both", {"kind": "disk"}, marks=pytest.mark.slow),
    ("both", {"compress": True}),
    pytest.param("frames", {"compress": True}, marks=pytest.mark.slow),
    pytest.param("both", {"kind": "device"}, marks=pytest.mark.slow),
]


def check_inputs(inputs: Any, i: Any, history: History, row: dict[str, Any], previous: bool) -> None:
    assert same(map_tree(lambda x: x[i], inputs.observation), row["observation"])
    time, env = row["time"], row["env"]
    if previous and time:
        before = history.at(time - 1, env)
        assert inputs.prev_action[i] == before["action"]
        assert inputs.prev_reward[i] == before["reward"]
        assert inputs.first[i] == row["first"]
    else:
        assert inputs.prev_action[i] == 0
        assert inputs.prev_reward[i] == 0
        assert inputs.first[i] == (row["first"] if previous else False)


def check_transitions(drawn: Transitions, history: History, offset: int, n: int, previous: bool) -> None:
    for i, number in enumerate(drawn.index):
        time, env = int(number) // history.B - offset, int(number) % history.B
        row = history.at(time, env)
        return_, bootstrap, after = history.transition(time, env, n, 0.5)
        check_inputs(drawn.inputs, i, history, row, previous)
        assert drawn.action[i] == row["action"]
        assert drawn.return_[i] == return_
        assert drawn.bootstrap[i] == bootstrap
        check_inputs(drawn.next_inputs, i, history, after, previous)
        assert bootstrap == 0 or after["time"] > time


def check_sequences(drawn: Sequences, history: History, offset: int, length: int, T: int, previous: bool) -> None:
    for i, number in enumerate(drawn.index):
        time, env = int(number) // history.B - offset, int(number) % history.B
        assert time % T == 0
        assert same(drawn.state[0][i], np.full(2, time + env / 8, np.float32))
        for t in range(length + 1):
            row = history.at(time + t, env)
            check_inputs(drawn.inputs, (t, i), history, row, previous)
            if t < length:
                for name in ("action", "reward", "terminated", "truncated", "valid"):
                    assert getattr(drawn, name)[t, i] == row[name]


@pytest.mark.parametrize(  # each pair of values
    ("alpha", "previous", "n", "black"),
    [(0.0, False, 1, True), (0.0, False, 3, False), (0.6, True, 1, False), (0.6, True, 3, True)],
)
@pytest.mark.parametrize(("kind", "config"), STORAGES)
def test_transitions_equal_the_history(
    kind: str, config: dict[str, Any], alpha: float, previous: bool, n: int, black: bool
) -> None:
    for seed, T in enumerate((1, 4, 7)):
        history, n_checked = History(3, kind, black=black, seed=seed), 0
        replay = replay_for(history, NStep(0.5, n), T, 16, config, alpha=alpha, previous=previous)
        rng = np.random.default_rng(seed)
        offset = replay._storages[0].rows_before
        for _ in range(42 // T):
            replay.append(history.batch(T))
            if replay.n_choices:
                drawn = replay.sample(8, beta=0.5)
                check_transitions(drawn, history, offset, n, previous)
                replay.update_priorities(drawn.index, rng.random(8))
                n_checked += 1
        assert n_checked > 42 // T - 5


@pytest.mark.parametrize(("kind", "config"), STORAGES)
@pytest.mark.parametrize(("T", "length"), [(4, 4), (3, 7), (5, 2)])
def test_sequences_equal_the_history(kind: str, config: dict[str, Any], T: int, length: int) -> None:
    for seed, alpha in enumerate((0.0, 0.9)):
        history, n_checked = History(3, kind, seed=seed), 0
        replay = replay_for(history, FixedSequence(length), T, 20, config, alpha=alpha, previous=True)
        offset = replay._storages[0].rows_before
        for _ in range(45 // T):
            replay.append(history.batch(T))
            if replay.n_choices:
                drawn = replay.sample(4, beta=0.5)
                check_sequences(drawn, history, offset, length, T, True)
                replay.update_priorities(drawn.index, np.ones(4))
                n_checked += 1
        assert n_checked > 45 // T - 5
