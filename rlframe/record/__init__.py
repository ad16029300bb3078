"""Run directories: logs, metrics and snapshots."""

from rlframe.record.context import current_run, logger_context
from rlframe.record.metrics import METRICS, Metrics, Timers, metrics_table
from rlframe.record.run import BaseRun, NullRun, Run
from rlframe.record.writers import Writer

__all__ = [
    "METRICS",
    "BaseRun",
    "Metrics",
    "NullRun",
    "Run",
    "Timers",
    "Writer",
    "current_run",
    "logger_context",
    "metrics_table",
]
