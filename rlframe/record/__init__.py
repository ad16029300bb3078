"""Run directories: logs, metrics and snapshots."""

from rlframe.record.context import current_run, logger_context
from rlframe.record.loggers import Logger
from rlframe.record.metrics import METRICS, Metrics, metrics_table
from rlframe.record.run import BaseRun, NullRun, Run
from rlframe.record.timers import Timers

__all__ = [
    "METRICS",
    "BaseRun",
    "Logger",
    "Metrics",
    "NullRun",
    "Run",
    "Timers",
    "current_run",
    "logger_context",
    "metrics_table",
]
