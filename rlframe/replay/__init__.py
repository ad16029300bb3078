"""Replay: rows kept in a ring, drawn at random, and read as transitions or sequences."""

from rlframe.replay.base import Sequences, Transitions
from rlframe.replay.buffer import ReplayBuffer, ReplayConfig, make_replay
from rlframe.replay.readers import NStep, Whole

__all__ = ["NStep", "ReplayBuffer", "ReplayConfig", "Sequences", "Transitions", "Whole", "make_replay"]
