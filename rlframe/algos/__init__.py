"""Algorithms, one file each, and what they share.

The head of each says where its gradient step is read. To be skipped are the rest of `updates`, and `kernels`, which
only make it fast; `updates.schedules`, which change numbers during a run; `replay_ratio`, which says when an update
is due; `models.views`, which says what a network sees; and `replay.arrays` and `replay.frames`, in which rows lie.
"""

from rlframe.algos.base import Algorithm, UpdateMetrics
from rlframe.updates.progress import Progress

__all__ = ["Algorithm", "Progress", "UpdateMetrics"]
