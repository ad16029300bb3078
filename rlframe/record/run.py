"""An open run: writes metrics, messages and snapshots into its directory. Opened by `record.context.logger_context`."""

import logging
import math
import shlex
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

from rlframe.core.errors import ConfigError, Interrupted, PartError, RecordError, naming, qualified_name, warn_once
from rlframe.core.files import disk_error
from rlframe.core.objects import is_own
from rlframe.record.codec import dump
from rlframe.record.console import Console
from rlframe.record.csv_loggers import CsvLogger, JsonlLogger
from rlframe.record.directory import (
    FILMS,
    PARAMS,
    RESULT,
    DirectoryLock,
    add_choices,
    add_config,
    add_resumed,
    check_config,
    check_directory,
    inode,
    resumed_session,
    run_tokens,
    starts_of,
    write_params,
    write_result,
)
from rlframe.record.loggers import Logger, MakeLogger, close_logger, make_logger, naming_logger, plain_names
from rlframe.record.messages import ConsoleMessages, DebugLog, attach, open_console
from rlframe.record.retention import Retention, SnapshotPolicy, is_of
from rlframe.record.snapshot import OtherRanks, list_snapshots, no_other_ranks
from rlframe.record.sync import BaseSync

_W = TypeVar("_W", bound=Logger)

_logger = logging.getLogger("rlframe")


class BaseRun:
    """Where a runner reports metrics, progress and snapshots. The methods of this base class record nothing."""

    tokens: Sequence[str] = ()  # see run_tokens; empty: nothing is recorded
    starts: Sequence[str] = ()  # see starts_of
    edited: Sequence[str] = ()  # own code, since a resumed run was started last

    def log(self, row: Mapping[str, float]) -> None:
        """Record the metrics of one log interval; the row must have `env_steps`."""

    def begin(self, runner: object, config: Callable[[], Mapping[str, Any]]) -> None:
        """Record the config if there is none; ConfigError: a snapshot was not resumed, or another runner has begun."""

    def record_choices(self, choices: Mapping[str, Any]) -> None:
        """Record what was chosen, for settings that are `auto` and for compile=, so that a resumed run keeps it."""

    def log_episodes(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Record training episodes; each row has `env_steps`."""

    def progress(self, step: int, n_steps: int, unit: str = "env_steps") -> None:
        """Show how far the run is; cheap enough for every iteration."""

    def snapshot_due(self, env_steps: int, updates: int = 0, final: bool = False) -> bool:
        """Whether `snapshot` would write one now."""
        return False

    def snapshot(
        self,
        state_fn: Callable[[], Any],
        env_steps: int,
        score: float = math.nan,
        *,
        updates: int = 0,
        final: bool = False,
        other_ranks: OtherRanks = no_other_ranks,
    ) -> Path | None:
        """Save the result of `state_fn` if a snapshot is due; returns the snapshot's path, else None.

        Log the row of `env_steps` first: a resumed run keeps the rows up to its snapshot.

        Args:
            score: for the `best` snapshot, higher is better; NaN is never best.
            final: the run ends; written in every mode but none.
            other_ranks: writes the states of other ranks (see `save_snapshot`).
        """
        return None

    def dump(self, name: str, state: Any, facts: Mapping[str, Any]) -> str:
        """Write arrays for inspection as `name` next to the log; returns their path, empty if not written."""
        return ""

    def newest_snapshot(self) -> str:
        """Path of the newest snapshot, empty if there is none."""
        return ""

    @property
    def film_folder(self) -> str:
        """Folder for films of evaluations; empty if nothing is recorded."""
        return ""

    def log_evaluation(self, row: Mapping[str, float]) -> None:
        """Record an evaluation that was not ready for the row of its env_steps, which `row` has."""

    def await_scores(self, env_steps: Collection[int]) -> None:
        """Keep the snapshots of these env_steps until `score_snapshot`, or the next call."""

    def score_snapshot(self, env_steps: int, evaluation: Mapping[str, float]) -> None:
        """Give the snapshot of `env_steps` the score of its evaluation, which was not known when it was written."""

    def write_result(self, result: Mapping[str, Any]) -> None:
        """Write result.json, of a run that has ended; numbers that are not finite become null."""

    def truncate_after(self, env_steps: int) -> None:
        """Resume from `env_steps`: drop later rows and rename later snapshots."""


class NullRun(BaseRun):
    """Used while no run is open."""

    @property
    def directory(self) -> Path:
        raise ConfigError("this run has no directory, as it is not recorded; give it one by log_dir=")


class _DirectoryRun(BaseRun):
    """A run in a directory, of any rank."""

    directory: Path

    def dump(self, name: str, state: Any, facts: Mapping[str, Any]) -> str:
        try:
            return str(dump(self.directory, name, state, facts))
        except OSError as error:
            _logger.warning("%s cannot be written: %s", name, error)
            return ""

    def newest_snapshot(self) -> str:
        found = list_snapshots(self.directory / "snapshot")
        return str(found[-1]) if found else ""


class SecondaryRankRun(_DirectoryRun):
    """The run of a rank other than 0: it only adds its state to snapshots; rank 0 records the rest."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.tokens, self.starts = directory, run_tokens(directory), starts_of(directory)

    def snapshot(self, *_: Any, other_ranks: OtherRanks = no_other_ranks, **__: Any) -> Path | None:
        """Write this rank's state into the snapshot of rank 0."""
        other_ranks(self.directory)
        return None


class Run(_DirectoryRun):
    """An open run. Created and closed by `logger_context`."""

    def __init__(
        self,
        directory: Path,
        name: str,
        config: Mapping[str, Any],
        loggers: Sequence[MakeLogger],
        policy: SnapshotPolicy,
        resume: bool,
        log_level: str,
        sync: BaseSync,
    ) -> None:
        """Open the files in `directory`, which exists and is empty, or with `resume` holds the run to continue.

        Args:
            loggers: of rows, beside progress.csv and progress.jsonl.    log_level: of the console; empty: none.
            sync: copies the run elsewhere.
        """
        self.directory, self._inode = directory, inode(directory)
        self._policy, self._retention = policy, Retention(directory / "snapshot", policy, sync.in_use)
        self._row, self._resumed = dict[str, float](), dict[str, Any]()  # the last logged; of a resume, to be recorded
        self._n_failed = 0  # disk errors
        self._runner: object = None
        self._open = ExitStack()
        with ExitStack() as opened, ExitStack() as named:
            opened.callback(DirectoryLock(directory, "a run", "run_ID or log_dir").close)
            if not resume:
                check_directory(directory)  # again: another run may have started here meanwhile
            check_config(config)
            chosen = [_opened(make_logger(make, directory, config, name), named) for make in loggers]  # before any file
            if resume:
                self._resumed, self.edited = resumed_session(directory / PARAMS, config)
            else:
                write_params(directory / PARAMS, config)
                add_choices(directory / PARAMS, sync.choices)
            self.tokens, self.starts = run_tokens(directory), starts_of(directory)
            self._console: Console = open_console(str(directory), log_level)
            opened.callback(self._console.close)
            self._episodes = _opened(CsvLogger(directory / "episodes.csv"), opened)
            self._debug_log = DebugLog(directory / "debug.log")
            attach(self._debug_log, opened)
            if log_level:
                attach(ConsoleMessages(self._console, log_level), opened)
            table = directory / "progress.csv"
            self._loggers: list[Logger] = [_opened(CsvLogger(table), opened), _opened(JsonlLogger(table), opened)]
            self._loggers += chosen  # in this order: a logger may read the file of one before it
            self._open = opened.pop_all()
            self._open.enter_context(named.pop_all())
        self._sync = sync
        if not resume:
            self._copy()

    def log(self, row: Mapping[str, float]) -> None:
        """Write the row to every logger and show it.

        Raises:
            ValueError: it has no `env_steps`.    ConfigError: it lacks the metric `snapshot_best`.
            RecordError: the directory or a file is gone, or a disk error with snapshot_errors=stop.
        """
        self._record_resumed()
        if "env_steps" not in row:
            raise ValueError(f"a row of metrics needs env_steps, got {', '.join(row)}")
        plain: dict[str, float] = {"env_steps": int(row["env_steps"])}
        for name, value in row.items():
            plain.setdefault(name, value if isinstance(value, int) else float(value))
        not_sent, not_copied = sum(logger.n_failed for logger in self._loggers), self._sync.n_failed
        failed = {"record/disk_errors": self._n_failed, "record/not_sent": not_sent, "record/not_copied": not_copied}
        plain |= {name: n for name, n in failed.items() if n}
        self._policy.check(plain)
        self._row = plain
        self._write(plain_names(plain))

    def _write(self, row: Mapping[str, float]) -> None:
        self._check_place()
        for logger in self._loggers:
            with naming(f"logger {qualified_name(type(logger))} failed in check"):
                logger.check()
        self._console.write(row)
        for logger in self._loggers:
            of = f" of logger {qualified_name(type(logger))}" if is_own(logger) else ""
            with self._disk_errors_of(f"the row of env_steps {row['env_steps']:,}{of}"), naming_logger(logger, "write"):
                logger.write(row)

    def begin(self, runner: object, config: Callable[[], Mapping[str, Any]]) -> None:
        if self._runner not in (None, runner):
            raise ConfigError(f"{self.directory} is another runner's; train this one in a logger_context of its own")
        self._runner = runner
        self._retention.check_resumed()
        self._record_resumed()
        add_config(self.directory / PARAMS, lambda: {**config(), **self._policy.settings()})

    def _record_resumed(self) -> None:
        """Once the state is taken over, and not before: a resume that is refused leaves the run as it was."""
        if not self._resumed:
            return
        with self._disk_errors_of(RESULT):
            (self.directory / RESULT).unlink(missing_ok=True)  # the run has not ended any more
        with self._disk_errors_of(PARAMS):  # if the run continues nevertheless, the next row tries again
            add_resumed(self.directory / PARAMS, self._resumed, self._sync.choices)
            self._resumed, self.starts = {}, starts_of(self.directory)
            self._copy()

    def _copy(self) -> None:
        """Copy the run elsewhere, where sync= says, from now on."""
        self._open.callback(self._sync.close)  # first of all, while the log is open
        self._sync.request()

    def record_choices(self, choices: Mapping[str, Any]) -> None:
        if choices:
            with self._disk_errors_of(PARAMS):
                add_choices(self.directory / PARAMS, choices)

    def log_episodes(self, rows: Sequence[Mapping[str, Any]]) -> None:
        self._episodes.check()
        with self._disk_errors_of("episodes.csv"):
            self._episodes.write_all([plain_names(row) for row in rows])

    def progress(self, step: int, n_steps: int, unit: str = "env_steps") -> None:
        self._console.progress(step, n_steps, unit)

    def snapshot_due(self, env_steps: int, updates: int = 0, final: bool = False) -> bool:
        return self._retention.due(env_steps, updates, final)

    def snapshot(
        self,
        state_fn: Callable[[], Any],
        env_steps: int,
        score: float = math.nan,
        *,
        updates: int = 0,
        final: bool = False,
        other_ranks: OtherRanks = no_other_ranks,
    ) -> Path | None:
        """As `BaseRun.snapshot`. Raises RecordError if the directory is gone, or a disk error stops the run."""
        self._check_place()
        row = self._row if is_of(self._row, env_steps, updates) else {}
        score = self._policy.score(row, score)
        try:
            path = self._retention.save_if_due(state_fn, env_steps, score, updates, final, other_ranks)
        except RecordError as error:
            self._handle_disk_error(error, final or self._policy.errors == "stop")
            return None
        if path is not None:
            _logger.debug("snapshot %s, score %s", path.name, score)
            self._sync.request()
        return path

    @property
    def film_folder(self) -> str:
        return str(self.directory / FILMS)

    def log_evaluation(self, row: Mapping[str, float]) -> None:
        """As `BaseRun.log_evaluation`. Raises RecordError as `log`."""
        self._write(plain_names(row))

    def await_scores(self, env_steps: Collection[int]) -> None:
        self._retention.awaited = env_steps

    def score_snapshot(self, env_steps: int, evaluation: Mapping[str, float]) -> None:
        """As `BaseRun.score_snapshot`. Raises RecordError as `snapshot`."""
        self._check_place()
        score = self._policy.score(evaluation, evaluation.get("eval/return_mean", math.nan))
        with self._disk_errors_of(f"the score of the snapshot of env_steps {env_steps:,}"):
            self._retention.score(env_steps, score)
            self._sync.request()

    def write_result(self, result: Mapping[str, Any]) -> None:
        try:
            write_result(self.directory / RESULT, result)
        except OSError as error:
            _logger.warning("%s", disk_error(RESULT, self.directory, error))

    @contextmanager
    def _disk_errors_of(self, what: str) -> Iterator[None]:
        """Handle those inside, of writing `what`."""
        try:
            yield
        except OSError as error:
            self._handle_disk_error(disk_error(what, self.directory, error), self._policy.errors == "stop")

    def _handle_disk_error(self, error: RecordError, stop: bool) -> None:
        """Count a disk error; raise it if the run must stop, else log a warning."""
        self._n_failed += 1
        if stop:
            resume = shlex.quote(f"resume={self.directory}")
            raise RecordError(f"{error}. Once that is mended, continue with {resume}") from error
        _logger.warning("%s. The run continues because of snapshot_errors=continue", error)

    def _check_place(self) -> None:
        if inode(self.directory) != self._inode:
            raise RecordError(f"{self.directory} was deleted or moved during the run; nothing more can be recorded")
        if (snapshots := self.directory / "snapshot").is_symlink():
            raise RecordError(f"{snapshots} was replaced by a link during the run; nothing more can be recorded in it")
        if not self._debug_log.is_in_place():
            warn_once(f"{self._debug_log.baseFilename} was deleted or replaced during the run; messages are lost")

    def truncate_after(self, env_steps: int) -> None:
        self._record_resumed()
        for logger in (self._episodes, *self._loggers):
            try:
                with naming_logger(logger, "truncate_after"):
                    logger.truncate_after(env_steps)
            except OSError as error:
                raise disk_error("the log up to the snapshot", self.directory, error) from error
        self._retention.truncate_after(env_steps)
        self._sync.request()  # again: what is copied meanwhile may be of before
        _logger.debug("logs trimmed to env_steps %s", env_steps)

    def record_exception(self, error: BaseException) -> None:
        """Write it to debug.log only, with its traceback unless a signal stopped the run; the caller reports it."""
        if stopped := isinstance(error, Interrupted):
            error.directory = self.directory
        level, text = (logging.INFO, str(error)) if stopped else (logging.ERROR, "the run ended by an exception")
        info = None if stopped else (type(error), error, error.__traceback__)
        self._debug_log.handle(_logger.makeRecord(_logger.name, level, __file__, 0, text, (), info))

    def close(self) -> None:
        """Close all files, even if closing one of them fails. May be called twice.

        Raises:
            PartError: a logger of the user's own raised an exception, unless the run has failed already.
        """
        failed = sys.exc_info()[0] is not None
        try:
            self._open.close()
        except PartError as error:
            if not failed:
                raise
            _logger.warning("%s", error)
        except OSError as error:  # a full disk was reported before
            _logger.warning("closing %s: %s", self.directory, error.strerror or error)


def _opened(logger: _W, until: ExitStack) -> _W:
    until.callback(close_logger, logger)
    return logger
