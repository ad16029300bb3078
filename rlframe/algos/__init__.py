"""Algorithms, one file each."""

from rlframe.algos.base import Algorithm

__all__ = ["Algorithm"]
