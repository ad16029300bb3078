"""The summary of a study: one row per setting, with the mean return over its seeds; printed, and in summary.csv."""

import csv
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rlframe.analysis.curves import RunData, read_run
from rlframe.analysis.intervals import bootstrap
from rlframe.record.console import format_number
from rlframe.study.plan import PlannedRun, varied
from rlframe.study.record import DONE, FAILED, RETURNS, Status

SUMMARY_FILE = "summary.csv"
_COLUMNS = ("metric", "n_seeds", "mean", "low", "high", "best", "env_steps", "n_failed")


@dataclass(frozen=True)
class SettingResult:
    """The last returns of a setting's finished runs."""

    setting: str  # directory in the study; empty if there is only one
    values: Mapping[str, str]  # of the keys that the study varies, without the seed
    metric: str  # eval/return_mean, or episode/return_mean without evaluation
    scores: tuple[float, ...]
    env_steps: float  # mean; nan if no run is finished
    n_failed: int

    def mean(self) -> float:
        return float(np.mean(self.scores)) if self.scores else math.nan

    def best(self) -> float:
        return max(self.scores, default=math.nan)

    def interval(self) -> tuple[float, float]:
        """95 % bootstrap interval of the mean over seeds; nan with fewer than two."""
        if len(self.scores) < 2:
            return math.nan, math.nan
        low, high = bootstrap(np.array(self.scores)[:, None])
        return float(low[0]), float(high[0])


def summarize(runs: Sequence[PlannedRun], statuses: Mapping[str, Status]) -> list[SettingResult]:
    """The result of every setting, in the order of the runs. Raises ConfigError if a log is not a regular file."""
    keys = [key for key in varied(runs) if key != "seed"]
    results = []
    for setting in dict.fromkeys(run.setting for run in runs):
        members = [run for run in runs if run.setting == setting]
        logs = [read_run(run.directory) for run in members if statuses[run.name].state == DONE]
        in_all = (name for name in RETURNS if all(math.isfinite(_last(log, name)) for log in logs))
        metric = next(in_all, RETURNS[-1])
        scored = [log for log in logs if math.isfinite(_last(log, metric))]
        steps = [_last(log, "env_steps") for log in scored]
        results.append(
            SettingResult(
                setting=setting,
                values={key: members[0].arguments.get(key, "") for key in keys},
                metric=metric if scored else "",
                scores=tuple(_last(log, metric) for log in scored),
                env_steps=float(np.mean(steps)) if steps else math.nan,
                n_failed=sum(statuses[run.name].state == FAILED for run in members),
            )
        )
    return results


def _last(log: RunData, column: str) -> float:
    """The last finite number of a column; nan if there is none."""
    values = log.columns.get(column, np.empty(0))
    finite = values[np.isfinite(values)]
    return float(finite[-1]) if finite.size else math.nan


def format_summary(results: Sequence[SettingResult]) -> str:
    """The table for people: setting, seeds, return, interval, best, env_steps and failed runs."""
    lines: list[tuple[str, ...]] = [("setting", "seeds", "return", "95 % interval", "best", "env_steps", "failed")]
    for result in results:
        low, high = result.interval()
        interval = "" if math.isnan(low) else f"[{format_number(low)}, {format_number(high)}]"
        numbers = ["" if math.isnan(x) else format_number(x) for x in (result.mean(), result.best(), result.env_steps)]
        failed = str(result.n_failed or "")
        name = result.setting or "all runs"
        lines.append((name, str(len(result.scores)), numbers[0], interval, *numbers[1:], failed))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    sides = ("<", *">>>>>>")
    return "\n".join("  ".join(map(format, line, map("{}{}".format, sides, widths))).rstrip() for line in lines)


def summary_csv(results: Sequence[SettingResult]) -> str:
    """The table for programs: setting, every key that the study varies, then the numbers; empty where there is none."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["setting", *results[0].values, *_COLUMNS])
    for result in results:
        numbers = [result.mean(), *result.interval(), result.best(), result.env_steps]
        cells = ["" if math.isnan(number) else repr(number) for number in numbers]
        counted = [result.metric, len(result.scores), *cells, result.n_failed]
        writer.writerow([result.setting, *result.values.values(), *counted])
    return text.getvalue()
