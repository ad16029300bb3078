"""Result files: the learning curves of all seeds of one configuration in FILE.csv, how they were made in FILE.json.

The CSV has a row for each evaluation: `seed`, then columns named as in progress.csv. The JSON file has the `config` and
a list `measured`: which seeds, when, by which command, with which versions, and on which machine.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rlframe.analysis.curves import CLOCKS, RunData, SeedGroup, find_experiments
from rlframe.core.config import nearest
from rlframe.core.errors import ConfigError, printable, spans
from rlframe.core.files import iter_csv, read_json


@dataclass(frozen=True)
class Results:
    """The content of one result file."""

    path: Path
    columns: tuple[str, ...]  # after `seed`
    rows: dict[int, list[tuple[str, ...]]]  # the evaluations of each seed, as the file has them
    config: dict[str, Any]  # empty if nobody recorded it
    measured: list[dict[str, Any]]

    def column(self, seed: int, name: str) -> np.ndarray:
        """A column of one seed; nan where a cell is empty. Raises ConfigError if there is no such column."""
        if name not in self.columns:
            raise ConfigError(
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
            ConfigError: there are none.
        """
        x, y = self.column(seed, clock or self.clock()), self.column(seed, metric)
        usable = np.isfinite(x) & np.isfinite(y)
        if not usable.any():
            raise ConfigError(f"{self.path} has no {metric} of seed {seed}")
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
    if steps >= 999_500:
        return f"{steps / 1e6:{'.3g' if steps < 999.5e6 else '.0f'}}M"
    return f"{steps:.0f}" if steps < 1e3 else f"{steps / 1e3:.{'2g' if steps < 9_950 else '0f'}}k"


def spell_seeds(seeds: Sequence[int]) -> str:
    """Seeds as text, `0-4, 20`."""
    return spans(seeds, ", ")


def read_seeds(text: str) -> list[int]:
    """The seeds of such a text; raises ValueError for another one."""
    ends = [[int(end) for end in part.split("-")] for part in text.split(",")]
    return [seed for each in ends for seed in range(each[0], each[-1] + 1)]


def _check_name(path: Path) -> None:
    if not path.exists():
        raise ConfigError(f"{path} does not exist")
    if path.is_dir() and any(each.with_suffix(".json").exists() for each in path.glob("*.csv")):
        raise ConfigError(f"{path} is a folder; name the result files in it, {path}/*.csv")
    if path.suffix != ".csv" or not path.is_file():
        raise ConfigError(f"{path} is not a result file; they end with .csv and are made by: rlframe results add")
    if path.name == "progress.csv":
        raise ConfigError(f"{path} is the log of a run, whose directory is plotted, or made a result file: results add")


def read_results(path: Path) -> Results:
    """Read FILE.csv and its FILE.json.

    Raises:
        ConfigError: one of them is missing, damaged, or has another form.
    """
    _check_name(path)
    lines = iter_csv(path)
    names, rows = next(lines, []), {}  # type: tuple[list[str], dict[int, list[tuple[str, ...]]]]
    try:
        if names[:2] != ["seed", "env_steps"]:
            raise ValueError("its first columns must be seed,env_steps")
        if twice := [name for i, name in enumerate(names) if name in names[:i]]:
            raise ValueError(f"it has the column {twice[0]} twice")
        for seed, *cells in lines:
            rows.setdefault(int(seed), []).append(tuple(cells))
            _check_row(names[1:], cells)
        if double := [seed for seed, own in rows.items() if len(set(own)) < len(own)]:
            raise ValueError(f"seed {double[0]} has a row twice")
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
    try:
        of_facts = sorted(seed for each in entries for seed in read_seeds(each["seeds"]))
    except ValueError:
        raise ConfigError(
            f"{path.with_suffix('.json')} is damaged: its `seeds` are no numbers such as 0-4, 7"
        ) from None
    if entries and of_facts != sorted(rows):
        raise ConfigError(
            f"{path} has the seeds {spell_seeds([*rows])}, and its JSON file says that {spell_seeds(of_facts)} were "
            f"measured: one of them is not whole; remove both, and add the runs again"
        )
    return Results(path, tuple(map(printable, names[1:])), rows, config, entries)


def _check_row(names: Sequence[str], cells: Sequence[str]) -> None:
    """Raise ValueError for a row that no run has."""
    numbers = dict(zip(names, [float(cell or "nan") for cell in cells], strict=True))
    if not 0 <= numbers["env_steps"] < math.inf:
        raise ValueError(f"a row has env_steps={cells[0]}")
    if all(math.isnan(x) for name, x in numbers.items() if name not in CLOCKS):
        raise ValueError(f"the row of env_steps={cells[0]} has no value")


def find_curves(paths: Sequence[Path], labels: Sequence[str]) -> list[SeedGroup]:
    """The experiments of directories, as `find_experiments`, and of result files, one each.

    Raises:
        ConfigError: as `find_experiments`, or where files are among the paths, a number of labels other than theirs.
    """
    if not any(path.suffix == ".csv" for path in paths):
        return find_experiments(paths, labels)
    if labels and len(labels) != len(paths):
        raise ConfigError(f"{len(labels)} labels for {len(paths)} files and directories; give one for each")
    found: list[SeedGroup] = []
    for path, label in zip(paths, labels or [""] * len(paths), strict=True):
        if path.suffix == ".csv":
            found.append(read_results(path).group(label or f"{path.resolve().parent.name}/{path.stem}"))
        else:
            found += find_experiments([path], [label] if label else [])
    return found
