"""The kinds of replay by name, and what the replays of this package have that others lack."""

from __future__ import annotations

from typing import TypeGuard

from rlframe.replay.base import Replay, StoredReplay
from rlframe.replay.buffer import Batch, DividedReplay, ReplayBuffer
from rlframe.replay.dataset import OfDatasets
from rlframe.replay.make import InMemory, OnDevice, OnDisk, OwnReplay
from rlframe.replay.ray import OnRay, ShardedReplay

KINDS = {"dataset": OfDatasets, "device": OnDevice, "disk": OnDisk, "memory": InMemory, "own": OwnReplay, "ray": OnRay}


def is_stored(replay: Replay[Batch]) -> TypeGuard[StoredReplay[Batch]]:
    """Whether it is one of this package's, a StoredReplay."""
    return isinstance(replay, ReplayBuffer | DividedReplay | ShardedReplay)


def counters_of(replay: Replay[Batch]) -> dict[str, float]:
    """For the log: the actors replaced since the start, if there are actors."""
    return {"replay/restarts": float(replay.n_restarts)} if isinstance(replay, ShardedReplay) else {}
