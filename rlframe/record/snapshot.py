"""Snapshots: the complete training state as arrays and JSON in versioned directories, written atomically.

A snapshot is `step_<env_steps>/`, or `step_<updates>/` where no environment is stepped, with a manifest and one file of
arrays per rank (see `rank_state`).
"""

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rlframe.core.errors import ConfigError, RecordError, SnapshotError, StateError, pluralize
from rlframe.core.files import check_entries, disk_error, parse_json, read_regular_file, replace_file, sync, write_file
from rlframe.core.version import __version__
from rlframe.record.codec import largest_part
from rlframe.record.metrics import step_of
from rlframe.record.rank_state import MANIFEST, RankEntry, read_rank_state, unused_path, write_rank_state
from rlframe.record.rank_state import list_snapshots as list_snapshots

FORMAT = 5
_MAX_BYTES = 2**26  # a manifest holds structure and plain numbers, never arrays
OtherRanks = Callable[[Path], list[RankEntry]]  # writes the states of ranks 1, 2, ... into a folder

_logger = logging.getLogger("rlframe")


def write_manifest(folder: Path, meta: Mapping[str, Any], ranks: Sequence[RankEntry]) -> None:
    """Write the manifest, the last file of a snapshot, and flush it to disk.

    Raises StateError if it could not be read: the state has too many values that are not in arrays.
    """
    manifest: dict[str, Any] = {
        "format": FORMAT,
        "rlframe": __version__,
        "written": datetime.now(UTC).isoformat(timespec="seconds"),
        "meta": dict(meta),
        "ranks": list(ranks),
    }
    manifest["sha256"] = self_hash(manifest)
    data = json.dumps(manifest, allow_nan=False).encode() + b"\n"  # indented, it would take ten times as long
    _check_size(data, ranks)
    write_file(folder / MANIFEST, data)


def _check_size(data: bytes, ranks: Sequence[RankEntry]) -> None:
    """Raise StateError if `read_manifest` would refuse this text."""
    try:
        check_entries(data)
        if len(data) > _MAX_BYTES:
            raise ValueError(f"it has {len(data):,} bytes, more than the limit of {_MAX_BYTES:,}")
    except ValueError as error:
        part = largest_part(max((rank["tree"] for rank in ranks), key=lambda tree: len(json.dumps(tree))))
        raise StateError(
            f"the state of the run cannot be kept in {MANIFEST}: {error}, most of them in {part}; make it arrays"
        ) from None


def read_manifest(folder: Path) -> tuple[dict[str, Any], list[RankEntry]]:
    """A snapshot's checked meta and entry of each rank. Raises SnapshotError if missing, damaged or of other format."""
    file = folder / MANIFEST
    match _parsed(file):
        case {"meta": dict() as meta, "ranks": list() as ranks}:
            if type(meta.get("env_steps")) is not int or meta["env_steps"] < 0:
                raise SnapshotError(f"{file} does not give its env_steps")
            return meta, [_checked(file, rank, entry) for rank, entry in enumerate(ranks)]
    raise SnapshotError(f"{file} lacks one of meta, ranks")


def _parsed(file: Path) -> dict[str, Any]:
    """The manifest's JSON after checking its hash and format. The hash is computed in the same way in every format."""
    if not os.path.lexists(file):
        raise SnapshotError(f"{file} is missing: {file.parent} is not a snapshot", damaged=True)
    damaged = f"{file} is damaged: {{}}; use another snapshot"
    try:
        manifest = parse_json(read_regular_file(file, _MAX_BYTES))
        whole = isinstance(manifest, dict) and manifest.get("sha256") == self_hash(manifest)
    except ConfigError as error:
        raise SnapshotError(str(error)) from None
    except ValueError as error:
        raise SnapshotError(damaged.format(error), damaged=True) from None
    if not isinstance(manifest, dict) or not isinstance(manifest.get("format"), int):
        raise SnapshotError(f"{file} is not the manifest of a snapshot: it gives no format", damaged=True)
    if not whole:
        raise SnapshotError(damaged.format("its content does not match its hash"), damaged=True)
    if manifest["format"] != FORMAT:
        raise SnapshotError(
            f"{file} has format {manifest['format']}, written by rlframe {manifest.get('rlframe')}; rlframe "
            f"{__version__} reads format {FORMAT} only: use the version that wrote it"
        )
    return manifest


def _checked(file: Path, rank: int, entry: Any) -> RankEntry:
    match entry:
        case {"bytes": int(), "sha256": str(), "large": dict(), "tree": _}:
            return dict(entry)
    raise SnapshotError(f"{file} lacks one of bytes, sha256, large, tree for rank {rank}")


def self_hash(manifest: Mapping[str, Any]) -> str:
    rest = {key: value for key, value in manifest.items() if key != "sha256"}
    return hashlib.sha256(json.dumps(rest, separators=(",", ":")).encode()).hexdigest()


def write_score(snapshot: Path, score: float) -> None:
    """Change the score in a snapshot's manifest."""
    manifest = _parsed(snapshot / MANIFEST)
    manifest["meta"]["score"] = score
    manifest["sha256"] = self_hash(manifest)
    replace_file(snapshot / MANIFEST, json.dumps(manifest, allow_nan=False) + "\n")


def no_other_ranks(folder: Path) -> list[RankEntry]:
    """Default of `other_ranks` for a run of one rank."""
    return []


def save_snapshot(
    directory: Path, state: Any, meta: Mapping[str, Any], other_ranks: OtherRanks = no_other_ranks
) -> Path:
    """Write `state` as the newest snapshot in `directory` and point `last` at it. Earlier snapshots are kept.

    Args:
        state: dicts, lists and tuples of tensors (any device), NumPy arrays, ChunkedArrays, numbers, strings, None.
        meta: JSON-able; must contain `env_steps`.
        other_ranks: writes the states of ranks 1, 2, ... into the given folder; returns their entries.
    Raises:
        TypeError: the state holds another type; the message gives its path.
        RecordError: a disk error, or `directory` is a link; existing snapshots are unchanged.
    """
    try:
        check_inside(directory)
    except SnapshotError as error:
        raise RecordError(f"no snapshot can be written: {error}") from None
    temporary = directory / f".writing-{os.getpid()}"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        remove_leftovers(directory)
        temporary.mkdir()
        write_manifest(temporary, meta, [write_rank_state(temporary, 0, state), *other_ranks(temporary)])
        sync(temporary)
        target = unused_path(directory / f"step_{step_of(meta):012d}", ".")
        temporary.rename(target)
        sync(directory)
        set_link(directory / "last", target)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, OSError):
            raise disk_error(f"a snapshot in {directory}", directory, error) from error
        raise
    return target


def load_snapshot(path: Path, rank: int = 0, key: str = "", without: str = "") -> tuple[Any, dict[str, Any]]:
    """The state of a rank (on the CPU) and the meta of a snapshot; see `load_newest`."""
    return load_newest(path, rank, key, without)[1:]


def load_newest(path: Path, rank: int = 0, key: str = "", without: str = "") -> tuple[Path, Any, dict[str, Any]]:
    """The snapshot's directory, the state of a rank (on the CPU) and meta.

    If `path` is a run or its `snapshot` directory and its newest snapshot is damaged, the newest intact one is loaded
    with a warning. If it is deleted while being read because the run continues, a newer one is loaded. ChunkedArrays
    are checked now and read from their files later.

    Args:
        path: see `resolve_snapshot`.
        key: load only this entry of the state, a dict; empty: all of it; of agent/x and agent/y, "agent" is {x, y}.
        without: an entry in that dict that is left out, and not checked.
    Raises:
        SnapshotError: missing, damaged, of another format, or without this rank; the message names the file.
    """
    found = _candidates(path)
    refusal: SnapshotError | None = None
    for snapshot in found:
        try:
            state, meta = _load(snapshot, rank, key, without)
        except SnapshotError as error:
            if not snapshot.is_dir() and _candidates(path) != found:  # the run has replaced it meanwhile
                return load_newest(path, rank, key, without)
            refusal = refusal or error
            if not error.damaged:
                break
            continue
        if refusal is not None:
            _logger.warning(
                "snapshot %s cannot be used: %s. Loading the newest intact snapshot instead: %s",
                *(found[0].name, refusal, snapshot.name),
            )
        return snapshot, state, meta
    assert refusal is not None
    raise refusal


def _load(snapshot: Path, rank: int, key: str, without: str) -> tuple[Any, dict[str, Any]]:
    meta, ranks = read_manifest(snapshot)
    if rank >= len(ranks):
        n_ranks = pluralize(len(ranks), "rank")
        raise SnapshotError(f"{snapshot} was written by {n_ranks}; it has no state of rank {rank}")
    return read_rank_state(snapshot, rank, ranks[rank], key, without), meta


def state_keys(path: Path) -> list[str]:
    """The keys of the state in a snapshot, or in the newest intact one of a run; none if there is no such."""
    with suppress(SnapshotError):
        found = _candidates(path)
        for snapshot in found:
            with suppress(SnapshotError, KeyError, TypeError, IndexError):
                entry: Any = read_manifest(snapshot)[1][0]
                return [*entry["tree"]["dict"]]
        if _candidates(path) != found:  # the run has replaced them meanwhile
            return state_keys(path)
    return []


def read_meta(path: Path) -> dict[str, Any]:
    """The meta of a snapshot directory, without reading its arrays. Raises SnapshotError."""
    return read_manifest(path)[0]


def resolve_snapshot(path: Path) -> Path:
    """The snapshot of a run directory, of its `snapshot` directory, or of a link in it; or `path` itself.

    Raises SnapshotError if there is none; the message lists what exists.
    """
    return _candidates(path)[0]


def _candidates(path: Path) -> list[Path]:
    """The named snapshot, or all snapshots of a run, newest first."""
    path = Path(path)
    if not path.exists():
        names = ", ".join(each.name for each in list_snapshots(path.parent)[-5:])
        raise SnapshotError(f"{path} does not exist" + f"; the same directory has {names}" * bool(names))
    check_inside(path / "snapshot")
    if path.name in ("last", "best") and path.is_symlink() and os.sep in os.readlink(path):
        raise SnapshotError(f"{path} links to {os.readlink(path)}, not to a snapshot in the same directory")
    named = path.resolve()
    if (path / MANIFEST).is_file() or named in list_snapshots(named.parent):
        return [named]
    directory = path / "snapshot" if (path / "snapshot").is_dir() else path
    found = [snapshot.resolve() for snapshot in reversed(list_snapshots(directory))]
    if found:
        return found
    if (path / "params.json").is_file():
        raise SnapshotError(f"{path} is a run without a snapshot: it ended before its first, or has snapshot_mode=none")
    inside = [*path.glob("run_*"), *path.glob("*/run_*")] if path.is_dir() else []  # of one experiment, or of a study
    runs = sorted(str(run.relative_to(path)) for run in inside if run.is_dir())
    hint = f"; it holds {', '.join(runs[:5])}: give one of them" if runs else "; give a run directory or a snapshot"
    raise SnapshotError(f"{path} is neither a run nor a snapshot{hint}")


def check_inside(directory: Path) -> None:
    """Raise SnapshotError for a file, or a link: a run could read or delete the snapshots of another one."""
    if directory.is_symlink():
        raise SnapshotError(f"{directory} is a link to {os.readlink(directory)}; move the directory here")
    if directory.exists() and not directory.is_dir():
        raise SnapshotError(f"{directory} is not a directory; remove it")


def params_of(snapshot: Path) -> Path:
    """The params.json of the run that a snapshot belongs to, at most three folders above it.

    Raises:
        ConfigError: there is none.
    """
    for folder in list(snapshot.resolve().parents)[:3]:
        if (folder / "params.json").is_file():
            return folder / "params.json"
    raise ConfigError(f"{snapshot} is not in a run directory: there is no params.json above it")


def set_link(link: Path, target: Path) -> None:
    """Atomically make the symlink `link` point to `target` in the same directory."""
    temporary = link.with_name(f".linking-{link.name}")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target.name)
    os.replace(temporary, link)
    sync(link.parent)


def mend_links(directory: Path) -> None:
    """Make `last` and `best` links again where a copy of the run followed them.

    A snapshot that is there alone gets its own name.
    """
    for link in (directory / "last", directory / "best"):
        if link.is_symlink() or not (link / MANIFEST).is_file():
            continue
        target, hidden = link_target(link) or link, link.with_name(f".removing-{link.name}")
        if target == link:
            target = unused_path(directory / f"step_{step_of(read_meta(link)):012d}", ".")
        link.rename(hidden if target.exists() else target)
        set_link(link, target)
        shutil.rmtree(hidden, ignore_errors=True)


def link_target(link: Path) -> Path | None:
    """The snapshot that `link` points to, or is a copy of, or is; None if there is none in the same directory."""
    found = list_snapshots(link.parent)
    if link.is_symlink():
        target = link.parent / os.readlink(link)
        return target if target in found else None
    if not (link / MANIFEST).is_file():
        return None
    own, manifests = (link / MANIFEST).read_bytes(), {each: each / MANIFEST for each in found}
    return next((each for each, file in manifests.items() if file.is_file() and file.read_bytes() == own), link)


def remove_snapshot(snapshot: Path) -> None:
    """Delete a snapshot. It is renamed first, so that a partly deleted one is never listed."""
    hidden = snapshot.with_name(f".removing-{snapshot.name}")
    snapshot.rename(hidden)
    shutil.rmtree(hidden)


def remove_leftovers(directory: Path) -> None:
    """Delete the temporary files of a writer that was killed. A run has one writer, so none is in use."""
    for entry in directory.glob(".*"):
        if not entry.name.startswith((".writing-", ".removing-", ".linking-")):
            continue
        if entry.is_symlink() or not entry.is_dir():
            entry.unlink()
        else:
            shutil.rmtree(entry)
