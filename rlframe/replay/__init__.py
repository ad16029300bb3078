"""Replay: stored rows, sampled at random as transitions or sequences, for the off-policy algorithms."""

from rlframe.replay.base import Replay, Sequences, StoredReplay, Transitions
from rlframe.replay.buffer import ReplayBuffer
from rlframe.replay.make import ReplayConfig, make_replay
from rlframe.replay.readers import FixedSequence, NStep

__all__ = [
    "FixedSequence",
    "NStep",
    "Replay",
    "ReplayBuffer",
    "ReplayConfig",
    "Sequences",
    "StoredReplay",
    "Transitions",
    "make_replay",
]
