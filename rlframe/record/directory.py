"""A run directory's own files: params.json (config, versions, host) and the lock against a second process.

Used by `record.run` and, for the directories of studies, by `study`.
"""

import contextlib
import fcntl
import functools
import hashlib
import json
import logging
import math
import os
import platform
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

from rlframe.core.errors import ConfigError, printable
from rlframe.core.files import parse_json, read_json, read_regular_file, replace_json, starts_in, write_file
from rlframe.core.own_code import own_code, source_digest
from rlframe.core.version import __version__

LOCK_FILE, PARAMS, RESULT = "lock.json", "params.json", "result.json"
FILMS = "videos"  # folder of the films of evaluations
_PACKAGES = ("torch", "numpy", "gymnasium", "ale-py", "mujoco", "safetensors")
_SAME_START_S = 2.0  # tolerance between two readings of one process's start time
_MAX_LOCK_BYTES = 1 << 16
_EARLY_S = 300.0  # what a run that failed so soon has collected is not worth its place

_logger = logging.getLogger("rlframe")


def write_params(path: Path, config: Mapping[str, Any]) -> None:
    """Write params.json of a new run, after `check_config`."""
    replace_json(path, {"config": dict(config), "seed": config.get("seed"), **session(), "code": own_code(config)})


def add_config(path: Path, make_config: Callable[[], Mapping[str, Any]]) -> None:
    """Write a config into params.json that has none. Raises ConfigError if a value is not JSON-able."""
    params = read_json(path)
    if not params.get("config"):
        check_config(config := make_config())
        of_run = {"config": dict(config), "seed": config.get("seed"), "code": own_code(config)}
        replace_json(path, {**params, **of_run})


def add_choices(path: Path, choices: Mapping[str, Any]) -> None:
    """Add what was chosen, for settings that are `auto` and for compile=, to params.json's `chosen`."""
    params = read_json(path)
    before = params.get("chosen", {})
    chosen = {**(before if isinstance(before, dict) else {}), **choices}
    if chosen != before:
        replace_json(path, {**params, "chosen": chosen})


def resumed_session(path: Path, config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """What a session that resumes a run adds to its params.json, and the names of own code edited since.

    Beside the facts of each session, it has the settings that differ from the recorded config. What the run had chosen
    is no difference.

    Raises:
        ConfigError: params.json is damaged.
    """
    try:
        params = read_json(path)
        before, chosen = params.get("config", {}), params.get("chosen", {})
        if not (isinstance(before, dict) and isinstance(chosen, dict) and isinstance(params.get("resumed", []), list)):
            raise ConfigError(f"{path} is damaged: config and chosen must be objects and resumed a list")
        settled = {key for key, value in before.items() if value == "auto"} | {"compile"}
        before = {key: chosen.get(key, value) if key in settled else value for key, value in before.items()}
    except ConfigError as error:
        raise ConfigError(f"{error}; the run cannot be resumed; start a new one with init= its snapshot") from None
    changed = {key: value for key, value in config.items() if key not in before or before[key] != value}
    code, before = own_code(config), _last_code(params)
    moved = {Path(name).name: digest for name, digest in before.items() if not Path(name).expanduser().exists()}
    edited = [name for name, digest in code.items() if before.get(name, moved.get(Path(name).name, digest)) != digest]
    return {**session(), "changed": changed, "code": code}, edited


def add_resumed(path: Path, started: Mapping[str, Any], choices: Mapping[str, Any]) -> None:
    """Add a `resumed_session` to params.json's list `resumed`, and to its `chosen`; see `add_choices`."""
    params = read_json(path)
    params["resumed"] = [*params.get("resumed", []), started]
    params["chosen"] = {**params.get("chosen", {}), **choices}
    replace_json(path, params)


def _last_code(params: Mapping[str, Any]) -> dict[str, str]:
    """The digests of own code at the last of a run's starts that had it; see `core.own_code`."""
    last: dict[str, str] = {}
    for code in (start.get("code") for start in starts_in(params)):
        last |= {str(name): str(digest) for name, digest in code.items()} if isinstance(code, dict) else {}
    return last


def edited_since(path: Path) -> list[str]:
    """Files and modules that are not what they were at the last start of the run with this params.json."""
    try:
        params = read_json(path)
    except ConfigError:
        return []
    return [name for name, digest in _last_code(params).items() if source_digest(name) not in ("", digest)]


def run_directory(log_dir: str | Path, run_id: int) -> Path:
    """That of a run in `log_dir`."""
    return Path(log_dir).expanduser().absolute() / f"run_{run_id}"


def attempts(directory: Path) -> list[Path]:
    """Attempts of a run that learned nothing and were moved aside, so that it could start anew."""
    start = f".{directory.name}."
    found = directory.parent.iterdir() if directory.parent.is_dir() else ()
    return sorted(path for path in found if path.name.startswith(start) and path.name[len(start) :].isdigit())


def next_attempt(directory: Path) -> Path:
    """Where the next of a run's `attempts` belongs."""
    last = max((int(path.suffix[1:]) for path in attempts(directory)), default=0)
    return directory.with_name(f".{directory.name}.{last + 1}")


def run_tokens(directory: Path) -> list[str]:
    """What identifies the run in a directory, also once it is resumed or moved; then its `attempts`.

    A directory without a params.json has none.
    """
    found = []
    for path in (directory, *attempts(directory)):
        with contextlib.suppress(ConfigError):
            found.append(token_of(read_json(path / PARAMS)))
    return found


def token_of(params: Mapping[str, Any]) -> str:
    """What identifies the run of a params.json."""
    first = [params.get(key) for key in ("started", "host", "command_line")]
    return hashlib.sha256(json.dumps(first).encode()).hexdigest()[:16]


def starts_of(directory: Path) -> list[str]:
    """When the run in a directory was started, and each time that it was resumed; a copy has others once it is."""
    with contextlib.suppress(ConfigError):
        return [str(each.get("started")) for each in starts_in(read_json(directory / PARAMS))]
    return []


def check_directory(directory: Path) -> None:
    """Raise ConfigError if `directory` is not empty."""
    if any(entry.name != LOCK_FILE for entry in directory.iterdir()):
        resume = f", or continue it with {shlex.quote(f'resume={directory}')}" if (directory / PARAMS).exists() else ""
        raise ConfigError(
            f"{directory} is not empty: a run is never overwritten. Use another run_ID or log_dir{resume}"
        )


def check_config(config: Mapping[str, Any]) -> None:
    """Raise ConfigError if a value is not JSON-able."""
    for key, value in config.items():
        try:
            json.dumps(value)
        except (TypeError, ValueError) as error:
            remedy = "; let env=functools.partial(MyEnv, ...) hold such arguments" if key.endswith("env_kwargs") else ""
            raise ConfigError(f"{key}={value!r:.100} cannot be written to params.json: {error}{remedy}") from None


def session() -> dict[str, Any]:
    return {
        "command_line": list(sys.argv),
        "started_in": os.getcwd(),
        "started": datetime.now().astimezone().isoformat(timespec="microseconds"),
        "versions": {"python": platform.python_version(), "rlframe": __version__, **_versions()},
        "git": _git(),
        "host": {
            "name": socket.gethostname(),
            "os": platform.platform(),
            "cpu": _cpu_name(),
            "cpu_count": os.cpu_count(),
        },
    }


@functools.cache
def _cpu_name() -> str:
    """As Linux names it; elsewhere what Python knows, which may be empty."""
    text = Path("/proc/cpuinfo").read_text(encoding="utf-8") if Path("/proc/cpuinfo").is_file() else ""
    found = re.search(r"^model name\s*: (.*)", text, re.MULTILINE)
    return found[1].strip() if found else platform.processor()


@functools.cache
def _versions() -> dict[str, str]:
    """Of the packages that results depend on, those that are installed."""
    versions = {}
    for package in _PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            versions[package] = version(package)
    return versions


def _git() -> dict[str, Any] | None:
    """Revision of the working directory and whether tracked files differ from it; None outside of git."""
    revision = _output("git", "rev-parse", "HEAD")
    if revision is None:
        return None
    changes = _output("git", "status", "--porcelain", "--untracked-files=no")
    return {"revision": revision, "dirty": None if changes is None else bool(changes)}


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True, stdin=subprocess.DEVNULL)
        return done.stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def write_result(path: Path, result: Mapping[str, Any]) -> None:
    """Write the result.json of a run that has ended; numbers that are not finite become null."""
    replace_json(path, finite(result))


def finite(value: Any) -> Any:
    """Plain data with null for numbers that are not finite, which JSON does not have."""
    if isinstance(value, Mapping):
        return {key: finite(each) for key, each in value.items()}
    if isinstance(value, list):
        return [finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def inode(directory: Path) -> tuple[int, int]:
    """Device and inode; zeros if it does not exist."""
    try:
        status = os.stat(directory)
    except OSError:
        return (0, 0)
    return status.st_dev, status.st_ino


@dataclass(frozen=True)
class LockHolder:
    """The process that holds a directory lock."""

    host: str
    pid: int
    started: float  # seconds since the epoch; with the pid, this identifies the process
    command: str

    def __str__(self) -> str:
        since = f"{datetime.fromtimestamp(self.started):%Y-%m-%d %H:%M:%S}"
        return printable(f"process {self.pid} on {self.host}, since {since} ({self.command})")

    def is_running(self) -> bool:
        """Whether the process still runs; valid on its own host only."""
        try:
            return abs(psutil.Process(self.pid).create_time() - self.started) < _SAME_START_S
        except (psutil.Error, OverflowError):
            return False


def this_process() -> LockHolder:
    me = psutil.Process()
    return LockHolder(socket.gethostname(), me.pid, me.create_time(), shlex.join(sys.argv)[:500])


class DirectoryLock:
    """Exclusive lock of a directory until `close`, or until this process dies.

    On a file system without locks, it is held while the process named in lock.json runs.
    """

    def __init__(self, directory: Path, job: str, keys: str) -> None:
        """Args:
            job: what runs there, for the error message.    keys: settings that choose another directory.
        Raises:
            ConfigError: another process holds the lock; the message names it.
        """
        self._path, self._ours = directory / LOCK_FILE, False
        self._descriptor = os.open(directory, os.O_RDONLY)
        try:
            self._acquire(f"{directory} is in use by {job}", f"stop it, or use another {keys}")
        except BaseException:
            os.close(self._descriptor)
            raise

    def _acquire(self, in_use: str, remedy: str) -> None:
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            locked = True
        except BlockingIOError:
            holder = read_lock(self._path)
            raise ConfigError(f"{in_use}{f', {holder}' if holder else ''}; {remedy}") from None
        except OSError:  # the file system has no locks
            locked = False
        before = read_lock(self._path)
        if before and not locked:
            self._check_dead(before, in_use, remedy)
        if before:
            _logger.warning("%s: lock taken over from %s, which no longer runs", self._path.parent, before)
        if before or locked:
            self._path.unlink(missing_ok=True)
        try:
            write_file(self._path, json.dumps(asdict(this_process())).encode())
        except FileExistsError:  # another process started at the same time, on a file system without locks
            raise ConfigError(f"{in_use}, started just now; {remedy}") from None
        except OSError:  # the disk is full
            self._path.unlink(missing_ok=True)
            raise
        self._ours = True

    def _check_dead(self, holder: LockHolder, in_use: str, remedy: str) -> None:
        if holder.host != socket.gethostname():
            raise ConfigError(
                f"{in_use}, {holder}; its file system has no locks, so only {printable(holder.host)} can tell whether "
                f"that process still runs: {remedy}, or if it has ended, remove {self._path}"
            )
        if holder.is_running():
            raise ConfigError(f"{in_use}, {holder}; {remedy}")

    def close(self) -> None:
        """Release the lock. May be called twice."""
        if self._ours:
            self._ours = False
            with contextlib.suppress(OSError):
                self._path.unlink()
            os.close(self._descriptor)


def move_failed_start(directory: Path) -> None:
    """Move a run that failed before its first update to its `attempts`, so that the next try can have its place.

    One that records a dataset stays, as the next try would begin it anew, and so does one that took long: what it
    collected is in its snapshot.

    Raises:
        ConfigError: another process holds its lock.
    """
    if not (directory / RESULT).exists():  # it never ran, or runs now
        return
    lock = DirectoryLock(directory, "a run", "run_ID or log_dir")
    with contextlib.closing(lock), contextlib.suppress(ConfigError):
        result, config = read_json(directory / RESULT), read_json(directory / PARAMS).get("config")
        records, seconds = isinstance(config, dict) and config.get("record"), result.get("elapsed_s")
        early = result.get("updates") == 0 and isinstance(seconds, int | float) and seconds < _EARLY_S
        if result.get("ended") == "failed" and early and not records:
            aside = directory.rename(next_attempt(directory))
            (aside / LOCK_FILE).unlink()
            _logger.warning("%s failed before its first update; it was moved to %s", directory, aside.name)


def film_path(folder: Path, env_steps: int) -> Path:
    """The film of the evaluation at `env_steps`. A GIF of it lies beside it."""
    return folder / f"step_{env_steps:012d}.mp4"


def read_lock(path: Path) -> LockHolder | None:
    """The process named in lock.json; None if the file is missing or invalid."""
    try:
        found = parse_json(read_regular_file(path, _MAX_LOCK_BYTES))
        holder = LockHolder(str(found["host"]), int(found["pid"]), float(found["started"]), str(found["command"]))
        datetime.fromtimestamp(holder.started)
    except (ConfigError, OSError, ValueError, KeyError, TypeError, ArithmeticError):
        return None
    return holder if holder.pid > 0 else None
