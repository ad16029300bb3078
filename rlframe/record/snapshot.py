"""The complete state of a run on disk: arrays and JSON in versioned directories that are whole or not there at all.

    snapshot/step_000000102400/manifest.json       format, meta, and what each rank has written (see parts)
    snapshot/last, snapshot/best                   relative symlinks

Nothing here is ever unpickled. A directory is written aside under a hidden name, flushed to the disk, then renamed.
"""

import logging
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from rlframe.core.errors import counted
from rlframe.core.files import NotRecorded as NotRecorded
from rlframe.core.files import SnapshotError as SnapshotError
from rlframe.core.files import refused, sync
from rlframe.record.manifest import read_manifest, write_manifest
from rlframe.record.names import env_steps_of as env_steps_of
from rlframe.record.names import free_name
from rlframe.record.names import list_snapshots as list_snapshots
from rlframe.record.parts import MANIFEST, read_part
from rlframe.record.parts import Part as Part
from rlframe.record.parts import write_part as write_part

Others = Callable[[Path], list[Part]]  # writes the parts of ranks 1, 2, ... in a folder

_logger = logging.getLogger("rlframe")


def no_others(folder: Path) -> list[Part]:
    """There is one rank."""
    return []


def save_snapshot(directory: Path, state: Any, meta: Mapping[str, Any], others: Others = no_others) -> Path:
    """Write `state` as the newest snapshot of `directory` and point `last` at it; the one before stays.

    Args:
        state: dicts, lists and tuples of tensors (any device), NumPy arrays, Chunked ones, numbers, strings and None.
        meta: JSON-able; has `env_steps`.
        others: writes the states of other ranks by `write_part` in the folder it is given, and tells of them.
    Raises:
        TypeError: the state holds something else; the message has its place.
        NotRecorded: the disk refuses; snapshots written before are untouched.
    """
    temporary = directory / f".writing-{os.getpid()}"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        remove_leftovers(directory)
        temporary.mkdir()
        write_manifest(temporary, meta, [write_part(temporary, 0, state), *others(temporary)])
        sync(temporary)
        target = free_name(directory, int(meta["env_steps"]))
        temporary.rename(target)
        sync(directory)
        point(directory / "last", target)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, OSError):
            raise refused(f"a snapshot in {directory}", directory, error) from error
        raise
    return target


def load_snapshot(path: Path, rank: int = 0, of: str = "") -> tuple[Any, dict[str, Any]]:
    """State (on the CPU) of a rank, and meta, of the snapshot that `path` names; see `load_newest`."""
    return load_newest(path, rank, of)[1:]


def load_newest(path: Path, rank: int = 0, of: str = "") -> tuple[Path, Any, dict[str, Any]]:
    """A snapshot, the state of a rank (on the CPU), and meta.

    Where `path` is a run, or its directory of snapshots, and the newest is damaged, the newest that is whole is taken
    and a warning names both. Where it is deleted meanwhile, because the run goes on, newer ones are taken. What was
    saved Chunked is still in its files, and read when asked for.

    Args:
        path: see `resolve_snapshot`.
        of: only what the state, a dict, has under this name is read; all, if empty.
    Raises:
        SnapshotError: not there, not whole, not ours, written by a newer rlframe, or without that rank; the message
            names the file.
    """
    found = _meant(path)
    refusal: SnapshotError | None = None
    for snapshot in found:
        try:
            state, meta = _load(snapshot, rank, of)
        except SnapshotError as error:
            if not snapshot.is_dir() and _meant(path) != found:  # its run goes on, and has others now
                return load_newest(path, rank, of)
            refusal = refusal or error
            if not error.damaged:
                break
            continue
        if refusal is not None:
            _logger.warning(
                "snapshot %s cannot be used: %s. Going back to the one before that is whole: %s",
                *(found[0].name, refusal, snapshot.name),
            )
        return snapshot, state, meta
    assert refusal is not None
    raise refusal


def _load(snapshot: Path, rank: int, of: str) -> tuple[Any, dict[str, Any]]:
    manifest = read_manifest(snapshot)
    if rank >= len(manifest.ranks):
        n_ranks = counted(len(manifest.ranks), "rank")
        raise SnapshotError(f"{snapshot} was written by {n_ranks}: it holds nothing of rank {rank}")
    return read_part(snapshot, rank, manifest.ranks[rank], of), manifest.meta


def read_meta(path: Path) -> dict[str, Any]:
    """The meta of a snapshot directory, without its arrays.

    Raises:
        SnapshotError: as `load_snapshot`.
    """
    return read_manifest(path).meta


def resolve_snapshot(path: Path) -> Path:
    """The snapshot directory that `path` means: a run directory, its `snapshot`, a symlink there, or one of its steps.

    Raises:
        SnapshotError: there is none, with what is there instead.
    """
    return _meant(path)[0]


def _meant(path: Path) -> list[Path]:
    """The snapshot that is named, or all of a run, newest first."""
    path = Path(path)
    if not path.exists():
        raise SnapshotError(f"there is no {path}{_dangling(path)}")
    check_inside(path / "snapshot")
    if path.name in ("last", "best") and path.is_symlink() and os.sep in os.readlink(path):
        raise SnapshotError(f"{path} names {os.readlink(path)}, which is no snapshot beside it")
    named = path.resolve()
    if (path / MANIFEST).is_file() or named in list_snapshots(named.parent):
        return [named]
    directory = path / "snapshot" if (path / "snapshot").is_dir() else path
    found = [snapshot.resolve() for snapshot in reversed(list_snapshots(directory))]
    if found:
        return found
    if (path / "params.json").is_file():
        raise SnapshotError(f"{path} is a run without a snapshot; was it started with snapshot_mode=none?")
    runs = sorted(run.name for run in path.glob("run_*")) if path.is_dir() else []
    hint = f"; it holds {', '.join(runs[:5])}: name one" if runs else "; give a run directory or one of its snapshots"
    raise SnapshotError(f"{path} is neither a run nor a snapshot{hint}")


def check_inside(directory: Path) -> None:
    """Raises:
    SnapshotError: this directory of snapshots is a link, so that a run would read, and delete, what is elsewhere.
    """
    if directory.is_symlink():
        raise SnapshotError(f"{directory} is a link to {os.readlink(directory)}; put the directory itself in its place")


def _dangling(path: Path) -> str:
    beside = list_snapshots(path.parent)
    return f"; beside it: {_names(beside[-5:])}" if beside else ""


def _names(paths: Iterable[Path]) -> str:
    return ", ".join(path.name for path in paths)


def point(link: Path, target: Path) -> None:
    """Make the symlink `link` name `target` beside it, in one step: it is never missing in between."""
    temporary = link.with_name(f".linking-{link.name}")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target.name)
    os.replace(temporary, link)
    sync(link.parent)


def pointed(link: Path) -> Path | None:
    """The snapshot beside it that `link` names, if it does."""
    target = link.parent / os.readlink(link) if link.is_symlink() else link
    return target if target in list_snapshots(link.parent) else None


def remove_snapshot(snapshot: Path) -> None:
    """Delete a snapshot; hidden first, so that half of one is never taken for a whole."""
    hidden = snapshot.with_name(f".removing-{snapshot.name}")
    snapshot.rename(hidden)
    shutil.rmtree(hidden)


def remove_leftovers(directory: Path) -> None:
    """Clear away what a writer that died has left: a run has one writer, so nobody is still at it."""
    for entry in directory.glob(".*"):
        if not entry.name.startswith((".writing-", ".removing-", ".linking-")):
            continue
        if entry.is_symlink() or not entry.is_dir():
            entry.unlink()
        else:
            shutil.rmtree(entry)
