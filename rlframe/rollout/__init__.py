"""Filling one batch: its memory, stepping environments, acting for them, and worker processes."""

from rlframe.rollout.env_pool import EnvPool
from rlframe.rollout.episodes import EpisodeStatistic

__all__ = ["EnvPool", "EpisodeStatistic"]
