"""Snapshots: the complete state of a run as arrays and JSON in versioned directories, complete or not there at all."""

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rlframe import __version__
from rlframe.core.errors import ConfigError, counted
from rlframe.core.files import NotRecorded as NotRecorded
from rlframe.core.files import SnapshotError, read_plain, refused, sync, write_file
from rlframe.record.rank_state import MANIFEST, Facts, Part, file_of, free_name, read_part
from rlframe.record.rank_state import env_steps_of as env_steps_of
from rlframe.record.rank_state import list_snapshots as list_snapshots
from rlframe.record.rank_state import write_part as write_part

FORMAT = 2  # 1: every array of a rank lies in its one file
_MAX_BYTES = 2**26  # a manifest holds structure and plain numbers, never arrays


@dataclass(frozen=True)
class Manifest:
    """What a snapshot is."""

    meta: dict[str, Any]
    ranks: list[Facts]  # see write_part


def write_manifest(folder: Path, meta: Mapping[str, Any], parts: Sequence[Part]) -> None:
    """The last file of a snapshot, flushed to the disk."""
    manifest: dict[str, Any] = {
        "format": FORMAT,
        "rlframe": __version__,
        "written": datetime.now(UTC).isoformat(timespec="seconds"),
        "meta": dict(meta),
        "ranks": [part.facts for part in parts],
    }
    manifest["sha256"] = self_hash(manifest)
    text = json.dumps(manifest, allow_nan=False, indent=1) + "\n"
    write_file(folder / MANIFEST, text.encode())


def read_manifest(folder: Path) -> Manifest:
    """Of a snapshot of any format there has been.

    Raises:
        SnapshotError: not there, not whole, not ours, or written by a newer rlframe; names the file.
    """
    file = folder / MANIFEST
    found = _parsed(file)
    if found["format"] == 1:
        return _of_format_1(file, found)
    match found:
        case {"meta": dict() as meta, "ranks": list() as ranks}:
            return Manifest(_with_step(file, meta), [_checked(file, rank, facts) for rank, facts in enumerate(ranks)])
    raise SnapshotError(f"{file} lacks one of meta, ranks")


def _parsed(file: Path) -> dict[str, Any]:
    """What the file holds, if it is as it was written. Its hash is taken alike in every format, to come ones too."""
    if not os.path.lexists(file):
        raise SnapshotError(f"{file} is missing: {file.parent} is not a snapshot", damaged=True)
    damaged = f"{file} is damaged: {{}}; use another snapshot beside it"
    try:
        manifest = json.loads(read_plain(file, _MAX_BYTES))
        whole = isinstance(manifest, dict) and manifest.get("sha256") == self_hash(manifest)
    except ConfigError as error:
        raise SnapshotError(str(error)) from None
    except (ValueError, RecursionError) as error:
        raise SnapshotError(damaged.format(error), damaged=True) from None
    if not isinstance(manifest, dict) or not isinstance(manifest.get("format"), int):
        raise SnapshotError(f"{file} is not the manifest of a snapshot: it names no format", damaged=True)
    if not whole:
        raise SnapshotError(damaged.format("its content does not match its hash"), damaged=True)
    if not 1 <= manifest["format"] <= FORMAT:
        raise SnapshotError(
            f"{file} has format {manifest['format']}, written by rlframe {manifest.get('rlframe')}; rlframe "
            f"{__version__} reads formats 1 to {FORMAT}: use the version that wrote it"
        )
    return manifest


def _of_format_1(file: Path, manifest: dict[str, Any]) -> Manifest:
    match manifest:
        case {"files": dict() as files, "meta": dict() as meta, "tree": tree}:
            ranks = manifest.get("ranks", [])
            trees = [tree, *(ranks if isinstance(ranks, list) else [])]
        case _:
            raise SnapshotError(f"{file} lacks one of files, meta, tree")
    if unknown := sorted(set(files) - {file_of(rank) for rank in range(len(trees))}):
        raise SnapshotError(f"{file} names the file {unknown[0]!r}; only {file_of(0)} and those of ranks are read")
    of_files = [files.get(file_of(rank), {}) for rank in range(len(trees))]
    facts = [
        {"large": {}, "tree": tree, **each} if isinstance(each, dict) else each
        for tree, each in zip(trees, of_files, strict=True)
    ]
    return Manifest(_with_step(file, meta), [_checked(file, rank, each) for rank, each in enumerate(facts)])


def _with_step(file: Path, meta: dict[str, Any]) -> dict[str, Any]:
    if type(meta.get("env_steps")) is not int or meta["env_steps"] < 0:
        raise SnapshotError(f"{file} does not say of how many env_steps it is")
    return meta


def _checked(file: Path, rank: int, facts: Any) -> Facts:
    match facts:
        case {"bytes": int(), "sha256": str(), "large": dict(), "tree": _}:
            return dict(facts)
    raise SnapshotError(f"{file} does not give bytes, sha256, large and tree of rank {rank}")


def self_hash(manifest: Mapping[str, Any]) -> str:
    """Of all that a manifest tells but this hash."""
    rest = {key: value for key, value in manifest.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(rest, separators=(",", ":")).encode()).hexdigest()


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
