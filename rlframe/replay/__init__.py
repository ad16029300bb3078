"""Replay: stored rows, sampled at random as transitions or sequences, for the off-policy algorithms."""

from rlframe.replay.base import Replay, Sequences, StoredReplay, Transitions
from rlframe.replay.buffer import ReplayBuffer
from rlframe.replay.make import (
    KINDS,
    InMemory,
    OnDevice,
    OnDisk,
    ReplayConfig,
    ReplaySpec,
    is_stored,
    make_replay,
    replay,
)
from rlframe.replay.n_step import NStep
from rlframe.replay.returns_to_go import ReturnsToGo
from rlframe.replay.sequences import FixedSequence

__all__ = [
    "KINDS",
    "FixedSequence",
    "InMemory",
    "NStep",
    "OnDevice",
    "OnDisk",
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
