"""Free memory, as this process may use it."""

from pathlib import Path

import psutil

_UNLIMITED = 1 << 60  # bytes: version 1 writes the largest number of pages for no limit


def available_memory() -> int:
    """Bytes of RAM this process can still allocate, within the limits of its Linux control groups."""
    available = int(psutil.virtual_memory().available)
    return max(0, min([available, *(_remaining(group, available) for group in control_groups("memory"))]))


def control_groups(controller: str, root: Path = Path("/")) -> list[Path]:
    """The folders of a controller's groups down to the process's own, in versions 1 and 2 of Linux's control groups."""
    own, top = root / "proc/self/cgroup", root / "sys/fs/cgroup"
    groups = [top, top / controller]
    for line in own.read_text(encoding="utf-8").splitlines() if own.is_file() else ():
        _, controllers, path = line.split(":", 2)
        if not controllers or controller in controllers.split(","):
            steps = [step for step in path.split("/") if step not in ("", "..")]
            mounts = (controller, controllers) if controllers else ("", "unified")
            groups += [(top / mount).joinpath(*steps[:n]) for mount in mounts for n in range(len(steps) + 1)]
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
