"""Opening a run: `with logger_context(...) as run:` creates its directory and makes it the current run.

Scripts that come from rlpyt have its logger by its own names: `from rlframe.record import context as logger`. Values
are logged as `rlframe.log` does, and written with the next row of the run's log, by its runner.
"""

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from datetime import datetime, timedelta
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pyprojroot

from rlframe.core.arguments import checked
from rlframe.core.context import set_within
from rlframe.core.errors import ConfigError
from rlframe.core.files import check_name, naming_disk_errors
from rlframe.core.ranks import current_ranks
from rlframe.record import metrics
from rlframe.record.directory import check_directory, move_failed_start, run_directory
from rlframe.record.loggers import DEFAULT_LOGGERS, find_loggers
from rlframe.record.retention import SnapshotPolicy
from rlframe.record.run import BaseRun, NullRun, Run, SecondaryRankRun
from rlframe.record.sync import make_sync

_current: ContextVar[BaseRun] = ContextVar("rlframe_run")
_messages: ContextVar[str] = ContextVar("rlframe_message_prefix", default="")
_names: ContextVar[str] = ContextVar("rlframe_tabular_prefix", default="")
_EMPTY: Mapping[str, Any] = MappingProxyType({})

_logger = logging.getLogger("rlframe")


def current_run() -> BaseRun:
    """The run that is open in this context, or a `NullRun`."""
    return _current.get(NullRun())


@checked
@contextmanager
def logger_context(
    log_dir: str | Path = "",
    run_ID: int = 0,
    name: str = "run",
    config: Mapping[str, Any] = _EMPTY,
    snapshot_mode: str = "last",
    snapshot_gap: int = 0,
    snapshot_keep: int = 2,
    snapshot_best: str = "",
    snapshot_errors: str = "stop",
    resume: bool = False,
    console: bool = True,
    log_level: str = "INFO",
    loggers: Sequence[str] = DEFAULT_LOGGERS,
    sync: str = "",
) -> Iterator[Run | SecondaryRankRun]:
    """Open a run, make it current and always close it; an exception is logged to debug.log and re-raised.

    Args:
        log_dir: the run is `log_dir/run_<ID>`; empty: data/local/<yyyymmdd>/<hhmmss>/<name>/run_<ID> in the project
            around the working directory. With `resume` it may also be the run directory itself.
        config: flat and JSON-able, written to params.json.    resume: continue an existing run.
        snapshot_mode: none | last | all | gap | best.    snapshot_gap: env_steps, for mode gap.
        snapshot_keep: newest to keep, in modes last and best.    snapshot_errors: stop | continue, on a disk error.
        snapshot_best: metric of `best`, `-metric` if lower is better; empty: the runner's score.
        console: show progress and messages.    log_level: DEBUG | INFO | WARNING: which; with WARNING no rows.
        loggers: tensorboard, wandb, mlflow, trackio, `module:Class` or `./file.py:Class`.    sync: where to copy it.
    Raises:
        ConfigError: the directory holds a run, cannot be written, or with `resume` holds none; a logger cannot start.
    """
    if (ranks := current_ranks()).rank:
        with set_within(_current, other := SecondaryRankRun(Path(ranks.broadcast("")))):
            yield other
        return
    policy = SnapshotPolicy(snapshot_mode, snapshot_gap, snapshot_keep, snapshot_best, snapshot_errors)
    if ranks.world_size > 1 and snapshot_errors == "continue":
        raise ConfigError("snapshot_errors=continue needs world_size=1: all ranks must save, or none")
    classes = find_loggers(loggers)
    directory = _existing(log_dir, run_ID) if resume else new_directory(log_dir, run_ID, name)
    with naming_disk_errors("a run", directory):
        run = Run(directory, name, config, classes, policy, resume, log_level * console, make_sync(sync, directory))
    try:
        with set_within(_current, run):
            ranks.broadcast(str(directory))
            yield run
    except BaseException as error:
        run.record_exception(error)
        raise
    finally:
        run.close()


def _existing(log_dir: str | Path, run_id: int) -> Path:
    if not log_dir:
        raise ConfigError("to resume, log_dir must be the run directory or its parent")
    given = Path(log_dir).expanduser()
    for directory in (given, given / f"run_{run_id}"):
        if (directory / "params.json").is_file():
            return directory.absolute()
    raise ConfigError(f"no run to resume: neither {log_dir} nor its run_{run_id} has a params.json")


def new_directory(log_dir: str | Path, run_id: int, name: str) -> Path:
    """The directory of a new run, created; one that failed before its first update is moved aside.

    Raises ConfigError if that fails or it holds a run (see logger_context).
    """
    directory = run_directory(log_dir, run_id) if log_dir else dated(name, f"run_{run_id}")
    try:
        if not log_dir:
            while not _made(directory):  # by another run, which started in the same second
                directory = dated(name, f"run_{run_id}")
        move_failed_start(directory)
        directory.mkdir(parents=True, exist_ok=True)
        check_directory(directory)
    except OSError as error:
        links = [p for p in (directory, *directory.parents) if os.path.islink(p) and not os.path.exists(p)]
        why = f"{links[0]} links to {os.readlink(links[0])}, which does not exist" if links else error.strerror
        raise ConfigError(f"cannot create {directory}: {why}; use another log_dir") from error
    return directory


def _made(directory: Path) -> bool:
    """Make a directory; False if it is there already. Raises OSError."""
    try:
        directory.mkdir(parents=True)
    except FileExistsError:
        if not directory.is_dir():  # a link around it leads nowhere
            raise
        return False
    return True


def dated(name: str, below: str = "") -> Path:
    """A new path data/local/<yyyymmdd>/<hhmmss>/<name>/<below>. Raises ConfigError if `name` is unusable."""
    check_name(name)
    root = _data_root() / "local"
    when = datetime.now()
    while True:  # another run of this name may have started in the same second
        directory = root / when.strftime("%Y%m%d") / when.strftime("%H%M%S") / name / below
        if not directory.exists():
            return directory
        when += timedelta(seconds=1)


def _data_root() -> Path:
    try:
        root = Path(pyprojroot.here())
    except RuntimeError:  # not inside a project
        root = Path.cwd()
    if root.resolve().is_relative_to(Path(__file__).resolve().parents[1]):
        raise ConfigError(f"{root} is inside the installed rlframe; set log_dir=DIR, or start in another directory")
    return root / "data"


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
