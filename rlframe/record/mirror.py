"""Copies a run directory to a Remote in an order that leaves a run to resume there at every moment.

First the arrays of the newest snapshot, then the logs, which have its rows, then its manifest, with which it is
complete; then other snapshots. At last, snapshots that the run no longer has are removed there, manifest first.
"""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlframe.core.errors import RecordError
from rlframe.core.files import MAX_BYTES, is_regular_file, json_object, read_json
from rlframe.record.directory import LOCK_FILE, PARAMS, RESULT, attempts, token_of
from rlframe.record.rank_state import MANIFEST, env_steps_of
from rlframe.record.remote import Remote

SNAPSHOTS = "snapshot"
MAX_MANIFEST = 1 << 26
_STEP = re.compile(rf"{SNAPSHOTS}/(step_[\d.]+)/(.+)")
_DIGEST = re.compile(r"[0-9a-f]{64}")

Stamp = tuple[int, int, int]  # of a file: changes if it is written


class Mirror:
    """Of one run directory; used by one thread. After an exception, make a new one: it looks what has arrived."""

    def __init__(self, directory: Path, remote: Remote) -> None:
        """List what is there. May raise any exception of the file system."""
        self._directory, self._remote = directory, remote
        try:
            self._files = remote.files()
        except FileNotFoundError:
            self._files = {}
        self._sent: dict[str, Stamp] = {}  # the files that are equal there
        self._claimed = False

    def copy(self, snapshots: Sequence[Path]) -> None:
        """Copy what has changed.

        Args:
            snapshots: of the run, oldest first. Those but the newest may vanish meanwhile.
        Raises:
            RecordError: another run is there, or this one was continued elsewhere.
            FileNotFoundError: the newest snapshot was deleted. Also any exception of the file system.
        """
        self._check_owner()
        if not snapshots:
            self._send_logs()
            return
        *older, newest = snapshots
        self._send_arrays(newest)
        self._withdraw_later(newest)
        self._send_logs()
        self._send(_manifest_of(newest))
        for snapshot in reversed(older):
            self._send_if_there(snapshot)
        self._prune({snapshot.name for snapshot in snapshots})

    def _check_owner(self) -> None:
        """Raise RecordError if another run is there, or the same one was resumed elsewhere since.

        An earlier attempt of this run makes room: its logs are removed, and no snapshot of it is complete.
        """
        mine, data = read_json(self._directory / PARAMS), self._remote.read(PARAMS, MAX_BYTES)
        theirs = json_object(data)
        is_own = token_of(theirs) == token_of(mine)
        manifests = [file for file in self._files if file.endswith(f"/{MANIFEST}")]
        if not is_own and self._is_attempt(theirs):
            logs = [file for file in self._files if not file.startswith(f"{SNAPSHOTS}/")]
            for name in sorted([*manifests, *logs], key=lambda each: each == PARAMS):  # which says whose the rest is
                self._remote.remove(name)
                self._forget(name)
        elif data is not None and not is_own and (self._claimed or manifests or not theirs):
            raise RecordError("another run is there; give this one another sync= or log_dir=")
        before, since = theirs.get("resumed", []), mine.get("resumed", [])
        if is_own and before != since[: len(before)]:
            raise RecordError("the run there was resumed elsewhere since; only that process copies it now")
        self._claimed = True

    def _is_attempt(self, theirs: Mapping[str, Any]) -> bool:
        """Whether that is an attempt of this run which was moved aside, and was not resumed elsewhere since."""
        here = [each / PARAMS for each in attempts(self._directory) if (each / PARAMS).is_file()]
        return any(read_json(each) == theirs for each in here)

    def _has_arrays(self, snapshot: Path) -> bool:
        """Whether all files of a snapshot but the manifest are there, of which a manifest there has the hashes.

        The manifest of another one is removed: of the same step, made before a resume.
        """
        name = _manifest_of(snapshot)
        if name not in self._files or self._sent.get(name) == (stamp := _stamp(snapshot / MANIFEST)):
            return name in self._files
        mine, theirs = (snapshot / MANIFEST).read_bytes(), self._remote.read(name, MAX_MANIFEST)
        if mine == theirs:
            self._sent[name] = stamp
        if json_object(mine).get("ranks") == json_object(theirs).get("ranks"):
            return True
        self._remote.remove(name)
        del self._files[name]
        return False

    def _send_arrays(self, snapshot: Path) -> None:
        """Send all files of a snapshot but its manifest. Chunks that other snapshots have there are copied there."""
        if self._has_arrays(snapshot):
            return
        chunks = {_last(name): name for name in self._files if _DIGEST.fullmatch(_last(name))}
        own = (name for name in _names_below(self._directory, snapshot) if name != _manifest_of(snapshot))
        names = {name: (self._directory / name).lstat().st_size for name in own}
        missing = {name for name, size in names.items() if _last(name) not in chunks or self._files.get(name) != size}
        known = {name for name in missing if self._files.get(chunks.get(_last(name), "")) == names[name]}
        try:
            self._remote.copy([(chunks[_last(name)], name) for name in sorted(known)])
        except NotImplementedError:
            known = set()
        self._remote.put([(self._directory / name, name) for name in sorted(missing - known)])
        self._files |= names

    def _send(self, name: str) -> None:
        """Send a file, if it has changed."""
        stamp = _stamp(self._directory / name)
        if self._sent.get(name) != stamp:
            self._remote.replace(self._directory / name, name)
            self._files[name], self._sent[name] = stamp[1], stamp

    def _send_if_there(self, snapshot: Path) -> None:
        """Send an older snapshot, unless it is deleted meanwhile."""
        try:
            self._send_arrays(snapshot)
            self._send(_manifest_of(snapshot))
        except FileNotFoundError:
            if snapshot.exists():
                raise

    def _withdraw_later(self, newest: Path) -> None:
        """Make snapshots incomplete that are later than the newest: the run was resumed from before them.

        Its logs, which follow, lack their rows.
        """
        for name in [name for name in self._files if name.endswith(f"/{MANIFEST}")]:
            step = _STEP.fullmatch(name)
            if step and env_steps_of(Path(step[1])) > env_steps_of(newest):
                self._remote.remove(name)
                del self._files[name]

    def _send_logs(self) -> None:
        for name in sorted(_log_files(self._directory), key=lambda name: name != PARAMS):
            try:
                self._send(name)
            except FileNotFoundError:
                if (self._directory / name).exists():
                    raise

    def _prune(self, kept: set[str]) -> None:
        """Remove snapshots that the run does not have, and the result of a run that has been resumed."""
        found = {step[1] for name in self._files if (step := _STEP.fullmatch(name))}
        for snapshot in sorted(found - kept):
            folder = f"{SNAPSHOTS}/{snapshot}"
            self._remote.remove(f"{folder}/{MANIFEST}")
            self._remote.remove_folder(folder)
            self._forget(f"{folder}/")
        if RESULT in self._files and not (self._directory / RESULT).exists():
            self._remote.remove(RESULT)
            self._forget(RESULT)

    def _forget(self, prefix: str) -> None:
        self._files = {name: size for name, size in self._files.items() if not name.startswith(prefix)}
        self._sent = {name: stamp for name, stamp in self._sent.items() if not name.startswith(prefix)}


def is_complete(files: Mapping[str, int], name: str) -> bool:
    """Whether a file of a remote run is of no snapshot, or of one whose manifest is there."""
    step = _STEP.fullmatch(name)
    return not name.startswith(f"{SNAPSHOTS}/") or bool(step and f"{SNAPSHOTS}/{step[1]}/{MANIFEST}" in files)


def _stamp(path: Path) -> Stamp:
    status = path.lstat()
    return status.st_mtime_ns, status.st_size, status.st_ino


def _manifest_of(snapshot: Path) -> str:
    return f"{SNAPSHOTS}/{snapshot.name}/{MANIFEST}"


def _last(name: str) -> str:
    return name.rpartition("/")[2]


def _log_files(directory: Path) -> Iterator[str]:
    """Regular files of a run but its snapshots, lock and hidden ones."""
    for entry in sorted(directory.iterdir()):
        if entry.name not in (SNAPSHOTS, LOCK_FILE) and not entry.name.startswith("."):
            yield from _names_below(directory, entry)


def _names_below(run: Path, entry: Path) -> Iterator[str]:
    """Names of the regular files in `entry`, a file or folder of the run; links are not followed."""
    if entry.is_symlink() or not entry.is_dir():
        if is_regular_file(entry):
            yield str(entry.relative_to(run))
        return
    for folder, _, files in os.walk(entry):
        for file in files:
            path = Path(folder) / file
            if not file.startswith(".") and not path.is_symlink() and path.is_file():
                yield str(path.relative_to(run))
