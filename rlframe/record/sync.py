"""sync=URI: a thread that copies a run directory elsewhere, at each snapshot and at the end of the run."""

import logging
import os
import re
import shlex
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

from rlframe.core.errors import ConfigError, Interrupted, RecordError, describe, printable, shortened
from rlframe.core.files import read_json
from rlframe.record.directory import PARAMS
from rlframe.record.mirror import SNAPSHOTS, Mirror
from rlframe.record.rank_state import list_snapshots
from rlframe.record.remote import SEPARATOR, Remote, check_uri, normalized

CHOICE = "sync"  # the key in params.json's `chosen` of the place that a run is copied to
_END_S, _STOPPED_S, _LONGEST_S = 60.0, 10.0, 600.0  # at the end: without progress; after a signal; in all
_QUIET_S = 2.0  # before the wait at the end is explained
_RETRY_S, _MAX_RETRY_S = 10.0, 600.0  # after a failure, doubled each time
_HUNG_S = 300.0  # without progress; doubled each time
_UNUSUAL = re.compile(r"[^\w.+=,@~ -]")

_logger = logging.getLogger("rlframe")


class BaseSync:
    """Copies the run of a process elsewhere. This base class, used where sync= is empty, copies nothing."""

    place = ""  # the URI of the run's copy
    n_failed = 0  # attempts that failed so far

    @property
    def choices(self) -> dict[str, str]:
        """What params.json says of it in `chosen`."""
        return {CHOICE: self.place} if self.place else {}

    def in_use(self) -> Path | None:
        """The snapshot that is being copied, which must not be deleted."""
        return None

    def request(self) -> None:
        """Copy the run as it is now, in the background; the newest request replaces those that wait."""

    def close(self) -> None:
        """Copy the run as it is now, and wait for that, but not forever. May be called twice."""


class _Abandoned(Exception):
    """This thread has hung, and another one works in its place."""


class Sync(BaseSync):
    """A failure is one warning, and is retried later, with a new connection. So is a copy without any progress."""

    def __init__(self, directory: Path, place: str) -> None:
        self.place, self.n_failed = place, 0
        self._directory = directory
        self._requested, self._closing = threading.Event(), threading.Event()
        self._in_use: Path | None = None
        self._copied = ""  # the newest snapshot there
        self._problem = ""  # why the last attempt failed
        self._n_in_row = 0  # failures since the last success
        self._generation = 0  # of the thread that works; others are abandoned
        self._is_refused = False  # by what is there
        self._busy, self._complete = False, False
        self._beat_s = time.monotonic()  # the last progress
        self._thread = self._new_thread()

    def _new_thread(self) -> threading.Thread:
        return threading.Thread(target=self._work, args=(self._generation,), daemon=True, name="sync")

    def in_use(self) -> Path | None:
        return self._in_use

    def request(self) -> None:
        quiet_s, limit_s = time.monotonic() - self._beat_s, _HUNG_S * 2**self._generation
        if self._busy and quiet_s > limit_s:
            self._generation += 1
            self._fail(f"no progress for {quiet_s:.0f} s")
            self._thread = self._new_thread()
        self._requested.set()
        if not self._thread.ident:
            self._beat_s = time.monotonic()
            _logger.info("sync: the run is copied to %s", printable(self.place))
            self._thread.start()

    def _work(self, generation: int) -> None:
        mirror: Mirror | None = None
        closing = False
        while not closing:
            self._requested.wait()
            self._requested.clear()
            closing = self._closing.is_set()
            try:
                self._beat_s, self._busy = time.monotonic(), True
                mirror = mirror or Mirror(self._directory, Remote(self.place, partial(self._beat, generation)))
                self._copy(mirror, closing)
            except _Abandoned:
                return
            except (Exception, SystemExit) as error:  # sys.exit would end this thread without a word
                if generation != self._generation:
                    return
                mirror, self._busy = None, False
                self._is_refused = isinstance(error, RecordError)
                self._fail(describe(error))
                self._requested.set()
                self._closing.wait(min(_MAX_RETRY_S, _RETRY_S * 2 ** min(self._n_in_row - 1, 20)))

    def _copy(self, mirror: Mirror, closing: bool) -> None:
        """Copy until the newest snapshot was not deleted meanwhile."""
        while True:
            snapshots = list_snapshots(self._directory / SNAPSHOTS)
            self._in_use = snapshots[-1] if snapshots else None
            try:
                mirror.copy(snapshots)
                break
            except FileNotFoundError:
                if not snapshots or snapshots[-1].exists():
                    raise
            finally:
                self._in_use = None
        self._copied = snapshots[-1].name if snapshots else ""
        self._busy, self._complete, self._is_refused = False, closing, False
        if self._n_in_row:
            _logger.info("sync: %s has the run again", printable(self.place))
        self._n_in_row = 0

    def _beat(self, generation: int) -> None:
        if generation != self._generation:
            raise _Abandoned
        self._beat_s = time.monotonic()

    def _fail(self, problem: str) -> None:
        self.n_failed += 1
        self._n_in_row += 1
        self._problem = problem
        if self._n_in_row == 1:
            later = "" if self._is_refused else "; this is tried again later"
            text = f"sync: the run is not copied to {shortened(self.place)}: {problem}{later}"
            _logger.warning("%s", printable(text))

    def close(self) -> None:
        if self._closing.is_set():
            return
        stopped = isinstance(sys.exc_info()[1], Interrupted)
        self._closing.set()
        self.request()
        start_s = self._beat_s = time.monotonic()
        told = False
        while self._thread.is_alive():
            now = time.monotonic()
            if now - start_s > (_STOPPED_S if stopped else _LONGEST_S) or now - max(start_s, self._beat_s) > _END_S:
                break
            if now - start_s > _QUIET_S and not told:
                told = True
                _logger.info("sync: copying the end of the run to %s; Ctrl-C ends without it", printable(self.place))
            self._thread.join(0.1)
        self._generation += 1  # the thread writes no more
        if not self._complete:
            self._warn_incomplete(time.monotonic() - start_s)

    def _warn_incomplete(self, waited_s: float) -> None:
        reason = self._problem if self._n_in_row else f"the copy was not complete after {waited_s:.0f} s"
        has = f"the run up to {self._copied}" if self._copied else "no snapshot of this process"
        remedy = "" if self._is_refused else f"; {shlex.quote(f'resume={self._directory}')} copies it"
        text = f"sync: {shortened(self.place)} has {has}, not its end: {reason}{remedy}"
        _logger.warning("%s", printable(text))


def make_sync(uri: str, directory: Path) -> BaseSync:
    """The copying of a run directory to `uri`/<its path below the working directory>, or to where it was copied before.

    The path of a directory elsewhere is its whole one. An empty uri: nothing is copied.

    Raises:
        ConfigError: see `check_uri`; or the place is the run directory itself.
    """
    check_uri(uri, "sync")
    if not uri:
        return BaseSync()
    base = normalized(uri)
    before = _place_before(directory)
    parts = before.removeprefix(f"{base}/").split("/")
    below = before.startswith(f"{base}/") and not {"", ".", ".."} & set(parts) and not any(map(_UNUSUAL.search, parts))
    place = before if below else f"{base}/{_relative(directory)}"
    _check_elsewhere(place, directory)
    return Sync(directory, place)


def _place_before(directory: Path) -> str:
    """Where params.json says that the run was copied to; empty for a new run."""
    path = directory / PARAMS
    chosen: Any = read_json(path).get("chosen") if path.is_file() else {}
    return str(chosen.get(CHOICE, "")) if isinstance(chosen, dict) else ""


def _relative(directory: Path) -> str:
    path = Path(os.path.normpath(directory))
    here = Path(os.path.normpath(Path.cwd()))
    parts = path.relative_to(here).parts if path.is_relative_to(here) else path.parts[1:]
    return "/".join(_UNUSUAL.sub("_", part) for part in parts)


def _check_elsewhere(place: str, directory: Path) -> None:
    protocol, _, rest = place.partition(SEPARATOR)
    if protocol != "file":
        return
    there, here = Path(rest).resolve(), directory.resolve()
    if there.is_relative_to(here) or here.is_relative_to(there):
        raise ConfigError(
            f"sync={shortened(place)} and the run directory {directory} hold each other; name another folder, or "
            f"continue a copy elsewhere by resume=file://{directory}"
        )
