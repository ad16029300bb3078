"""Replay: stored rows, sampled at random as transitions or sequences, for the off-policy algorithms."""

from rlframe.replay.base import Replay, Sequences, StoredReplay, Transitions
from rlframe.replay.buffer import ReplayBuffer
from rlframe.replay.dataset import OfDatasets
from rlframe.replay.make import (
    InMemory,
    OnDevice,
    OnDisk,
    OwnReplay,
    ReplayConfig,
    ReplaySpec,
    is_stored,
    make_replay,
    replay,
)
from rlframe.replay.n_step import NStep
from rlframe.replay.returns_to_go import ReturnsToGo
from rlframe.replay.sequences import FixedSequence

KINDS = {"dataset": OfDatasets, "device": OnDevice, "disk": OnDisk, "memory": InMemory, "own": OwnReplay}

__all__ = [
    "KINDS",
    "FixedSequence",
    "InMemory",
    "NStep",
    "OfDatasets",
    "OnDevice",
    "OnDisk",
    "OwnReplay",
    "Replay",
    "ReplayBuffer",
    "ReplayConfig",
    "ReplaySpec",
    "ReturnsToGo",
    "Sequences",
    "StoredReplay",
    "Transitions",
    "is_stored",
    "make_replay",
    "replay",
]
