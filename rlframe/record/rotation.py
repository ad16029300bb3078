"""Which snapshots a run writes and which it keeps: the modes none, last, all, gap and best."""

import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlframe.core.config import nearest
from rlframe.core.errors import ConfigError
from rlframe.record.snapshot import (
    Others,
    SnapshotError,
    env_steps_of,
    list_snapshots,
    no_others,
    point,
    pointed,
    read_meta,
    remove_leftovers,
    remove_snapshot,
    save_snapshot,
)

MODES = ("none", "last", "all", "gap", "best")

_logger = logging.getLogger("rlframe")


class Rotation:
    """Owns a run's `snapshot` directory. `last` is the newest; `best`, where several are kept, the highest score."""

    def __init__(self, directory: Path, mode: str, gap: int) -> None:
        """`gap`: env_steps between snapshots in mode gap.

        Raises:
            ConfigError: an unknown mode, or a negative gap.
        """
        if mode not in MODES:
            raise ConfigError(f"snapshot_mode={mode!r} is not one of {', '.join(MODES)}{nearest(mode, MODES)}")
        if gap < 0:
            raise ConfigError(f"snapshot_gap={gap} must be >= 0 env_steps")
        self._directory, self._mode, self._gap = directory, mode, gap
        self._find_state()

    def _find_state(self) -> None:
        found = list_snapshots(self._directory)
        self._newest = found[-1] if found else None
        best = pointed(self._directory / "best")
        self._best_score = _score(best) if best is not None else -math.inf

    def wants(self, env_steps: int, final: bool) -> bool:
        """Whether `offer` would write a snapshot now. A final one where the newest stands is that one."""
        if final and self._newest is not None and env_steps_of(self._newest) == env_steps:
            return False
        return self._due(env_steps, final)

    def offer(
        self,
        state_fn: Callable[[], Any],
        env_steps: int,
        score: float,
        updates: int,
        final: bool,
        others: Others = no_others,
    ) -> Path | None:
        """Write a snapshot if the mode wants one now, and drop those it does not keep; the path if one is there.

        `state_fn` is called only if its answer is written, and so is `others` (see `save_snapshot`).
        """
        if not self.wants(env_steps, final):
            return self._newest if self._due(env_steps, final) else None
        meta = {"env_steps": env_steps, "updates": updates, "score": score if math.isfinite(score) else None}
        self._newest = save_snapshot(self._directory, state_fn(), meta, others)
        if self._mode != "last" and score > self._best_score:
            point(self._directory / "best", self._newest)
            self._best_score = score
        if self._mode in ("last", "best"):
            self._drop_others()
        return self._newest

    def _due(self, env_steps: int, final: bool) -> bool:
        if self._mode == "gap" and not final:
            since = env_steps_of(self._newest) if self._newest is not None else 0
            return env_steps - since >= self._gap
        return self._mode != "none"

    def _drop_others(self) -> None:
        best = pointed(self._directory / "best") if self._mode == "best" else None
        if best is None:
            (self._directory / "best").unlink(missing_ok=True)
        for snapshot in list_snapshots(self._directory):
            if snapshot not in (self._newest, best):
                remove_snapshot(snapshot)

    def trim(self, env_steps: int) -> None:
        """The run goes on from `env_steps`: later snapshots are set aside as `abandoned_step_*`, never deleted."""
        if not self._directory.is_dir():
            return
        remove_leftovers(self._directory)
        found = list_snapshots(self._directory)
        kept = [snapshot for snapshot in found if env_steps_of(snapshot) <= env_steps]
        later = [snapshot for snapshot in found if env_steps_of(snapshot) > env_steps]
        if pointed(self._directory / "best") in later:
            self._repoint("best", max(kept, key=_score, default=None))
        if later:
            self._repoint("last", kept[-1] if kept else None)
        for snapshot in later:
            aside = _set_aside(snapshot)
            _logger.warning("going on from env_steps %s: %s is later and now %s", env_steps, snapshot.name, aside.name)
        self._find_state()

    def _repoint(self, link: str, target: Path | None) -> None:
        if target is not None:
            point(self._directory / link, target)
        else:
            (self._directory / link).unlink(missing_ok=True)


def _score(snapshot: Path) -> float:
    try:
        score = read_meta(snapshot).get("score")
    except SnapshotError:
        return -math.inf
    return float(score) if isinstance(score, (int, float)) else -math.inf


def _set_aside(snapshot: Path) -> Path:
    target, n = snapshot.with_name(f"abandoned_{snapshot.name}"), 0
    while target.exists():
        n += 1
        target = snapshot.with_name(f"abandoned_{snapshot.name}~{n}")
    return snapshot.rename(target)
