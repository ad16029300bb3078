"""Filling one batch: its memory, stepping environments, acting for them, and worker processes."""

from rlframe.rollout.episodes import EpisodeStatistic
from rlframe.rollout.worker_pool import WorkerPool

__all__ = ["EpisodeStatistic", "WorkerPool"]
