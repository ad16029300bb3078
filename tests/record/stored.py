"""Contents of the stored snapshot in fixtures/; `python -m tests.record.stored FOLDER` writes it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlframe.record import codec, rank_state
from rlframe.record.snapshot import save_snapshot, write_rank_state
from rlframe.replay import NStep, ReplayBuffer
from tests.replay.buffers import replay_for
from tests.replay.history import History

META = {"env_steps": 72, "updates": 3, "score": 1.5}

RANK_1 = {"rank": 1, "x": torch.ones(2)}


def plain() -> dict[str, Any]:
    """One of each kind of value."""
    return {
        "agent": {"weight": torch.arange(6.0).reshape(2, 3), "half": torch.tensor([1.5, -2.0], dtype=torch.bfloat16)},
        "arrays": [np.arange(5, dtype=np.int64), np.array([1 + 2j]), np.float32(0.1), torch.tensor([True, False])],
        "values": (None, True, -3, 2**70, 0.1, float("inf"), "a/b ü", [], {}),
        "keys": {0: "zero", "0": "text", (1, 2): "pair"},
        "generator": np.random.PCG64(7).state,
    }


def history() -> History:
    """Observations that tell time and environment, of episodes that never end."""
    return History(2, "both", ends=0.0)


def replay(compress: bool, of: History) -> ReplayBuffer[Any]:
    """Empty; the state of one that holds nine batches of four steps is stored."""
    return replay_for(of, NStep(0.5), L=26, config={"compress": compress}, alpha=0.6)


def filled(compress: bool) -> dict[str, Any]:
    """The state of a replay that has gone round."""
    lived = history()
    buffer = replay(compress, lived)
    for _ in range(9):
        buffer.append(lived.batch(4))
    return buffer.state_dict()


def write(folder: Path) -> Path:
    """A snapshot of two ranks, its small arrays kept as large ones are."""
    rank_state.LARGE_BYTES, codec.CHUNK_BYTES = 128, 256
    state = {**plain(), "replay": filled(compress=False), "compressed": filled(compress=True)}
    return save_snapshot(folder, state, META, lambda aside: [write_rank_state(aside, 1, RANK_1)])


if __name__ == "__main__":
    write(Path(sys.argv[1]))
