"""Studies: many runs, of several settings and seeds, queued on the slots of one machine."""

from rlframe.study.queue import QueueOptions
from rlframe.study.study import run_study

__all__ = ["QueueOptions", "run_study"]
