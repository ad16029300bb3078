"""Which snapshots a run writes and keeps: the modes none, last, all, gap and best."""

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlframe.core.config import nearest
from rlframe.core.errors import ConfigError
from rlframe.core.files import SnapshotError, refused
from rlframe.record.metrics import METRICS
from rlframe.record.rank_state import env_steps_of, list_snapshots
from rlframe.record.snapshot import (
    Others,
    check_inside,
    no_others,
    point,
    pointed,
    read_meta,
    remove_leftovers,
    remove_snapshot,
    save_snapshot,
)

MODES = ("none", "last", "all", "gap", "best")
ON_ERRORS = ("stop", "continue")
_LATE = ("episode/", "algo/", "env/", "replay/", "async/")  # metrics that a run may have later than its first row

_logger = logging.getLogger("rlframe")


@dataclass(frozen=True)
class Policy:
    """When snapshots are written, which are kept, and what a refusing disk means.

    Raises:
        ConfigError: an unknown mode or word, or a number that cannot be.
    """

    mode: str = "last"  # none | last | all | gap | best
    gap: int = 0  # env_steps between snapshots, in mode gap
    keep: int = 2  # newest ones, in modes last and best
    best: str = ""  # the metric that `best` goes by, with a minus where lower is better; empty: the runner's score
    errors: str = "stop"  # stop | continue: what the run does where a snapshot or a row of the log cannot be written

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ConfigError(
                f"snapshot_mode={self.mode!r} is not one of {', '.join(MODES)}{nearest(self.mode, MODES)}"
            )
        if self.gap < 0:
            raise ConfigError(f"snapshot_gap={self.gap} must be >= 0 env_steps")
        if self.keep < 1:
            raise ConfigError(f"snapshot_keep={self.keep} must be at least 1: the newest is always kept")
        if self.errors not in ON_ERRORS:
            raise ConfigError(f"snapshot_errors={self.errors!r} is not one of {', '.join(ON_ERRORS)}")

    def score(self, row: Mapping[str, float], otherwise: float) -> float:
        """What a snapshot of the moment that `row` tells of is worth."""
        if not self.best:
            return otherwise
        sign = -1.0 if self.best.startswith("-") else 1.0
        return sign * row.get(self.best.removeprefix("-"), math.nan)

    def check(self, row: Mapping[str, float]) -> None:
        """Look at a row of a run. Metrics of episodes, of learning and of replay may come later than its first.

        Raises:
            ConfigError: it shows that the metric will not come.
        """
        name = self.best.removeprefix("-")
        may_come = name.startswith("env/") or (name in METRICS and name.startswith(_LATE))
        may_come |= name.startswith("algo/") and not row.get("updates")  # an algorithm of the user's own
        if name and name not in row and not may_come:
            known = sorted({*row, *METRICS})
            raise ConfigError(
                f"snapshot_best={self.best!r}: this run has no metric {name!r}{nearest(name, known)}; it has "
                f"{', '.join(row)}, and later those of {', '.join(_LATE)}"
            )


class Rotation:
    """Owns a run's `snapshot` directory. `last` is the newest; `best`, where several are kept, the highest score."""

    def __init__(self, directory: Path, policy: Policy) -> None:
        check_inside(directory)
        self._directory, self._policy = directory, policy
        self._find_state()

    def _find_state(self) -> None:
        found = list_snapshots(self._directory)
        self._newest = found[-1] if found else None
        best = pointed(self._directory / "best")
        self._best_score = self._score(best) if best is not None else -math.inf

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

        Raises:
            NotRecorded: the disk refuses; those that were there stand.
        """
        if not self.wants(env_steps, final):
            return self._newest if self._due(env_steps, final) else None
        meta = {"env_steps": env_steps, "updates": updates, "score": score if math.isfinite(score) else None}
        of = {"score_of": self._policy.best} if self._policy.best else {}
        self._newest = save_snapshot(self._directory, state_fn(), {**meta, **of}, others)
        try:
            self._rotate(self._newest, score)
        except OSError as error:
            raise refused(f"the place of {self._newest}", self._directory, error) from error
        return self._newest

    def _rotate(self, newest: Path, score: float) -> None:
        if self._policy.mode != "last" and score > self._best_score:
            point(self._directory / "best", newest)
            self._best_score = score
        if self._policy.mode in ("last", "best"):
            self._drop_others()

    def _due(self, env_steps: int, final: bool) -> bool:
        if self._policy.mode == "gap" and not final:
            since = env_steps_of(self._newest) if self._newest is not None else 0
            return env_steps - since >= self._policy.gap
        return self._policy.mode != "none"

    def _drop_others(self) -> None:
        best = pointed(self._directory / "best") if self._policy.mode == "best" else None
        if best is None:
            (self._directory / "best").unlink(missing_ok=True)
        for snapshot in list_snapshots(self._directory)[: -self._policy.keep]:
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
            self._repoint("best", max(kept, key=self._score, default=None))
        if later:
            self._repoint("last", kept[-1] if kept else None)
        for snapshot in later:
            aside = _set_aside(snapshot)
            _logger.warning("going on from env_steps %s: %s is later and now %s", env_steps, snapshot.name, aside.name)
        self._find_state()

    def _score(self, snapshot: Path) -> float:
        """By the metric that counts now; a snapshot scored by another is no rival."""
        try:
            meta = read_meta(snapshot)
        except SnapshotError:
            return -math.inf
        score = meta.get("score") if meta.get("score_of", "") == self._policy.best else None
        return float(score) if isinstance(score, (int, float)) else -math.inf

    def _repoint(self, link: str, target: Path | None) -> None:
        if target is not None:
            point(self._directory / link, target)
        else:
            (self._directory / link).unlink(missing_ok=True)


def _set_aside(snapshot: Path) -> Path:
    target, n = snapshot.with_name(f"abandoned_{snapshot.name}"), 0
    while target.exists():
        n += 1
        target = snapshot.with_name(f"abandoned_{snapshot.name}~{n}")
    return snapshot.rename(target)
