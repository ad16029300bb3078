"""Replay: stored rows, sampled at random as transitions or sequences, for the off-policy algorithms."""

from typing import TypeGuard

from rlframe.replay.base import Replay, Sequences, StoredReplay, Transitions
from rlframe.replay.buffer import Batch, DividedReplay, ReplayBuffer
from rlframe.replay.dataset import OfDatasets
from rlframe.replay.make import InMemory, OnDevice, OnDisk, OwnReplay, ReplayConfig, ReplaySpec, make_replay, replay
from rlframe.replay.n_step import NStep
from rlframe.replay.ray import OnRay, ShardedReplay
from rlframe.replay.returns_to_go import ReturnsToGo
from rlframe.replay.select import Uniform
from rlframe.replay.sequences import FixedSequence

KINDS = {"dataset": OfDatasets, "device": OnDevice, "disk": OnDisk, "memory": InMemory, "own": OwnReplay, "ray": OnRay}

__all__ = [
    "KINDS",
    "FixedSequence",
    "InMemory",
    "NStep",
    "OfDatasets",
    "OnDevice",
    "OnDisk",
    "OnRay",
    "OwnReplay",
    "Replay",
    "ReplayBuffer",
    "ReplayConfig",
    "ReplaySpec",
    "ReturnsToGo",
    "Sequences",
    "ShardedReplay",
    "StoredReplay",
    "Transitions",
    "Uniform",
    "counters_of",
    "is_stored",
    "make_replay",
    "replay",
]


def is_stored(replay: Replay[Batch]) -> TypeGuard[StoredReplay[Batch]]:
    """Whether it is one of this package's, a StoredReplay."""
    return isinstance(replay, ReplayBuffer | DividedReplay | ShardedReplay)


def counters_of(replay: Replay[Batch]) -> dict[str, float]:
    """For the log: the actors replaced since the start, if there are actors."""
    return {"replay/restarts": float(replay.shards.restarts.n)} if isinstance(replay, ShardedReplay) else {}
