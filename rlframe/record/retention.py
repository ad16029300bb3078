"""Which snapshots a run writes and keeps: the modes none, last, all, gap and best. Used by `record.run`."""

import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rlframe.core.config import check_one_of, nearest
from rlframe.core.errors import ConfigError, SnapshotError, StateLost, warn_once
from rlframe.core.files import disk_error
from rlframe.record.metrics import METRICS, signed, step_of, without_learner
from rlframe.record.rank_state import env_steps_of, list_snapshots, unused_path
from rlframe.record.snapshot import (
    OtherRanks,
    check_inside,
    link_target,
    mend_links,
    no_other_ranks,
    read_meta,
    remove_leftovers,
    remove_snapshot,
    save_snapshot,
    set_link,
    write_score,
)

# Groups of metrics that may be absent from the first rows.
_LATE = ("episode/", "eval/", "algo/", "env/", "replay/", "async/")

InUse = Callable[[], Path | None]  # a snapshot that is read by something else, and not deleted now

_logger = logging.getLogger("rlframe")


@dataclass(frozen=True)
class SnapshotPolicy:
    """When snapshots are written, which are kept, and the reaction to disk errors. Invalid fields raise ConfigError."""

    mode: str = "last"  # none | last | all | gap | best
    gap: int = 0  # env_steps between snapshots, in mode gap
    keep: int = 2  # newest snapshots to keep, in modes last and best
    best: str = ""  # metric of `best`, `-metric` if lower is better; empty: the runner's score
    errors: str = "stop"  # stop | continue, on a disk error

    def __post_init__(self) -> None:
        check_one_of("snapshot_mode", self.mode, ("none", "last", "all", "gap", "best"))
        check_one_of("snapshot_errors", self.errors, ("stop", "continue"))
        if self.gap < 0:
            raise ConfigError(f"snapshot_gap={self.gap} must be >= 0 env_steps")
        if self.keep < 1:
            raise ConfigError(f"snapshot_keep={self.keep} must be at least 1: the newest is always kept")

    def settings(self) -> dict[str, Any]:
        """The keys of a config."""
        return {f"snapshot_{name}": value for name, value in asdict(self).items()}

    def score(self, row: Mapping[str, float], default: float) -> float:
        name, sign = signed(self.best)
        return sign * row.get(name, math.nan) if self.best else default

    def check(self, row: Mapping[str, float]) -> None:
        """Raise ConfigError unless the metric `best` is in the row or may appear in a later one (see `_LATE`)."""
        name, _ = signed(self.best)
        of_infos = {"env/": "episode/return_mean", "eval/env/": "eval/return_mean"}  # beside which rows have them
        beside = next((metric for group, metric in of_infos.items() if name.startswith(group)), "")
        may_come = bool(beside) or (without_learner(name) in METRICS and name.startswith(_LATE))
        may_come |= name.startswith("eval/") and not any(each.startswith("eval/") for each in row)  # none was due yet
        may_come |= name.startswith("algo/") and not row.get("updates")  # of the user's own algorithm
        if name and name not in row and not may_come:
            known = sorted({*row, *METRICS})
            raise ConfigError(
                f"snapshot_best={self.best!r}: this run has no metric {name!r}{nearest(name, known)}; it has "
                f"{', '.join(row)}, and later metrics of {', '.join(_LATE)}"
            )
        if beside in row and name not in row:
            warn_once(f"snapshot_best={self.best!r}: this run has no metric {name!r} so far{nearest(name, row)}")


def is_of(row: Mapping[str, float], env_steps: int, updates: int) -> bool:
    """Whether a row of the log is of these env_steps and, where they are counted, updates, as far as it says."""
    return row.get("env_steps", env_steps) == env_steps and updates in (0, row.get("updates", updates))


class Retention:
    """Owns a run's `snapshot` directory and its links: `last` is the newest, `best` the one with the highest score."""

    def __init__(self, directory: Path, policy: SnapshotPolicy, in_use: InUse = lambda: None) -> None:
        check_inside(directory)
        mend_links(directory)
        self._directory, self._policy, self._in_use = directory, policy, in_use
        self.awaited: Collection[int] = ()  # env_steps of snapshots that are kept, as their scores come later
        self._find_state()
        self._waits_for_resume = self._newest is not None

    def _find_state(self) -> None:
        found = list_snapshots(self._directory)
        self._newest = found[-1] if found else None
        self._updates = _meta(self._newest).get("updates", -1) if self._newest is not None else -1
        best = link_target(self._directory / "best")
        scores = _scores([best], self._policy.best) if best is not None else {}
        self._best_score = max(scores.values(), default=-math.inf)

    def check_resumed(self) -> None:
        """Raise ConfigError if training begins although nobody has loaded a snapshot that was there."""
        if self._waits_for_resume:
            raise ConfigError(
                f"training would begin anew in a run that has {self._newest}; call "
                f"runner.resume(load_snapshot(run.directory)[0]) (rlframe.record.snapshot) before, or open another run"
            )

    def due(self, step: int, updates: int, final: bool) -> bool:
        """Whether `save_if_due` would write a snapshot now. A final one is skipped if the newest is of now."""
        newest = env_steps_of(self._newest) if self._newest is not None else 0
        if final and (newest, self._updates) == (step, updates):
            return False
        if self._policy.mode == "gap" and not final:
            gap = max(self._policy.gap, 1)
            return step // gap > newest // gap
        return self._policy.mode != "none"

    def save_if_due(
        self,
        state_fn: Callable[[], Any],
        env_steps: int,
        score: float,
        updates: int,
        final: bool,
        other_ranks: OtherRanks = no_other_ranks,
    ) -> Path | None:
        """Write a snapshot if one is due, then delete those that the mode does not keep; returns its path, else None.

        `state_fn` and `other_ranks` (see `save_snapshot`) are called only then. Raises RecordError on a disk error.
        """
        step = step_of({"env_steps": env_steps, "updates": updates})
        if not self.due(step, updates, final):
            return self._newest if final and self._policy.mode != "none" else None
        meta = {"env_steps": env_steps, "updates": updates, "score": score if math.isfinite(score) else None}
        of = {"score_of": self._policy.best} if self._policy.best else {}
        self._newest, self._updates = self._save(state_fn, {**meta, **of}, other_ranks), updates
        try:
            self._update_kept(self._newest, score)
        except OSError as error:
            raise disk_error(f"the links to {self._newest}", self._directory, error) from error
        return self._newest

    def _save(self, state_fn: Callable[[], Any], meta: Mapping[str, Any], other_ranks: OtherRanks) -> Path:
        try:
            return save_snapshot(self._directory, state_fn(), meta, other_ranks)
        except StateLost as error:
            _logger.warning(f"{error}; the snapshot is written again")
            return self._save(state_fn, meta, other_ranks)

    def score(self, env_steps: int, score: float) -> None:
        """Give the snapshot of `env_steps`, if it is still there, the score that was not known when it was written."""
        found = [snapshot for snapshot in list_snapshots(self._directory) if env_steps_of(snapshot) == env_steps]
        if not found or not math.isfinite(score):
            return
        write_score(found[-1], score)
        self.awaited = [each for each in self.awaited if each != env_steps]
        self._update_kept(found[-1], score)

    def _update_kept(self, snapshot: Path, score: float) -> None:
        """Let `best` point to a snapshot of the highest score so far, then delete those that the mode does not keep."""
        if self._policy.mode not in ("none", "last") and score > self._best_score:
            set_link(self._directory / "best", snapshot)
            self._best_score = score
        if self._policy.mode in ("last", "best"):
            self._drop_others()

    def _drop_others(self) -> None:
        best = link_target(self._directory / "best") if self._policy.mode == "best" else None
        if best is None:
            (self._directory / "best").unlink(missing_ok=True)
        kept = (self._newest, best, self._in_use())
        for snapshot in list_snapshots(self._directory)[: -self._policy.keep]:
            if snapshot not in kept and env_steps_of(snapshot) not in self.awaited:
                remove_snapshot(snapshot)

    def truncate_after(self, env_steps: int) -> None:
        """Resume from `env_steps`: later snapshots are renamed to `abandoned_step_*`, never deleted."""
        self._waits_for_resume = False
        if not self._directory.is_dir():
            return
        remove_leftovers(self._directory)
        found = list_snapshots(self._directory)
        kept = [snapshot for snapshot in found if env_steps_of(snapshot) <= env_steps]
        later = [snapshot for snapshot in found if env_steps_of(snapshot) > env_steps]
        if link_target(self._directory / "best") in later:
            scores = _scores(kept, self._policy.best)
            self._repoint("best", max(scores, key=scores.__getitem__, default=None))
        if later:
            self._repoint("last", kept[-1] if kept else None)
        for snapshot in later:
            aside = snapshot.rename(unused_path(snapshot.with_name(f"abandoned_{snapshot.name}"), "~"))
            _logger.warning("resuming from env_steps %s: %s renamed to %s", env_steps, snapshot.name, aside.name)
        self._find_state()

    def _repoint(self, link: str, target: Path | None) -> None:
        if target is not None:
            set_link(self._directory / link, target)
        else:
            (self._directory / link).unlink(missing_ok=True)


def _meta(snapshot: Path) -> dict[str, Any]:
    """What a snapshot says of itself; empty if that is unreadable."""
    try:
        return read_meta(snapshot)
    except SnapshotError:
        return {}


def _scores(snapshots: Sequence[Path], metric: str) -> dict[Path, float]:
    """The scores of those that have one of this metric (empty: the runner's own)."""
    metas = {snapshot: _meta(snapshot) for snapshot in snapshots}
    scores = {snapshot: meta.get("score") for snapshot, meta in metas.items() if meta.get("score_of", "") == metric}
    return {snapshot: float(score) for snapshot, score in scores.items() if isinstance(score, int | float)}


def restore_links(directory: Path) -> None:
    """Make the links `last` and `best` of snapshots that were copied without them; best by the newest one's metric."""
    found = list_snapshots(directory)
    if not found:
        return
    set_link(directory / "last", found[-1])
    if scores := _scores(found, _meta(found[-1]).get("score_of", "")):
        set_link(directory / "best", max(scores, key=scores.__getitem__))
