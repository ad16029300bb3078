"""Replay: stored rows, sampled at random as transitions or sequences, for the off-policy algorithms."""

from rlframe.replay.base import Replay, Sequences, Transitions
from rlframe.replay.buffer import ReplayBuffer, ReplayConfig, make_replay
from rlframe.replay.readers import FixedSequence, NStep

__all__ = [
    "FixedSequence",
    "NStep",
    "Replay",
    "ReplayBuffer",
    "ReplayConfig",
    "Sequences",
    "Transitions",
    "make_replay",
]
