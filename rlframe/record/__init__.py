"""Run directories: logs, metrics and snapshots."""

from rlframe.record.context import current_run, logger_context
from rlframe.record.metrics import METRICS, Clock, Metrics, metrics_table
from rlframe.record.run import NullRun, Run, RunBase

__all__ = [
    "METRICS",
    "Clock",
    "Metrics",
    "NullRun",
    "Run",
    "RunBase",
    "current_run",
    "logger_context",
    "metrics_table",
]
