"""The complete state of a run on disk: arrays and JSON in versioned directories that are whole or not there at all.

    snapshot/step_000000102400/manifest.json       format, meta, sizes and hashes of the files, the tree
    snapshot/step_000000102400/arrays.safetensors  the arrays the tree names
    snapshot/step_000000102400/rank_1.safetensors  those of rank 1, where several train together; and so on
    snapshot/last, snapshot/best                   relative symlinks

Nothing here is ever unpickled. A directory is written aside under a hidden name, flushed to the disk, then renamed.
"""

import hashlib
import json
import os
import re
import shutil
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from rlframe import __version__
from rlframe.core.errors import ReadableError
from rlframe.core.text import counted
from rlframe.record.tree import TreeError, decode, encode

FORMAT = 1
MANIFEST = "manifest.json"
ARRAYS = "arrays.safetensors"
_MAX_MANIFEST_BYTES = 2**28  # a manifest holds structure and plain numbers, never arrays
_STEP_NAME = re.compile(r"step_(\d{12,})(?:\.(\d+))?")
_RANK_FILE = re.compile(r"rank_(\d+)\.safetensors")
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*\.safetensors")


class SnapshotError(ReadableError):
    """A snapshot that cannot be used; the message names the file, what is wrong and what to do."""


@dataclass(frozen=True)
class Part:
    """The state of one rank, as it was written: its file's name and facts, and its tree."""

    file: str
    facts: dict[str, Any]
    tree: Any


Others = Callable[[Path], list[Part]]  # writes the parts of ranks 1, 2, ... in a folder


def no_others(folder: Path) -> list[Part]:
    """There is one rank."""
    return []


def write_part(folder: Path, rank: int, state: Any) -> Part:
    """Write a rank's state as a file in `folder`, flushed to the disk.

    Raises:
        TypeError: the state holds what a snapshot cannot.    OSError: the disk refuses, or there is no such folder.
    """
    file = folder / (f"rank_{rank}.safetensors" if rank else ARRAYS)
    arrays: dict[str, np.ndarray] = {}
    tree = encode(state, arrays)
    save_file(arrays, file)
    _sync(file)
    return Part(file.name, {"bytes": file.stat().st_size, "sha256": _sha256(file)}, tree)


def save_snapshot(directory: Path, state: Any, meta: Mapping[str, Any], others: Others = no_others) -> Path:
    """Write `state` as the newest snapshot of `directory` and point `last` at it; the one before stays.

    Args:
        state: dicts, lists and tuples of tensors (any device), NumPy arrays, numbers, strings and None.
        meta: JSON-able; has `env_steps`.
        others: writes the states of other ranks by `write_part` in the folder it is given, and tells of them.
    Raises:
        TypeError: the state holds something else; the message has its place.
        OSError: the disk refuses; snapshots written before are untouched.
    """
    directory.mkdir(parents=True, exist_ok=True)
    remove_leftovers(directory)
    temporary = directory / f".writing-{os.getpid()}"
    temporary.mkdir()
    try:
        _write_files(temporary, state, meta, others)
        target = _free_name(directory, int(meta["env_steps"]))
        temporary.rename(target)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    _sync(directory)
    point(directory / "last", target)
    return target


def _write_files(temporary: Path, state: Any, meta: Mapping[str, Any], others: Others) -> None:
    parts = [write_part(temporary, 0, state), *others(temporary)]
    manifest: dict[str, Any] = {
        "format": FORMAT,
        "rlframe": __version__,
        "written": datetime.now(UTC).isoformat(timespec="seconds"),
        "meta": dict(meta),
        "files": {part.file: part.facts for part in parts},
        "tree": parts[0].tree,
        "ranks": [part.tree for part in parts[1:]],
    }
    manifest["sha256"] = _self_hash(manifest)
    (temporary / MANIFEST).write_text(json.dumps(manifest, allow_nan=False, indent=1) + "\n", encoding="utf-8")
    _sync(temporary / MANIFEST)
    _sync(temporary)


def load_snapshot(path: Path, rank: int = 0) -> tuple[Any, dict[str, Any]]:
    """State (on the CPU) of a rank, and meta, of the snapshot that `path` names (see `resolve_snapshot`).

    Raises:
        SnapshotError: not there, not whole, not ours, written by a newer rlframe, or without that rank; the message
            names the file.
    """
    path = resolve_snapshot(path)
    manifest = _read_manifest(path / MANIFEST)
    trees = [manifest["tree"], *manifest.get("ranks", [])]
    if rank >= len(trees):
        raise SnapshotError(f"{path} was written by {counted(len(trees), 'rank')}: it holds nothing of rank {rank}")
    arrays: dict[str, np.ndarray] = {}
    for name, facts in manifest["files"].items():
        if _rank_of(name) != rank:
            continue
        _check_file(path / name, facts)
        try:
            arrays.update(load_file(path / name))
        except (SafetensorError, KeyError, ValueError) as error:
            raise SnapshotError(f"{path / name} is not a file of arrays: {error}") from None
    try:
        return decode(trees[rank], arrays), manifest["meta"]
    except (TreeError, RecursionError) as error:
        raise SnapshotError(f"{path / MANIFEST} does not describe a state: {error}") from None


def _rank_of(file: str) -> int:
    match = _RANK_FILE.fullmatch(file)
    return int(match[1]) if match else 0


def read_meta(path: Path) -> dict[str, Any]:
    """The meta of a snapshot directory, without its arrays.

    Raises:
        SnapshotError: as `load_snapshot`.
    """
    meta: dict[str, Any] = _read_manifest(path / MANIFEST)["meta"]
    return meta


def _read_manifest(file: Path) -> dict[str, Any]:
    if not file.is_file() or file.is_symlink():
        raise SnapshotError(f"{file} is missing: {file.parent} is not a snapshot")
    if file.stat().st_size > _MAX_MANIFEST_BYTES:
        raise SnapshotError(f"{file} has {file.stat().st_size:,} bytes; a manifest has at most {_MAX_MANIFEST_BYTES:,}")
    try:
        manifest = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise SnapshotError(f"{file} is damaged: {error}; use another snapshot beside it") from None
    if not isinstance(manifest, dict) or not isinstance(manifest.get("format"), int):
        raise SnapshotError(f"{file} is not the manifest of a snapshot: it names no format")
    if manifest["format"] != FORMAT:
        raise SnapshotError(
            f"{file} has format {manifest['format']}, written by rlframe {manifest.get('rlframe')}; rlframe "
            f"{__version__} reads format {FORMAT}: use the version that wrote it"
        )
    if manifest.get("sha256") != _self_hash(manifest):
        raise SnapshotError(f"{file} is damaged: its content does not match its hash; use another snapshot beside it")
    _check_fields(file, manifest)
    return manifest


def _check_fields(file: Path, manifest: dict[str, Any]) -> None:
    files, meta = manifest.get("files"), manifest.get("meta")
    if not isinstance(files, dict) or not isinstance(meta, dict) or "tree" not in manifest:
        raise SnapshotError(f"{file} lacks one of files, meta, tree")
    if not isinstance(manifest.get("ranks", []), list):
        raise SnapshotError(f"{file} gives the states of other ranks, but not as a list")
    for name, facts in files.items():
        if not _FILE_NAME.fullmatch(name):
            raise SnapshotError(f"{file} names the file {name!r}; only plain *.safetensors names beside it are read")
        if not isinstance(facts, dict) or not isinstance(facts.get("bytes"), int) or "sha256" not in facts:
            raise SnapshotError(f"{file} does not give bytes and sha256 of {name}")


def _check_file(file: Path, facts: dict[str, Any]) -> None:
    try:
        status = os.lstat(file)
    except OSError as error:
        raise SnapshotError(f"{file} cannot be read: {error.strerror}") from None
    if not stat.S_ISREG(status.st_mode):
        raise SnapshotError(f"{file} is not a plain file")
    if status.st_size != facts["bytes"]:
        raise SnapshotError(f"{file} has {status.st_size:,} bytes, its manifest says {facts['bytes']:,}: truncated?")
    if _sha256(file) != facts["sha256"]:
        raise SnapshotError(f"{file} is damaged: its content does not match its hash; use another snapshot beside it")


def resolve_snapshot(path: Path) -> Path:
    """The snapshot directory that `path` means: a run directory, its `snapshot`, a symlink there, or one of its steps.

    Raises:
        SnapshotError: there is none, with what is there instead.
    """
    path = Path(path)
    if not path.exists():
        raise SnapshotError(f"there is no {path}{_dangling(path)}")
    if (path / MANIFEST).is_file():
        return path.resolve()
    directory = path / "snapshot" if (path / "snapshot").is_dir() else path
    found = list_snapshots(directory)
    if found:
        return found[-1].resolve()
    if (path / "params.json").is_file():
        raise SnapshotError(f"{path} is a run without a snapshot; was it started with snapshot_mode=none?")
    runs = sorted(run.name for run in path.glob("run_*")) if path.is_dir() else []
    hint = f"; it holds {', '.join(runs[:5])}: name one" if runs else "; give a run directory or one of its snapshots"
    raise SnapshotError(f"{path} is neither a run nor a snapshot{hint}")


def _dangling(path: Path) -> str:
    beside = list_snapshots(path.parent)
    return f"; beside it: {', '.join(step.name for step in beside[-5:])}" if beside else ""


def list_snapshots(directory: Path) -> list[Path]:
    """The snapshots in a `snapshot` directory, oldest first. All are complete: nothing else is named so."""
    if not directory.is_dir():
        return []
    found = [(match, entry) for entry in directory.iterdir() if (match := _STEP_NAME.fullmatch(entry.name))]
    found.sort(key=lambda pair: (int(pair[0][1]), int(pair[0][2] or 0)))
    return [entry for _, entry in found]


def env_steps_of(snapshot: Path) -> int:
    """The env_steps in the name of a snapshot directory."""
    match = _STEP_NAME.fullmatch(snapshot.name)
    if match is None:
        raise SnapshotError(f"{snapshot} is not named step_<env_steps>")
    return int(match[1])


def point(link: Path, target: Path) -> None:
    """Make the symlink `link` name `target` beside it, in one step: it is never missing in between."""
    temporary = link.with_name(f".linking-{link.name}")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target.name)
    os.replace(temporary, link)
    _sync(link.parent)


def pointed(link: Path) -> Path | None:
    """The snapshot beside it that `link` names, if it does."""
    target = link.with_name(os.readlink(link)) if link.is_symlink() else None
    return target if target is not None and target.is_dir() and target.parent == link.parent else None


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
        if entry.is_symlink():
            entry.unlink()
        else:
            shutil.rmtree(entry)


def _free_name(directory: Path, env_steps: int) -> Path:
    # A second snapshot of one step stands beside the first, which whoever rotates them may then remove.
    name, n = f"step_{env_steps:012d}", 0
    while (directory / name).exists():
        n += 1
        name = f"step_{env_steps:012d}.{n}"
    return directory / name


def _self_hash(manifest: dict[str, Any]) -> str:
    rest = {key: value for key, value in manifest.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(rest, separators=(",", ":")).encode()).hexdigest()


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _sync(path: Path) -> None:
    """Flush a file or a directory's entries to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
