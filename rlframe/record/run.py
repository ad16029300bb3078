"""One run's directory: where its rows, messages and snapshots go."""

import logging
import math
import os
import shutil
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rlframe.core.errors import ConfigError
from rlframe.core.files import NotRecorded, is_plain, refused
from rlframe.record.codec import keep
from rlframe.record.console import Console, PlainConsole, SilentConsole
from rlframe.record.lock import FILE as OWNER
from rlframe.record.lock import Ownership
from rlframe.record.params import append_resumed, write_params
from rlframe.record.retention import Policy, Rotation
from rlframe.record.snapshot import Others, list_snapshots, no_others
from rlframe.record.writers import CsvWriter, TensorBoardWriter, Writer

_logger = logging.getLogger("rlframe")


class RunBase(ABC):
    """What a runner reports to: `Run` writes it down, `NullRun` does not."""

    @abstractmethod
    def log(self, row: Mapping[str, float]) -> None:
        """Take the metrics of one log interval; they have `env_steps`."""

    @abstractmethod
    def progress(self, env_steps: int, n_steps: int) -> None:
        """Show how far the run is; cheap enough for every iteration."""

    @abstractmethod
    def wants_snapshot(self, env_steps: int, final: bool = False) -> bool:
        """Whether `snapshot` would write one now."""

    @abstractmethod
    def snapshot(
        self,
        state_fn: Callable[[], Any],
        env_steps: int,
        score: float = math.nan,
        *,
        updates: int = 0,
        final: bool = False,
        others: Others = no_others,
    ) -> Path | None:
        """Save what `state_fn` answers, if the snapshot mode wants it now; the snapshot's path, else None.

        Log the row of `env_steps` first: a run resumed from here keeps the rows up to here.

        Args:
            score: what `best` goes by, higher is better; NaN is never best.
            final: the run ends; written in every mode but none.
            others: writes the states of other ranks (see `save_snapshot`).
        """

    @abstractmethod
    def keep(self, name: str, state: Any, facts: Mapping[str, Any]) -> str:
        """Keep arrays to look into beside the log, as `name`; where they are, empty if nowhere."""

    @abstractmethod
    def newest_snapshot(self) -> str:
        """Its path, empty if there is none."""

    @abstractmethod
    def trim(self, env_steps: int) -> None:
        """The run goes on from `env_steps`: forget rows and set aside snapshots after it."""


class NullRun(RunBase):
    """No run is open: nothing is written, nothing is shown."""

    def log(self, row: Mapping[str, float]) -> None:
        """Nothing."""

    def progress(self, env_steps: int, n_steps: int) -> None:
        """Nothing."""

    def wants_snapshot(self, env_steps: int, final: bool = False) -> bool:
        """Never."""
        return False

    def snapshot(
        self,
        state_fn: Callable[[], Any],
        env_steps: int,
        score: float = math.nan,
        *,
        updates: int = 0,
        final: bool = False,
        others: Others = no_others,
    ) -> Path | None:
        """Nothing; `state_fn` is not called."""
        return None

    def keep(self, name: str, state: Any, facts: Mapping[str, Any]) -> str:
        """Nowhere."""
        return ""

    def newest_snapshot(self) -> str:
        """None."""
        return ""

    def trim(self, env_steps: int) -> None:
        """Nothing."""


class Follower(RunBase):
    """The run that another rank records, for a rank that only adds its state to the snapshots."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def log(self, row: Mapping[str, float]) -> None:
        """Nothing."""

    def progress(self, env_steps: int, n_steps: int) -> None:
        """Nothing."""

    def wants_snapshot(self, env_steps: int, final: bool = False) -> bool:
        """Never by itself."""
        return False

    def snapshot(
        self,
        state_fn: Callable[[], Any],
        env_steps: int,
        score: float = math.nan,
        *,
        updates: int = 0,
        final: bool = False,
        others: Others = no_others,
    ) -> Path | None:
        """Take part in what the recording rank writes."""
        others(self.directory)
        return None

    def keep(self, name: str, state: Any, facts: Mapping[str, Any]) -> str:
        """See `RunBase.keep`."""
        return _kept(self.directory, name, state, facts)

    def newest_snapshot(self) -> str:
        """See `RunBase.newest_snapshot`."""
        return _newest(self.directory)

    def trim(self, env_steps: int) -> None:
        """Nothing."""


class Run(RunBase):
    """The open run of one directory, made by `logger_context`, which closes it."""

    def __init__(
        self,
        directory: Path,
        config: Mapping[str, Any],
        policy: Policy,
        resume: bool,
        console: bool,
    ) -> None:
        """Open the files in `directory`, which exists: empty, or with `resume` holding the run to go on with.

        Raises:
            ConfigError: a config that JSON cannot hold, a run that is going on.
        """
        self.directory = directory
        self._place = _place(directory)
        self._policy, self._rotation = policy, Rotation(directory / "snapshot", policy)
        self._row: Mapping[str, float] = {}  # the newest
        self._n_refused = 0  # by the disk
        self._open = ExitStack()
        with ExitStack() as opened:
            opened.callback(Ownership(directory, "a run", "run_ID or log_dir").close)
            if not resume:
                check_directory(directory)  # once more: another run may have begun here meanwhile
            (append_resumed if resume else write_params)(directory / "params.json", config)
            self._console: Console = _console(str(directory)) if console else SilentConsole()
            opened.callback(self._console.close)
            self._writers: list[Writer] = []
            for writer in (CsvWriter(directory / "progress.csv"), TensorBoardWriter(directory)):
                opened.callback(writer.close)
                self._writers.append(writer)
            self._debug_log = _debug_log(directory / "debug.log")
            _attach(self._debug_log, opened)
            _attach(_ConsoleMessages(self._console), opened)
            self._open = opened.pop_all()

    def log(self, row: Mapping[str, float]) -> None:
        """Write the row to every writer and show it.

        Raises:
            ValueError: it has no `env_steps`.    ConfigError: it has no `snapshot_best`.
            NotRecorded: the directory is gone, or the disk refuses and the run is to stop then.
        """
        if "env_steps" not in row:
            raise ValueError(f"a row needs env_steps, got {', '.join(row)}")
        plain: dict[str, float] = {"env_steps": int(row["env_steps"])}
        for name, value in row.items():
            plain.setdefault(name, value if isinstance(value, int) else float(value))
        if self._n_refused:
            plain["record/refused"] = self._n_refused
        self._policy.check(plain)
        self._check_place()
        self._row = plain
        self._console.write(plain)
        for writer in self._writers:
            try:
                writer.write(plain)
            except OSError as error:
                what = f"the row of env_steps {plain['env_steps']:,}"
                self._refused(refused(what, self.directory, error), self._policy.errors == "stop")

    def progress(self, env_steps: int, n_steps: int) -> None:
        """Move the progress bar, at most four times a second."""
        self._console.progress(env_steps, n_steps)

    def wants_snapshot(self, env_steps: int, final: bool = False) -> bool:
        """See `Rotation.wants`."""
        return self._rotation.wants(env_steps, final)

    def snapshot(
        self,
        state_fn: Callable[[], Any],
        env_steps: int,
        score: float = math.nan,
        *,
        updates: int = 0,
        final: bool = False,
        others: Others = no_others,
    ) -> Path | None:
        """See `RunBase.snapshot` and `Rotation`.

        Raises:
            NotRecorded: the directory is gone, or the disk refuses and the run is to stop then, or ends anyway.
        """
        self._check_place()
        score = self._policy.score(self._row, score)
        try:
            path = self._rotation.offer(state_fn, env_steps, score, updates, final, others)
        except NotRecorded as error:
            self._refused(error, final or self._policy.errors == "stop")
            return None
        if path is not None:
            _logger.debug("snapshot %s, score %s", path.name, score)
        return path

    def _refused(self, error: NotRecorded, stop: bool) -> None:
        """Count it, and tell; the run goes on unless it is to stop."""
        self._n_refused += 1
        if stop:
            raise NotRecorded(f"{error}. Make room and go on with resume={self.directory}") from error
        _logger.warning("%s. The run goes on, as snapshot_errors=continue", error)

    def _check_place(self) -> None:
        if _place(self.directory) != self._place:
            raise NotRecorded(
                f"{self.directory} was deleted or moved while the run goes on: nothing can be recorded there any more"
            )

    def trim(self, env_steps: int) -> None:
        """See `RunBase.trim`."""
        for writer in self._writers:
            writer.trim(env_steps)
        self._rotation.trim(env_steps)
        _logger.debug("logs trimmed to env_steps %s", env_steps)

    def keep(self, name: str, state: Any, facts: Mapping[str, Any]) -> str:
        """See `RunBase.keep`."""
        return _kept(self.directory, name, state, facts)

    def newest_snapshot(self) -> str:
        """See `RunBase.newest_snapshot`."""
        return _newest(self.directory)

    def record_exception(self, error: BaseException) -> None:
        """Put the traceback into debug.log alone: whoever catches the exception tells the user."""
        info = (type(error), error, error.__traceback__)
        self._debug_log.handle(
            _logger.makeRecord(_logger.name, logging.ERROR, __file__, 0, "the run ended by an exception", (), info)
        )

    def close(self) -> None:
        """Close everything, also what comes after a part that fails to close; harmless when repeated."""
        try:
            self._open.close()
        except OSError as error:  # of a full disk there was word before
            logging.getLogger("rlframe").warning("closing %s: %s", self.directory, error.strerror or error)


def _place(directory: Path) -> tuple[int, int]:
    """Which directory of the machine's it is; none, if it is gone."""
    try:
        status = os.stat(directory)
    except OSError:
        return (0, 0)
    return status.st_dev, status.st_ino


def _kept(directory: Path, name: str, state: Any, facts: Mapping[str, Any]) -> str:
    try:
        return str(keep(directory, name, state, facts))
    except OSError as error:
        _logger.warning("%s cannot be kept: %s", name, error)
        return ""


def _newest(directory: Path) -> str:
    found = list_snapshots(directory / "snapshot")
    return str(found[-1]) if found else ""


def _console(title: str) -> Console:
    if not sys.stdout.isatty() or os.environ.get("TERM") in ("dumb", "unknown"):
        return PlainConsole()
    # Here, not at the top: only a terminal needs rich's live display.
    from rich.console import Console as RichConsole

    from rlframe.record.rich_console import LiveConsole

    return LiveConsole(title, RichConsole())


class _DebugLog(logging.FileHandler):
    """debug.log. A message that the disk refuses is lost: it is on the console, and rows tell that the disk is full."""

    def handleError(self, record: logging.LogRecord) -> None:
        """Nothing more where the disk refuses."""
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)


def _debug_log(path: Path) -> logging.Handler:
    if os.path.lexists(path) and not is_plain(path):
        raise ConfigError(f"{path} is not a plain file: what is logged would go elsewhere; remove it")
    if path.exists() and path.stat().st_nlink > 1:
        own = shutil.copyfile(path, path.with_name(f".{path.name}.new"), follow_symlinks=False)
        os.replace(own, path)
    handler = _DebugLog(path, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s"))
    return handler


class _ConsoleMessages(logging.Handler):
    """Passes messages of INFO and above to the run's console, so that they do not break its table."""

    def __init__(self, console: Console) -> None:
        super().__init__(logging.INFO)
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        """Show the message; the level is named from WARNING on."""
        level = f"{record.levelname.lower()}: " if record.levelno >= logging.WARNING else ""
        self._console.message(level + self.format(record))


def _attach(handler: logging.Handler, until: ExitStack) -> None:
    before = _logger.level
    _logger.addHandler(handler)
    _logger.setLevel(logging.DEBUG)
    until.callback(handler.close)
    until.callback(_logger.removeHandler, handler)
    until.callback(_logger.setLevel, before)


def check_directory(directory: Path) -> None:
    """Raises:
    ConfigError: `directory` holds a run or anything else; nothing is ever overwritten.
    """
    if any(entry.name != OWNER for entry in directory.iterdir()):
        raise ConfigError(
            f"{directory} is not empty: a run is never overwritten. Use another run_ID or log_dir, or go on with it by "
            f"resume={directory}"
        )
