"""Loggers of metric rows: their base, TensorBoard, and others by name; progress.csv is in `csv_loggers`.

`loggers=[tensorboard,wandb,./file.py:Class]` names them. Errors of a user's own name it, as those of other parts do.
"""

import importlib.util
import io
import os
import socket
import struct
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlframe.core.config import nearest
from rlframe.core.errors import ConfigError, PartError, naming, printable, qualified_name
from rlframe.core.files import append, check_in_place, open_to_append, read_regular_file
from rlframe.core.names import find_attribute, find_maker
from rlframe.core.objects import is_own, name_of
from rlframe.record.directory import FILMS, film_path
from rlframe.record.metrics import step_of
from rlframe.record.rank_state import unused_path


class Logger(ABC):
    """Writes rows of metrics. Owned by a Run, which closes it.

    Most rows are of one log interval, and their `env_steps` increases strictly. A row that has only `eval/...` may
    follow later than its `env_steps`. A metric has one value at an `env_steps`.
    """

    n_failed = 0  # attempts to send rows elsewhere that failed so far

    def __init__(self, directory: Path, config: Mapping[str, Any], name: str) -> None:  # noqa: B027
        """Open, or continue when a run is resumed.

        Args:
            directory: of the run.    config: as in params.json.    name: of the run, not unique.
        """

    def check(self) -> None:  # noqa: B027  # optional
        """Raise RecordError if rows can no longer be written; called before any logger gets a row."""

    @abstractmethod
    def write(self, row: Mapping[str, float]) -> None:
        """Write a row, which has `env_steps`."""

    @abstractmethod
    def truncate_after(self, env_steps: int) -> None:
        """The run resumes from `env_steps`: drop the first row with a greater one, and all after it."""

    @abstractmethod
    def close(self) -> None:
        """Flush and close; may be called twice."""


class FileLogger(Logger):
    """Base of loggers that append to one file of the run, `_file`, which they open."""

    _file: io.FileIO

    def check(self) -> None:
        check_in_place(self._file)

    def close(self) -> None:
        self._file.close()


class TensorBoardLogger(FileLogger):
    """An event file of scalars by env_steps, flushed with every row; without the thread of TensorBoard's own logger."""

    def __init__(self, directory: Path, config: Mapping[str, Any], name: str) -> None:
        # Imported here: 0.15 s that a program which only reads runs saves. torch.utils.tensorboard costs twice that.
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._session = event_pb2.Event, event_pb2.SessionLog
        self._summary, self._directory = summary_pb2.Summary, directory
        stamp = f"events.out.tfevents.{int(time.time()):010d}.{socket.gethostname()}.{os.getpid()}"
        self._file = open_to_append(unused_path(directory / stamp, "."))
        self._waiting = io.BytesIO()  # records not yet written, because of a disk error
        self._records = RecordWriter(self._waiting)
        self._put(file_version="brain.Event:2")

    def write(self, row: Mapping[str, float]) -> None:
        step = step_of(row)
        values = [
            self._summary.Value(tag=name, simple_value=float(value))
            for name, value in row.items()
            if name != "env_steps"
        ]
        width, height, gif = read_gif(self._directory, step) if "eval/return_mean" in row else (0, 0, b"")
        if gif:
            image = self._summary.Image(height=height, width=width, colorspace=3, encoded_image_string=gif)
            values.append(self._summary.Value(tag="eval/video", image=image))
        self._put(step=step, summary=self._summary(value=values))

    def truncate_after(self, env_steps: int) -> None:
        """Write a session start at `env_steps` + 1: TensorBoard then hides later points of older files.

        It cannot hide an evaluation that was logged late: made again, it shows two equal points.
        """
        self._put(step=env_steps + 1, session_log=self._session(status=self._session.START))

    def _put(self, **fields: object) -> None:
        """Append a record in one write; after a disk error, which is raised, together with the next one."""
        event = self._event(wall_time=time.time(), **fields)
        self._records.write(event.SerializeToString())
        append(self._file, self._waiting.getvalue())
        self._waiting.seek(0)
        self._waiting.truncate()


def read_gif(directory: Path, env_steps: int) -> tuple[int, int, bytes]:
    """Width, height and content of the GIF of the evaluation at `env_steps` of a run; empty if it was not filmed."""
    try:
        data = read_regular_file(film_path(directory / FILMS, env_steps).with_suffix(".gif"))
        signature, width, height = struct.unpack_from("<3s3xHH", data)
    except (ConfigError, struct.error):
        return 0, 0, b""
    return (width, height, data) if signature == b"GIF" else (0, 0, b"")


def plain_names(row: Mapping[str, Any]) -> Mapping[str, Any]:
    """A row with escapes in names, which an environment may have given, for what would break a line of a table."""
    if all(map(str.isprintable, row)):
        return row
    return {printable(name).replace("\n", "\\n"): value for name, value in row.items()}


MakeLogger = Callable[..., Logger]  # (directory, config, name): that of a Logger's class

_TRACKERS = {  # by the name of the package that they need, which is also the name of the extra
    "wandb": "rlframe.integrations.wandb:WandbLogger",
    "mlflow": "rlframe.integrations.mlflow:MlflowLogger",
    "trackio": "rlframe.integrations.trackio:TrackioLogger",
}
_BUILT_IN = {"tensorboard": "rlframe.record.loggers:TensorBoardLogger", **_TRACKERS}
LOGGERS = tuple(_BUILT_IN)
DEFAULT_LOGGERS = ("tensorboard",)


def check_loggers(names: Sequence[str]) -> None:
    """Check names without importing the trackers' packages.

    Raises:
        ConfigError: an unknown name, a missing package, a name given twice, or a class that is not a Logger.
    """
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"loggers names {name} more than once")
        if name in _TRACKERS and not _is_installed(name):
            raise ConfigError(f'loggers={name} needs another package: pip install "rlframe[{name}]"')
        if name not in _BUILT_IN:
            _own(name)


def find_loggers(names: Sequence[str]) -> list[MakeLogger]:
    """The classes of loggers, or functions that make them. Raises ConfigError as `check_loggers`."""
    check_loggers(names)
    return [find_attribute(_BUILT_IN[name], "loggers") if name in _BUILT_IN else _own(name) for name in names]


def _is_installed(package: str) -> bool:
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None  # without an origin, it is a folder such as ./wandb


def _own(name: str) -> MakeLogger:
    if ":" not in name:
        known = ", ".join(LOGGERS)
        raise ConfigError(f"loggers={name} is none of {known}, module:Class, ./file.py:Class{nearest(name, LOGGERS)}")
    found = find_attribute(name, "loggers")
    if isinstance(found, Logger):
        return lambda directory, config, name: found  # made already
    return find_maker(name, "loggers", Logger, "rlframe.record.Logger")


def make_logger(make: MakeLogger, directory: Path, config: Mapping[str, Any], name: str) -> Logger:
    """A logger. Raises PartError if one of the user's own raises an exception."""
    if not is_own(make):
        return make(directory, config, name)
    with naming(f"logger {name_of(make)} cannot start"):
        return make(directory, config, name)


def close_logger(logger: Logger) -> None:
    """Close a logger. Raises as `naming_logger`."""
    with naming_logger(logger, "close"):
        logger.close()


@contextmanager
def naming_logger(logger: Logger, method: str) -> Iterator[None]:
    """Raise PartError for an exception of a logger; an OSError stays one, as the disk may be full."""
    try:
        with naming(f"logger {qualified_name(type(logger))} failed in {method}"):
            yield
    except PartError as error:
        if isinstance(error.__cause__, OSError):
            raise error.__cause__ from None
        raise
