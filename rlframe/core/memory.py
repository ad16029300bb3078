"""Free memory, as this process may use it."""

from itertools import accumulate
from pathlib import Path

import psutil

_UNLIMITED = 1 << 60  # bytes: version 1 writes the largest number of pages for no limit


def available_memory() -> int:
    """Bytes of RAM this process can still allocate, within the limits of its Linux control groups."""
    available = int(psutil.virtual_memory().available)
    return max(0, min([available, *(_remaining(group, available) for group in _control_groups())]))


def _control_groups() -> list[Path]:
    """The folders from the root down to the process's own group, for versions 1 and 2 of Linux's control groups."""
    root, own = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
    groups = [root, root / "memory"]
    for line in own.read_text(encoding="utf-8").splitlines() if own.is_file() else ():
        number, controllers, path = line.split(":", 2)
        if number == "0" or "memory" in controllers.split(","):
            top = root if number == "0" else root / "memory"
            groups += accumulate(Path(path).parts[1:], Path.joinpath, initial=top)
    return list(dict.fromkeys(groups))


def _remaining(group: Path, default: int) -> int:
    """Bytes left in a control group, of version 2 or 1; `default` if it has no limit."""
    for limit, usage, cache in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        try:
            bound = (group / limit).read_text(encoding="utf-8").strip()
            if bound == "max" or int(bound) > _UNLIMITED:
                return default
            used = int((group / usage).read_text(encoding="utf-8"))
            counts = dict(line.split() for line in (group / "memory.stat").read_text(encoding="utf-8").splitlines())
        except (OSError, ValueError):
            continue
        return int(bound) - used + int(counts.get(cache, 0))  # the kernel frees cached files when needed
    return default
