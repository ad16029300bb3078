"""Which snapshots a directory holds, by their names: step_<env_steps>, with .<n> behind where a step has several."""

import re
from pathlib import Path

from rlframe.core.files import SnapshotError

_STEP_NAME = re.compile(r"step_(\d{12,})(?:\.(\d+))?")


def list_snapshots(directory: Path) -> list[Path]:
    """The snapshots in a `snapshot` directory, oldest first. All are complete: nothing else is named so."""
    if not directory.is_dir():
        return []
    found = [
        (match, entry)
        for entry in directory.iterdir()
        if (match := _STEP_NAME.fullmatch(entry.name)) and entry.is_dir() and not entry.is_symlink()
    ]
    found.sort(key=lambda pair: (int(pair[0][1]), int(pair[0][2] or 0)))
    return [entry for _, entry in found]


def env_steps_of(snapshot: Path) -> int:
    """The env_steps in the name of a snapshot directory."""
    match = _STEP_NAME.fullmatch(snapshot.name)
    if match is None:
        raise SnapshotError(f"{snapshot} is not named step_<env_steps>")
    return int(match[1])


def free_name(directory: Path, env_steps: int) -> Path:
    """A name for a snapshot; a second one of a step stands beside the first until somebody removes that."""
    name, n = f"step_{env_steps:012d}", 0
    while (directory / name).exists():
        n += 1
        name = f"step_{env_steps:012d}.{n}"
    return directory / name
