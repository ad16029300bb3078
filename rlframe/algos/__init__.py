"""Algorithms, one file each."""

from rlframe.algos.base import Algorithm, Progress, UpdateMetrics

__all__ = ["Algorithm", "Progress", "UpdateMetrics"]
