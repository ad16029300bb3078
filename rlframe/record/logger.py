"""rlpyt's logger by its own names, for scripts that come from there: `from rlframe.record import logger`.

Values are logged as `rlframe.log` does, and written with the next row of the run's log, by its runner.
"""

import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar

import numpy as np

from rlframe.core.context_variable import set_within
from rlframe.record import metrics

_messages: ContextVar[str] = ContextVar("rlframe_message_prefix", default="")
_names: ContextVar[str] = ContextVar("rlframe_tabular_prefix", default="")
_logger = logging.getLogger("rlframe")


def log(text: str) -> None:
    """Write a message to the console and to debug.log."""
    _logger.info("%s%s", _messages.get(), text)


def prefix(text: str) -> AbstractContextManager[None]:
    """Inside the `with` block, messages of `log` begin with `text` too."""
    return set_within(_messages, _messages.get() + text)


def tabular_prefix(text: str) -> AbstractContextManager[None]:
    """Inside the `with` block, names of metrics begin with `text` too, such as "critic/"."""
    return set_within(_names, _names.get() + text)


def record_tabular(name: str, value: float) -> None:
    """Log a metric; a name without a group is in the group `script`."""
    full = _names.get() + name
    metrics.log(full if "/" in full else f"script/{full}", value)


def record_tabular_misc_stat(name: str, values: Sequence[float]) -> None:
    """Log mean, standard deviation, median, minimum and maximum of values; NaN if there are none."""
    found = np.asarray(values if len(values) else [np.nan], np.float64)
    for suffix, value in {
        "Average": found.mean(),
        "Std": found.std(),
        "Median": np.median(found),
        "Min": found.min(),
        "Max": found.max(),
    }.items():
        record_tabular(f"{name}{suffix}", float(value))


def dump_tabular() -> None:
    """Does nothing: the runner writes a row at each interval of the log."""
