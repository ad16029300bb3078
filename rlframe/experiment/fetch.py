"""resume=URI: the copy of a run, made by sync=, is fetched into a run directory on this machine and continued there."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from rlframe.core.command_line import KeyValues
from rlframe.core.errors import ConfigError, ReadableError, describe, printable, shortened
from rlframe.core.files import MAX_BYTES, check_free_space
from rlframe.experiment.job import read_job
from rlframe.record.context import new_directory
from rlframe.record.directory import LOCK_FILE, PARAMS, add_choices
from rlframe.record.mirror import SNAPSHOTS, is_complete
from rlframe.record.remote import Remote, check_uri, is_uri, normalized
from rlframe.record.retention import restore_links
from rlframe.record.sync import CHOICE
from rlframe.system.distributed import rank_from_environment

_RUN = re.compile(r"run_(\d{1,15})")
_FOLDER = re.compile(r"\w[\w.+=,@-]{0,99}")


def with_fetched(keys: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a run, of which a resume=URI is fetched into log_dir=/run_<run_ID=>, by default below data/local.

    `resume` names that directory then, and unless `sync` is given, the run is copied to where it came from.

    Raises:
        ConfigError: there is no run, or it cannot be read, needs trust=true, or does not fit the other keys; the
            directory is not empty, or the disk is full. Nothing is left then.
    """
    uri = str(keys.get("resume", ""))
    if not is_uri(uri):
        return dict(keys)
    check_uri(uri, "resume")
    if rank_from_environment().world_size > 1:
        raise ConfigError(f"resume={uri} is not for ranks of torchrun; copy it here, and give resume=DIR")
    place = normalized(uri)
    base, _, name = place.rpartition("/")
    if base.endswith(":/"):
        raise ConfigError(f"resume={uri} names no run; give a run's folder, such as {uri}/run_0")
    kept = {key: value for key, value in keys.items() if key not in ("resume", "log_dir", "run_ID")}
    kept.setdefault("sync", base)
    with _renamed_when_complete(_directory(keys, base, name)) as (folder, directory), _errors_named(uri, folder):
        remote = Remote(place, lambda: None)  # Ctrl-C alone ends it
        _fetch(remote, folder, {**kept, "resume": str(folder)})
        add_choices(folder / PARAMS, {CHOICE: place})
    return {**kept, "resume": str(directory)}


def _directory(keys: Mapping[str, Any], base: str, name: str) -> Path:
    """The new run directory, created."""
    found, parent = _RUN.fullmatch(name), base.rpartition("/")[2]
    run_id = KeyValues([f"run_ID={keys.get('run_ID', found[1] if found else 0)}"]).count("run_ID", 0)
    return new_directory(keys.get("log_dir", ""), run_id, parent if _FOLDER.fullmatch(parent) else "run")


def _fetch(remote: Remote, folder: Path, keys: Mapping[str, Any]) -> None:
    """Fetch a run, its params.json first: whether it fits the keys and is trusted is known before the rest comes."""
    files = remote.files()
    if PARAMS not in files:
        runs = sorted({name.partition("/")[0] for name in files if _RUN.match(name)})
        raise ConfigError(f"it holds {', '.join(runs[:5])}: give one of them" if runs else "it holds no run")
    if files[PARAMS] > MAX_BYTES:
        raise ConfigError(f"{PARAMS} has {files[PARAMS]:,} bytes, more than the limit of {MAX_BYTES:,}")
    remote.fetch({PARAMS: files.pop(PARAMS)}, folder)
    read_job(keys)
    wanted = {name: size for name, size in files.items() if is_complete(files, name) and name != LOCK_FILE}
    check_free_space("the run", folder, sum(wanted.values()))
    remote.fetch(wanted, folder)
    restore_links(folder / SNAPSHOTS)


def _remove_leftovers(directory: Path) -> None:
    """Remove the hidden folders beside a directory of fetches that were killed."""
    name = f".fetching-{directory.name}-"
    for folder in directory.parent.glob(f"{name}*"):
        pid = folder.name.removeprefix(name)
        if pid.isdecimal() and (int(pid) == os.getpid() or not psutil.pid_exists(int(pid))):
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _renamed_when_complete(directory: Path) -> Iterator[tuple[Path, Path]]:
    """A hidden folder beside a new directory, and that directory, which it becomes; both are removed on an error."""
    folder = directory.with_name(f".fetching-{directory.name}-{os.getpid()}")
    try:
        _remove_leftovers(directory)
        folder.mkdir()
        yield folder, directory
        folder.rename(directory)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        with suppress(OSError):
            os.removedirs(directory)  # and the empty folders around it
        raise


@contextmanager
def _errors_named(uri: str, folder: Path) -> Iterator[None]:
    """Raise ConfigError for any exception: of a file system, or of a run that does not fit."""
    named = f"resume={shortened(uri)}"
    try:
        yield
    except ReadableError as error:
        raise ConfigError(printable(f"{named}: {str(error).replace(str(folder), normalized(uri))}")) from None
    except FileNotFoundError as error:
        raise ConfigError(
            printable(f"{named}: {describe(error)}; is the run there, and not just being copied?")
        ) from None
    except Exception as error:  # a file system raises one of many types
        raise ConfigError(printable(f"{named} cannot be read: {describe(error)}")) from None
