"""Replay: stored rows, sampled at random as transitions or sequences, for the off-policy algorithms."""

from rlframe.replay.base import Replay, Sequences, StoredReplay, Transitions
from rlframe.replay.buffer import ReplayBuffer
from rlframe.replay.dataset import OfDatasets
from rlframe.replay.kinds import KINDS, counters_of, is_stored
from rlframe.replay.make import InMemory, OnDevice, OnDisk, OwnReplay, ReplayConfig, ReplaySpec, make_replay, replay
from rlframe.replay.n_step import NStep
from rlframe.replay.ray import OnRay, ShardedReplay
from rlframe.replay.returns_to_go import ReturnsToGo
from rlframe.replay.select import Uniform
from rlframe.replay.sequences import FixedSequence

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
