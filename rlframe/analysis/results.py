"""Result files: the learning curves of all seeds of one configuration in FILE.csv, how they were made in FILE.json.

The CSV has a row for each evaluation: `seed`, then columns named as in progress.csv. The JSON file has the `config` and
a list `measured`: which seeds, when, by which command, with which versions, and on which machine.
"""

import csv
import io
import json
import math
import re
import shlex
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rlframe.analysis.curves import (
    ALIKE,
    CLOCKS,
    PlotError,
    RunData,
    SeedGroup,
    as_trained,
    configs_of,
    differences,
    find_experiments,
    find_runs,
    read_run,
)
from rlframe.core.config import nearest
from rlframe.core.errors import ConfigError, printable
from rlframe.core.files import in_turn, iter_csv, prepare_output, read_json, write_output

_RETURNS = tuple(re.compile(rf"{group}/(.*/)?return_mean") for group in ("eval", "episode"))
_OF_ONE_RUN = re.compile(r"seed|run_ID|name|log_dir|resume|affinity|sync|trust|snapshot_\w+|log_level|dry_run")
_MOST_NAMED = 8  # keys in a message
_FINISHED = ("completed", "stopped")  # `stopped`: by a callback, which is part of the config


@dataclass(frozen=True)
class Results:
    """The content of one result file."""

    path: Path
    columns: tuple[str, ...]  # after `seed`
    rows: dict[int, list[tuple[str, ...]]]  # the evaluations of each seed, as the file has them
    config: dict[str, Any]  # empty if nobody recorded it
    measured: list[dict[str, Any]]

    def column(self, seed: int, name: str) -> np.ndarray:
        """A column of one seed; nan where a cell is empty. Raises PlotError if there is no such column."""
        if name not in self.columns:
            raise PlotError(
                f"{self.path} has no {name!r}; it has {', '.join(self.columns)}{nearest(name, self.columns)}"
            )
        index = self.columns.index(name)
        return np.array([float(row[index] or "nan") for row in self.rows[seed]])

    def clock(self) -> str:
        """What counts the progress: updates of runs that step no environment, else env_steps."""
        offline = "updates" in self.columns and not any(self.column(seed, "env_steps").any() for seed in self.rows)
        return "updates" if offline else "env_steps"

    def has(self, clock: str, metric: str) -> bool:
        """Whether a clock is known where each seed was evaluated."""
        if clock not in self.columns:
            return False
        pairs = [(self.column(seed, clock), self.column(seed, metric)) for seed in self.rows]
        return all(np.isfinite(x[np.isfinite(y)]).all() for x, y in pairs)

    def curve(self, seed: int, metric: str, clock: str = "") -> tuple[np.ndarray, np.ndarray]:
        """Where a seed was evaluated, in order (those of another process may come late), and its values.

        Raises:
            PlotError: there are none.
        """
        x, y = self.column(seed, clock or self.clock()), self.column(seed, metric)
        usable = np.isfinite(x) & np.isfinite(y)
        if not usable.any():
            raise PlotError(f"{self.path} has no {metric} of seed {seed}")
        order = np.argsort(x[usable], kind="stable")
        return x[usable][order], y[usable][order]

    def final(self, metric: str) -> np.ndarray:
        """The last evaluation of each seed, not the best: [n_seeds]."""
        return np.array([self.curve(seed, metric)[1][-1] for seed in self.rows])

    def at(self, metric: str, step: float) -> np.ndarray:
        """The metric at a step, between two evaluations on the line through them; nan outside of them: [n_seeds]."""
        curves = [self.curve(seed, metric) for seed in self.rows]
        return np.array([np.interp(step, x, y, math.nan, math.nan) for x, y in curves])

    def reached(self, metric: str, bound: float, within: float = math.inf) -> np.ndarray:
        """The step of each seed's first evaluation >= bound, at most `within`; nan if there is none: [n_seeds].

        The one before learning does not count. Evaluations come at the end of a batch, up to 2 % later than asked for.
        """
        found = []
        for seed in self.rows:
            x, y = self.curve(seed, metric)
            found.append(np.append(x[(y >= bound) & (x > 0) & (x <= 1.02 * within)], math.nan)[0])
        return np.array(found)

    def command(self) -> str:
        """The command of the first seeds; empty if nobody recorded it."""
        return str(self.measured[0].get("command", "")) if self.measured else ""

    def group(self, label: str) -> SeedGroup:
        """Its seeds for `make_curve`, as if each were the run directory it came from."""
        return SeedGroup(
            label,
            tuple(
                RunData(self.path, {name: self.column(seed, name) for name in self.columns}, self.config)
                for seed in self.rows
            ),
        )


def claim(results: Results, metric: str, bound: float, within: float = math.inf) -> str:
    """What a preset may say of a bound: '475 on 3 of 5 seeds, at 60k to 70k env_steps'."""
    steps = results.reached(metric, bound, within)
    steps, n = steps[np.isfinite(steps)], len(steps)
    ends = list(dict.fromkeys(short(step) for step in (min(steps), max(steps)))) if steps.size else []
    where = f", at {' to '.join(ends)} {results.clock()}" if ends else ""
    return f"{bound:g} on {len(steps)} of {n} seeds{where}"


def short(steps: float) -> str:
    """A number of steps in a table: 800, 7.5k, 60k, 1.2M."""
    if steps >= 1e6:
        return f"{steps / 1e6:.3g}M"
    return f"{steps:.0f}" if steps < 1e3 else f"{steps / 1e3:.{'2g' if steps < 9_950 else '0f'}}k"


def spell_seeds(seeds: Sequence[int]) -> str:
    """Seeds as text, `0-4, 20`."""
    parts: list[list[int]] = []
    for seed in sorted(seeds):
        if parts and parts[-1][1] == seed - 1:
            parts[-1][1] = seed
        else:
            parts.append([seed, seed])
    return ", ".join(f"{low}-{high}" if high > low else str(low) for low, high in parts)


def read_seeds(text: str) -> list[int]:
    """The seeds of such a text; raises ValueError for another one."""
    ends = [[int(end) for end in part.split("-")] for part in text.split(",")]
    return [seed for each in ends for seed in range(each[0], each[-1] + 1)]


def read_results(path: Path) -> Results:
    """Read FILE.csv and its FILE.json.

    Raises:
        ConfigError: one of them is missing, damaged, or has another form.
    """
    if not path.exists():
        raise ConfigError(f"{path} does not exist")
    if path.suffix != ".csv" or not path.is_file():
        raise ConfigError(f"{path} is not a result file; they end with .csv and are made by: rlframe results add")
    lines = iter_csv(path)
    names, rows = next(lines, []), {}  # type: tuple[list[str], dict[int, list[tuple[str, ...]]]]
    try:
        if names[:2] != ["seed", "env_steps"]:
            raise ValueError("its first columns must be seed,env_steps")
        for seed, *cells in lines:
            rows.setdefault(int(seed), []).append(tuple(cells))
            [float(cell or "nan") for cell in cells]
    except ValueError as error:
        raise ConfigError(f"{path} is damaged: {printable(str(error))}") from None
    if not rows:
        raise ConfigError(f"{path} has no rows")
    facts = read_json(path.with_suffix(".json"))
    config, measured = facts.get("config"), facts.get("measured")
    entries = measured if isinstance(measured, list) else [None]
    are_whole = all(isinstance(each, dict) and isinstance(each.get("seeds"), str) for each in entries)
    if not (isinstance(config, dict) and are_whole):
        raise ConfigError(
            f"{path.with_suffix('.json')} is damaged: it needs an object `config` and a list `measured` of objects "
            f"with `seeds`"
        )
    return Results(path, tuple(map(printable, names[1:])), rows, config, entries)


def find_curves(paths: Sequence[Path], labels: Sequence[str]) -> list[SeedGroup]:
    """The experiments of directories, as `find_experiments`, and of result files, one each.

    Raises:
        PlotError: as `find_experiments`, or where files are among the paths, a number of labels other than theirs.
    """
    if not any(path.suffix == ".csv" for path in paths):
        return find_experiments(paths, labels)
    if labels and len(labels) != len(paths):
        raise PlotError(f"{len(labels)} labels for {len(paths)} files and directories; give one for each")
    found: list[SeedGroup] = []
    for path, label in zip(paths, labels or [""] * len(paths), strict=True):
        if path.suffix == ".csv":
            found.append(read_results(path).group(label or f"{path.resolve().parent.name}/{path.stem}"))
        else:
            found += find_experiments([path], [label] if label else [])
    return found


def add_runs(dirs: Sequence[Path], out: Path, columns: Sequence[str], note: str, partial: bool) -> Results:
    """Add the seeds of run directories to a result file, which is made if there is none.

    Args:
        dirs: run directories, or directories that contain some.    columns: metrics to keep; empty: the mean returns.
        note: on the circumstances, such as other work on the machine.    partial: also runs that have not ended.
    Raises:
        ConfigError: the runs or the file differ in more than the seed, a run has not ended, or a seed is there already
            with other numbers. Nothing is written then.
    """
    paths = list(dict.fromkeys(path.resolve() for directory in dirs for path in find_runs(directory)))
    return _add({out: paths}, columns, note, partial)[0]


def add_settings(dirs: Sequence[Path], out: Path, columns: Sequence[str], note: str, partial: bool) -> list[Results]:
    """As `add_runs`, to a file for each setting, in the folder `out`: SETTING.csv, its path in DIR."""
    files: dict[Path, list[Path]] = {}
    for directory in dirs:
        for run in find_runs(directory):
            top, folder = directory.resolve(), _folder(run.resolve())
            name = folder.relative_to(top) if folder != top and folder.is_relative_to(top) else folder.name
            files.setdefault(out / f"{name}.csv", []).append(run.resolve())
    return _add({file: list(dict.fromkeys(runs)) for file, runs in files.items()}, columns, note, partial)


def _add(runs: Mapping[Path, Sequence[Path]], columns: Sequence[str], note: str, partial: bool) -> list[Results]:
    """Add runs to the file of each, or to none."""
    for out in runs:
        for each in (out, out.with_suffix(".json")):
            prepare_output(each)
    with ExitStack() as turns:
        for folder in dict.fromkeys(sorted(out.parent for out in runs)):
            turns.enter_context(in_turn(folder))
        found = [_with_runs(out, paths, columns, note, partial) for out, paths in runs.items()]
        for results in found:
            _write(results)
    return found


def _with_runs(out: Path, paths: Sequence[Path], columns: Sequence[str], note: str, partial: bool) -> Results:
    """What a result file, if there is one, becomes with these runs."""
    facts_file = out.with_suffix(".json")
    if facts_file.exists() and not out.exists():
        raise ConfigError(f"out={out} would overwrite {facts_file}, which is not of a result file; name another file")
    runs = {path: read_run(path) for path in paths}
    facts = {path: _facts(path, note, partial) for path in paths}
    old = read_results(out) if out.exists() else None
    if old and not old.config:
        raise ConfigError(f"{out} has no recorded config to compare with; write another file: out=FILE.csv")
    _check_equal([*([(out, old.config)] if old else []), *((path, facts[path][0]) for path in paths)])
    kept = tuple(old.columns) if old and not columns else _columns([run.columns for run in runs.values()], columns)
    rows: dict[int, list[tuple[str, ...]]] = dict(old.rows) if old else {}
    if old and kept != old.columns:
        raise ConfigError(f"{out} has the columns {', '.join(old.columns)}, not {', '.join(kept)}; leave out columns=")
    measured = list(old.measured) if old else []
    for path, run in runs.items():
        seed, own = facts[path][0].get("seed"), _rows(path, run.columns, kept)
        if not isinstance(seed, int):
            raise ConfigError(f"{path / 'params.json'} names no seed")
        if rows.get(seed) == own:
            continue
        if seed in rows:
            measured = _without_start(measured, seed, rows[seed], own, f"seed {seed} of {path} is in {out} already")
        rows[seed] = own
        measured.append({"seeds": str(seed), **facts[path][1]})
    config = old.config if old else next(iter(facts.values()))[0]
    config = {key: value for key, value in config.items() if not _OF_ONE_RUN.fullmatch(key)}
    return Results(out, kept, dict(sorted(rows.items())), config, _merged(measured))


def _facts(path: Path, note: str, partial: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """The config of a run, with what a resume changed, and how it was measured; ConfigError if it has not ended."""
    params = read_json(path / "params.json")
    configs, ended = configs_of(params), "running"
    with suppress(ConfigError):
        ended = str(read_json(path / "result.json").get("ended"))
    if ended not in _FINISHED and not partial:
        raise ConfigError(
            f"{path} has not reached its end ({ended}); let it end, or add partial=true and say so in note="
        )
    if not configs[0]:
        raise ConfigError(f"{path / 'params.json'} has no config")
    config = as_trained(configs)
    git, host = _mapping(params.get("git")), _mapping(params.get("host"))
    machine = {"cpu": host.get("cpu"), "cpu_count": host.get("cpu_count"), "os": str(host.get("os", "")).split("-")[0]}
    line = params.get("command_line")
    program, *words = map(str, line) if isinstance(line, list) and line else [""]
    is_launch = Path(program).name == "launch.py" or program.endswith(" launch")
    kept = [word for word in words if not _OF_ONE_RUN.fullmatch(word.partition("=")[0])]
    chosen = _mapping(params.get("chosen"))
    if "precision" in chosen:  # by the machine: then it is no difference
        config.pop("precision", None)
    fact = {
        "date": str(params.get("started", ""))[:10],
        "command": shlex.join(["python", "-m", "rlframe.launch", *kept] if is_launch else [Path(program).name, *kept]),
        "versions": _mapping(params.get("versions")),
        "revision": f"{git.get('revision', '')}{' and changes' if git.get('dirty') else ''}",
        "machine": {key: value for key, value in machine.items() if value},
        "chosen": chosen,
        "ended": ended,
        "resumed": len(configs) - 1,
        "note": note,
    }
    return config, {key: value for key, value in fact.items() if value}


def _mapping(value: Any) -> dict[str, Any]:
    return dict(value) if isinstance(value, dict) else {}


def _check_equal(configs: Sequence[tuple[Path, Mapping[str, Any]]]) -> None:
    (first, one), *others = configs
    for path, other in others:
        differing = {key: found for key, found in differences([one, other]).items() if key not in ALIKE}
        if differing:
            each = [f"{key} is {values[0]} and {values[1]}" for key, values in differing.items()]
            words = ", ".join(each[:_MOST_NAMED])
            words += f" and {len(each) - _MOST_NAMED} more" if len(each) > _MOST_NAMED else ""
            several = len({_folder(each) for each, _ in configs if each.is_dir()}) > 1
            remedy = "write a file for each" + (", by out=FOLDER/" if several else "")
            raise ConfigError(f"{first} and {path} are of different configurations: {words}; {remedy}")


def _folder(run: Path) -> Path:
    """That of a run and of others of its setting, as studies name them; else the run's own."""
    return run.parent if re.fullmatch(r"run_\d+", run.name) else run


def _columns(runs: Sequence[Mapping[str, np.ndarray]], named: Sequence[str]) -> tuple[str, ...]:
    """Clocks, then the named metrics of the runs, or their mean returns: of evaluations, else of training episodes."""
    there = [name for name in runs[0] if np.isfinite(runs[0][name]).any()]
    returns = ([name for name in there if pattern.fullmatch(name)] for pattern in _RETURNS)
    metrics = list(named) or next(filter(None, returns), [])
    for run in runs:
        missing = [name for name in ("env_steps", *metrics) if name not in run or not np.isfinite(run[name]).any()]
        if missing or not metrics:
            raise ConfigError(
                f"a run has no {missing[0] if missing else 'returns'}; it has {', '.join(there) or 'no rows'}"
            )
    return (*(name for name in CLOCKS if all(name in run for run in runs)), *metrics)


def _rows(path: Path, run: Mapping[str, np.ndarray], names: Sequence[str]) -> list[tuple[str, ...]]:
    """The rows that have a metric, as text."""
    if missing := [name for name in names if name not in run]:
        raise ConfigError(f"{path} has no {missing[0]}, a column of the result file")
    table = np.stack([run[name] for name in names], axis=1)
    usable = np.isfinite(table[:, [name not in CLOCKS for name in names]]).any(axis=1)
    return [tuple(map(_cell, names, row)) for row in table[usable]]


def _cell(name: str, x: float) -> str:
    if not math.isfinite(x):
        return ""
    return f"{x:.0f}" if name in ("env_steps", "updates") else f"{x:.1f}" if name in CLOCKS else f"{x:.6g}"


def _without_start(
    measured: Sequence[Mapping[str, Any]], seed: int, before: list[Any], rows: list[Any], already: str
) -> list[dict[str, Any]]:
    """What was measured without a seed that went on: added when it had not ended, its rows begin with those of then.

    Raises:
        ConfigError: it had ended, or has other rows; `already` says which.
    """
    (entry,) = [each for each in measured if seed in read_seeds(each["seeds"])]
    if entry.get("ended") in _FINISHED or rows[: len(before)] != before:
        raise ConfigError(f"{already}, with other numbers; seeds are measured once")
    kept = [x for x in read_seeds(entry["seeds"]) if x != seed]
    others = [dict(each) for each in measured if each is not entry]
    return [*others, {**entry, "seeds": spell_seeds(kept)}] if kept else others


def _merged(measured: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One entry for all seeds that were measured in the same way on the same day."""
    seeds: dict[str, list[int]] = {}
    for entry in measured:
        others = json.dumps({key: value for key, value in entry.items() if key != "seeds"})
        seeds.setdefault(others, []).extend(read_seeds(entry["seeds"]))
    return [{"seeds": spell_seeds(found), **json.loads(others)} for others, found in seeds.items()]


def _write(results: Results) -> None:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["seed", *results.columns])
    for seed, rows in results.rows.items():
        writer.writerows([seed, *row] for row in rows)
    entries = ",\n  ".join(json.dumps(entry, ensure_ascii=False) for entry in results.measured)
    facts = f'{{\n "config": {json.dumps(results.config)},\n "measured": [\n  {entries}\n ]\n}}\n'
    for path, content in ((results.path, text.getvalue()), (results.path.with_suffix(".json"), facts)):
        write_output(path, content)
