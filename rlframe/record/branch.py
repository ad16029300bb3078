"""A run that takes over the state and the settings of another one, and goes on from there with some of them changed.

Both runs are at rest. What was done is in the list `changes` of the run's params.json, so that it can be repeated after
a kill at any moment.
"""

import os
import shutil
from collections.abc import Mapping
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from rlframe.core.errors import SnapshotError
from rlframe.core.files import disk_error, read_json, replace_json, sync
from rlframe.record.directory import PARAMS, DirectoryLock
from rlframe.record.rank_state import env_steps_of, list_snapshots
from rlframe.record.snapshot import check_inside, link_target, read_meta, remove_leftovers, remove_snapshot, set_link

_CHANGES = "changes"
_OF_PLACE = ("log_dir", "run_ID", "name")  # settings that a run keeps


def branch(run: Path, donor: Path, settings: Mapping[str, Any], note: Mapping[str, Any]) -> None:
    """Give a run the newest snapshot of another, and that one's settings with these changed. Its logs stay.

    `note`, with the env_steps, is added to `changes_of` it when all is done; after a kill on the way, do it again.

    Raises:
        ConfigError: a process has the run's directory.    SnapshotError: the donor has no intact snapshot.
        RecordError: a disk error.
    """
    run.mkdir(parents=True, exist_ok=True)
    with closing(DirectoryLock(run, "a run", "log_dir")):
        snapshot = copy_newest_snapshot(donor, run)
        theirs, own = read_json(donor / PARAMS), read_json(run / PARAMS) if (run / PARAMS).is_file() else {}
        kept = {key: value for key, value in own.get("config", {}).items() if key in _OF_PLACE}
        params = {**theirs, **own, "config": {**theirs["config"], **kept}, "seed": theirs.get("seed")}
        params["chosen"] = theirs.get("chosen", {})
        params[_CHANGES] = [*own.get(_CHANGES, []), {"env_steps": env_steps_of(snapshot), **note}]  # of this run
        _write(run, params, settings)


def change_settings(run: Path, settings: Mapping[str, Any]) -> None:
    """Change settings of a run that have no part in its state."""
    with closing(DirectoryLock(run, "a run", "log_dir")):
        _write(run, read_json(run / PARAMS), settings)


def _write(run: Path, params: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    changed = {**params, "config": {**params["config"], **settings}}
    replace_json(run / PARAMS, changed)


def changes_of(run: Path) -> list[dict[str, Any]]:
    """The notes of `branch`, oldest first: each has `env_steps`, and the keys `changed` since the snapshot there."""
    found = read_json(run / PARAMS).get(_CHANGES, []) if (run / PARAMS).is_file() else []
    return [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []


def copy_newest_snapshot(donor: Path, run: Path) -> Path:
    """Make the newest intact snapshot of a run that of another one, whose own from there on are deleted.

    Files are linked, since they never change once they are written, or copied where a file system has no links.

    Raises:
        SnapshotError: there is none, or `run` has a link in its place.    RecordError: a disk error.
    """
    source, directory = _newest_intact(donor), run / "snapshot"
    check_inside(directory)
    temporary = directory / f".writing-{os.getpid()}"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        remove_leftovers(directory)
        shutil.copytree(source, temporary, copy_function=_link)
        for folder in (*filter(Path.is_dir, temporary.iterdir()), temporary):
            sync(folder)
        for snapshot in list_snapshots(directory):
            if env_steps_of(snapshot) >= env_steps_of(source):
                remove_snapshot(snapshot)
        target = directory / f"step_{env_steps_of(source):012d}"
        temporary.rename(target)
        sync(directory)
        set_link(directory / "last", target)
        if link_target(directory / "best") is None:
            (directory / "best").unlink(missing_ok=True)
    except OSError as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise disk_error(f"a copy of {source}", directory, error) from error
    return target


def _newest_intact(run: Path) -> Path:
    check_inside(run / "snapshot")
    for snapshot in reversed(list_snapshots(run / "snapshot")):
        with suppress(SnapshotError):
            read_meta(snapshot)
            return snapshot
    raise SnapshotError(f"{run} has no snapshot that can be copied")


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:  # a file system without links
        shutil.copyfile(source, target)
        sync(Path(target))
