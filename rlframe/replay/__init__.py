"""Replay: rows kept in a ring, drawn at random, and read as transitions or sequences."""

from rlframe.replay.buffer import ReplayBuffer
from rlframe.replay.make import ReplayConfig, make_replay
from rlframe.replay.read import NStep, Whole
from rlframe.replay.types import Sequences, Transitions

__all__ = ["NStep", "ReplayBuffer", "ReplayConfig", "Sequences", "Transitions", "Whole", "make_replay"]
