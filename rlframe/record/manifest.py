"""The manifest of a snapshot: what it tells, written and read; and what older formats meant."""

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rlframe import __version__
from rlframe.core.errors import ConfigError
from rlframe.core.files import SnapshotError, read_plain, write_file
from rlframe.record.parts import MANIFEST, Facts, Part, file_of

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
