"""Learning curves for `rlframe.plot`: group run directories into experiments; mean and confidence band over seeds."""

import json
import os
import re
import sys
from array import array
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from rlframe.analysis.aggregates import CENTERS, interval
from rlframe.core.config import nearest
from rlframe.core.errors import ConfigError, pluralize, printable
from rlframe.core.files import iter_csv, number_in, read_json, starts_in
from rlframe.core.schedule import Schedule

CLOCKS = ("env_steps", "updates", "time/elapsed_s")
N_STEPS = "runner.n_steps"  # which may become larger when a run or a study is continued
ALIKE = ("threads", "compile", "stop", "runner.max_time_s")  # how numbers are rounded, and when a run stops early
FALLBACK = {"eval/return_mean": "episode/return_mean"}
N_GRID = 200
_NUMBER = re.compile(r"(\d+(?:\.\d+)?(?:e[+-]?\d+)?)")
# Keys that may differ between the seeds of one experiment: every sampler returns the same samples.
_SAME_RESULT = re.compile(
    r"seed|run_ID|name|log_dir|resume|affinity|device|threads|snapshot_.*|dry_run|sync|eval\.n_workers|log_level|loggers"
    r"|record.*|sampler(\.(?!batch_|decorrelation_).*)?"
)


@dataclass(frozen=True)
class RunData:
    """One run: the columns of its progress.csv (nan where a cell is empty) and its config."""

    directory: Path
    columns: dict[str, np.ndarray]
    config: dict[str, Any]


@dataclass(frozen=True)
class SeedGroup:
    """Runs that differ only in their seeds."""

    label: str
    runs: tuple[RunData, ...]


@dataclass(frozen=True)
class LearningCurve:
    """The curve of one experiment; with one seed, the band equals the center."""

    label: str
    n_seeds: int
    x: np.ndarray
    center: np.ndarray
    low: np.ndarray
    high: np.ndarray


def read_run(directory: Path) -> RunData:
    """Read a run's progress.csv and config; incomplete lines are skipped.

    The config is `as_trained`, but for what rounds otherwise or says when a start ends. An evaluation that came late
    has the clocks of its env_steps.
    """
    rows = iter_csv(directory / "progress.csv")
    names, numbers = next(rows, []), array("d")
    for row in rows:
        numbers.extend(map(number_in, row))
    table = np.frombuffer(numbers or b"").reshape(-1, max(1, len(names)))
    columns = dict(zip(map(printable, names), table.T, strict=False))
    config: dict[str, Any] = {}
    with suppress(ConfigError):
        own, *changes = configs_of(read_json(directory / "params.json"))
        config = as_trained([own, *({k: v for k, v in each.items() if k not in ALIKE} for each in changes)])
    return RunData(directory, _with_clocks(columns), config)


def configs_of(params: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The config in a params.json, and what each resume changed in it.

    Own code is named by its digest too, my_ppo.py@1a2b3c4d:MyPPO, wherever it lies; what was edited before a resume
    has both.
    """
    starts = starts_in(params)
    digests: dict[str, dict[str, None]] = {}
    for code in (start.get("code") for start in starts):
        for name, digest in code.items() if isinstance(code, dict) else ():
            digests.setdefault(str(name), {})[str(digest)[:8]] = None
    names = {name: f"{_short(name)}@{'+'.join(found)}" for name, found in digests.items()}
    configs = [params.get("config"), *(start.get("changed") for start in starts[1:])]
    return [_with_digests(each, names) if isinstance(each, dict) else {} for each in configs]


def as_trained(configs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The config of a run, with what resumes changed.

    A run that was made longer, and has or had schedules of parts of its length, has both lengths: they went anew.
    """
    found = {key: value for each in configs for key, value in each.items()}
    # What a resume changed is in relation to the first config: without it, that length holds again.
    own = [str(each.get(N_STEPS, configs[0].get(N_STEPS, ""))) for each in configs]
    lengths = [length for length, before in zip(own, ["", *own], strict=False) if length != before]
    if lengths[1:] and any(_is_of_length(value) for each in configs for value in each.values()):
        found[N_STEPS] = ", then ".join(lengths)
    return found


def _is_of_length(value: Any) -> bool:
    """Whether it is a schedule with places that are parts of the run."""
    try:
        return isinstance(value, str) and any(0 < place <= 1 for place in Schedule.parse(value).places)
    except ValueError:
        return False


def _with_digests(value: Any, names: Mapping[str, str]) -> Any:
    """A config, or a value in it, with other names of own code."""
    if isinstance(value, dict):
        return {key: _with_digests(each, names) for key, each in value.items()}
    if isinstance(value, list):
        return [_with_digests(each, names) for each in value]
    if not isinstance(value, str) or not (":" in value or value.endswith(".py")):
        return value
    name, colon, rest = value.partition(":")
    return names.get(value) or (f"{names[name]}{colon}{rest}" if name in names else value)


def _short(name: str) -> str:
    """Without folders; of an object in a study's file the object's name alone."""
    file, _, own = name.partition(".py:")
    return own or Path(file).name


def _with_clocks(columns: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The columns, where rows with one clock alone have the others too, on the line between rows with both.

    That one is env_steps, or updates in a run from data.
    """
    played = (columns.get("env_steps", np.zeros(0)) > 0).any()
    first, *others = CLOCKS if played else CLOCKS[1:]
    steps = columns.get(first, np.zeros(0))
    for name in others:
        clock = columns.get(name, np.full(steps.shape, np.nan))
        known, missing = np.isfinite(clock) & np.isfinite(steps), np.isnan(clock) & np.isfinite(steps)
        if known.any() and missing.any():
            order = np.argsort(steps[known], kind="stable")
            filled = np.interp(steps, steps[known][order], clock[known][order])
            columns = {**columns, name: np.where(missing, filled, clock)}
    return columns


def find_runs(directory: Path) -> list[Path]:
    """The run directories in `directory`, itself included, sorted by name; raises ConfigError if there is none."""
    if not directory.is_dir():
        raise ConfigError(f"{directory} is not a directory")
    found: list[Path] = []
    for root, below, files in os.walk(directory):
        below[:] = [name for name in below if not name.startswith(".")]  # failed attempts that a study moved aside
        linked = [path for name in below if (path := Path(root, name)).is_symlink()]  # os.walk passes them over
        found += [Path(root)] if "progress.csv" in files else []
        found += [path for path in linked if (path / "progress.csv").is_file()]
    if not found:
        raise ConfigError(f"{directory} contains no run: there is no progress.csv in it or below")
    return sorted(found, key=lambda path: (list(map(_numbers_in, path.parts)), path))


def _numbers_in(name: str) -> list[str | float]:
    """Texts and the numbers between them, so that run_2 comes before run_10, and lr_0.05 before lr_0.5."""
    return [float(part) if i % 2 else part for i, part in enumerate(_NUMBER.split(name))]


def find_experiments(dirs: Sequence[Path], labels: Sequence[str]) -> list[SeedGroup]:
    """Group the runs into labelled experiments; raises ConfigError for no runs or a wrong number of labels."""
    per_dir = [find_runs(directory) for directory in dirs]
    for directory in dirs:
        if missing := runs_without_log(directory):
            print(
                printable(f"{directory}: {pluralize(len(missing), 'run')} of the study without a log"), file=sys.stderr
            )
    together = _group(list(dict.fromkeys(path.resolve() for paths in per_dir for path in paths)))
    if not labels:
        return together
    if len(labels) == len(together):
        return [replace(experiment, label=label) for experiment, label in zip(together, labels, strict=True)]
    apart = [_group([path.resolve() for path in paths]) for paths in per_dir]
    if len(labels) == len(dirs) and all(len(experiments) == 1 for experiments in apart):
        return [replace(found[0], label=label) for found, label in zip(apart, labels, strict=True)]
    names = ", ".join(experiment.label for experiment in together)
    raise ConfigError(f"{len(labels)} labels for {len(together)} curves ({names}); give one label per curve")


def folder_of(run: Path) -> Path:
    """That of a run and of others of its setting, as studies name them; else the run's own."""
    return run.parent if re.fullmatch(r"run_\d+", run.name) else run


def _group(paths: Sequence[Path]) -> list[SeedGroup]:
    by_place: dict[Path, list[RunData]] = {}
    for run in _usable([read_run(path) for path in paths]):
        by_place.setdefault(folder_of(run.directory), []).append(run)
    root = Path(os.path.commonpath(list(by_place))) if len(by_place) > 1 else None
    experiments = []
    for place, runs in by_place.items():
        name = place.name if root is None or place == root else str(place.relative_to(root))
        for variant, members in _by_config(runs).items():
            name = printable(name)
            label = f"{name}: {variant}" if variant and root is not None else variant or name
            experiments.append(SeedGroup(label, tuple(members)))
    return experiments


def _usable(runs: Sequence[RunData]) -> Sequence[RunData]:
    """The runs without those that failed in a study or have just started; all if none is left; each with a warning."""
    # of study/run_0, study/setting/run_0 or study/name/setting/run_0
    studies = {study for run in runs for study in run.directory.parents[:3]}
    failed = {run for study in studies for run, state in _runs_of(study) if state == "failed"}
    problems = [_problem(run, failed) for run in runs]
    effect = ": shown nevertheless, as no other is left" if all(problems) else ": left out"
    for run, problem in zip(runs, problems, strict=True):
        if problem:
            print(printable(f"{run.directory} {problem}{effect}"), file=sys.stderr)
    return runs if all(problems) else [run for run, problem in zip(runs, problems, strict=True) if not problem]


def _problem(run: RunData, failed: Collection[Path]) -> str:
    """Why a run cannot be part of a curve; empty if it can."""
    if len(run.columns.get("env_steps", ())) < 2:
        return "has fewer than two rows"
    return "failed" if run.directory in failed else ""


def _runs_of(study: Path) -> list[tuple[Path, str]]:
    """The runs of a study's record, with their states; none without a record that can be read."""
    with suppress(ConfigError, KeyError, TypeError):
        entries = read_json(study / "experiment.json")["runs"]
        return [(study / str(entry["name"]), str(entry["state"])) for entry in entries]
    return []


def runs_without_log(directory: Path) -> list[Path]:
    """The runs of a study, or of the part of it in `directory`, that have written no log and are to."""
    top = directory.resolve()
    found = [each for study in (top, *top.parents[:2]) for each in _runs_of(study)]
    waiting = [run for run, state in found if state not in ("done", "pruned") and run.is_relative_to(top)]
    return [run for run in waiting if not os.path.exists(run / "progress.csv")]


def _by_config(runs: Sequence[RunData]) -> dict[str, list[RunData]]:
    """Runs grouped by config without the seed; runs of different configs must not be averaged."""
    differing = differences([run.config for run in runs])
    groups: dict[str, list[RunData]] = {}
    for n, run in enumerate(runs):
        groups.setdefault(" ".join(f"{key}={texts[n]}" for key, texts in differing.items()), []).append(run)
    return groups


def differences(configs: Sequence[Mapping[str, Any]]) -> dict[str, list[str]]:
    """The keys in which the configs of one experiment may not differ but do, each with its value in every config.

    Beside others an empty config is that of a params.json which is missing or damaged, and differs in this alone.
    """
    known = next((config for config in configs if config), {})
    whole = [config or known for config in configs]
    keys = dict.fromkeys(key for config in whole for key in config if not _SAME_RESULT.fullmatch(key))
    texts = {key: [json.dumps(config.get(key)).strip('"') for config in whole] for key in keys}
    texts["params.json"] = ["whole" if config else "unreadable" for config in configs]
    found = {key: values for key, values in texts.items() if len(set(values)) > 1}
    return {key: values for key, values in found.items() if {*values} != {"null", ""}}  # a newer key that is not used


def choose_x(experiments: Sequence[SeedGroup]) -> str:
    """env_steps, or updates if no run has made an env_step: they learned from data alone.

    Raises:
        ConfigError: some did, and others have played.
    """
    runs = [run for experiment in experiments for run in experiment.runs]
    played, learned = ([_most(run.columns, name) > 0 for run in runs] for name in ("env_steps", "updates"))
    of_data = [run for run, plays, learns in zip(runs, played, learned, strict=True) if learns and not plays]
    if of_data and any(played):
        raise ConfigError(
            f"{of_data[0].directory} learned from data, without env_steps; plot it apart, or with x=updates"
        )
    return "updates" if of_data else "env_steps"


def _most(columns: Mapping[str, np.ndarray], name: str) -> float:
    return float(np.nanmax(columns.get(name, np.zeros(1)), initial=0.0))


def choose_y(experiments: Sequence[SeedGroup], y: str) -> str:
    """`y`, or its fallback (with a warning) if a run has no `y`; raises ConfigError if a run has neither."""
    runs = [run for experiment in experiments for run in experiment.runs]
    known = [[name for name, x in run.columns.items() if np.isfinite(x).any()] for run in runs]
    lacking = [n for n, names in enumerate(known) if y not in names]
    if not lacking:
        return y
    fallback, missing, columns = FALLBACK.get(y, ""), runs[lacking[0]].directory, known[lacking[0]]
    if fallback and all(fallback in names for names in known):
        print(printable(f"{missing} has no {y}: plotting {fallback} instead"), file=sys.stderr)
        return fallback
    if not columns:
        raise ConfigError(f"{missing} has no rows yet")
    what = nearest(y, columns) or f"; it has {', '.join(columns)}"
    raise ConfigError(f"{missing} has no {y!r}{what}")


def make_curve(experiment: SeedGroup, x_column: str, y: str, smooth: int, center: str) -> LearningCurve:
    """Center and 95 % bootstrap band over the seeds, on their common range of x; raises ConfigError if it is empty."""
    points = [_points(run, x_column, y, smooth) for run in experiment.runs]
    first = points[0][0]
    if all(np.array_equal(x, first) for x, _ in points):
        grid, values = first, np.stack([values for _, values in points])
    else:
        low, high = max(x[0] for x, _ in points), min(x[-1] for x, _ in points)
        if low >= high:
            remedy = "plot them separately"
            if fewest := next((run for run, (x, _) in zip(experiment.runs, points, strict=True) if len(x) == 1), None):
                remedy = f"{fewest.directory} has one row of {y}: lower runner.log_interval_steps gives more"
            raise ConfigError(f"the runs of {experiment.label} share no range of {x_column}; {remedy}")
        if high < 0.9 * max(x[-1] for x, _ in points):
            print(f"{experiment.label}: cut at {x_column} {high:,.0f}, where its shortest run ends", file=sys.stderr)
        grid = np.linspace(low, high, N_GRID)
        values = np.stack([np.interp(grid, x, y_values) for x, y_values in points])
    statistic, n_parts = CENTERS[center], max(1, values.size // 1_000)  # to bound memory
    bands = [interval(statistic, [part]) for part in np.array_split(values.T, n_parts)]
    low_band, high_band = np.concatenate(bands, axis=1)
    return LearningCurve(experiment.label, len(points), grid, statistic([values.T]), low_band, high_band)


def _points(run: RunData, x_column: str, y: str, smooth: int) -> tuple[np.ndarray, np.ndarray]:
    if x_column not in run.columns:
        raise ConfigError(f"{run.directory} has no column {x_column!r}")
    x, values = run.columns[x_column], run.columns[y]
    if len(x) != len(values):
        raise ConfigError(f"{run.directory}: {x_column} has {len(x)} rows, and {y} {len(values)}")
    usable = np.isfinite(x) & np.isfinite(values)
    x, first = np.unique(x[usable], return_index=True)
    if not x.size:
        raise ConfigError(f"{run.directory} has no rows with both {x_column} and {y}")
    values = values[usable][first]
    window = np.ones(min(smooth, values.size))
    return x, np.convolve(values, window, "same") / np.convolve(np.ones_like(values), window, "same")
