"""Write the tables of results in README.md and the docs: python docs/result_tables.py.

A table stands between the lines `<!-- results: begin -->` and `<!-- results: end -->`. Its header names the columns,
and its rows name a preset or another file of results/ in a cell such as `classic/ppo_cartpole`. The cells of FIGURES
are replaced by what the result file says, or the preset's file if there is none; others are written by hand. Between
`<!-- unmeasured: begin -->` and `<!-- unmeasured: end -->` stand the presets that nobody has measured.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import yaml

from rlframe.analysis.aggregates import iqm, mean
from rlframe.analysis.results import Results, claim, read_results, short
from rlframe.analysis.tables import Statistic, estimate, markdown, number
from rlframe.experiment.presets import is_measured, load_preset, preset_names

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "docs/results.md"]
PAGES += [ROOT / f"docs/guides/{name}.md" for name in ("central_critics", "curiosity", "data")]
NO_CURVES, CUT = "†", "‡"
_TABLE = re.compile(r"(?<=<!-- results: begin -->\n).*?(?=\n<!-- results: end -->)", re.DOTALL)
_UNMEASURED = re.compile(r"(?<=<!-- unmeasured: begin -->\n).*?(?=<!-- unmeasured: end -->)", re.DOTALL)


@dataclass(frozen=True)
class Row:
    """A preset, or the one that a comparison's command names, and the result file, if there are such."""

    preset: dict[str, Any]
    results: Results | None

    @property
    def metric(self) -> str:
        return str(self.preset.get("expect", {}).get("metric", "eval/return_mean"))

    def reached(self) -> str:
        """When how many seeds reached the preset's bound; without curves, what the preset's file says."""
        expect, measured = self.preset.get("expect"), self.preset.get("measured", "unmeasured")
        if self.results and expect:
            found = claim(self.results, self.metric, expect["bound"], expect["env_steps"])
            return f"{found}, of {short(self.n_steps())}"
        if self.results:
            return "-"
        return "not measured yet" if measured == "unmeasured" else f"{measured['reached']} {NO_CURVES}"

    def n_steps(self) -> float:
        """The length of the runs; infinite if it is not known."""
        named = re.search(r"runner\.n_steps=(\d+)", self.results.command() if self.results else "")
        return float(named[1] if named else self.preset.get("config", {}).get("runner.n_steps", "inf"))

    def mean(self) -> str:
        return self.end(mean)

    def iqm(self) -> str:
        return self.end(iqm)

    def end(self, statistic: Statistic) -> str:
        """A statistic of the last evaluations, marked if a run was stopped before its end."""
        if not self.results:
            return "-"
        lengths = [self.results.curve(seed, self.metric)[0][-1] for seed in self.results.rows]
        is_cut = math.isfinite(self.n_steps()) and min(lengths) < 0.98 * self.n_steps()
        return estimate(statistic, [self.results.final(self.metric)]) + (f" {CUT}" if is_cut else "")

    def seeds(self) -> str:
        return str(len(self.results.rows)) if self.results else "-"

    def each(self, n: int) -> str:
        """The mean of each seed's last n evaluations."""
        curves = [self.results.curve(seed, self.metric)[1] for seed in self.results.rows] if self.results else []
        return ", ".join(number(float(curve[-n:].mean())).replace(",", "") for curve in curves) or "-"

    def command(self) -> str:
        """The words of the command of a comparison, or what is known of it."""
        assert self.results
        words = self.results.command().removeprefix("python -m rlframe.launch ")
        return f"`{words}`" if words else str(self.results.measured[0]["note"]).partition("; ")[0]


FIGURES: dict[str, Callable[[Row], str]] = {
    "reached": Row.reached,
    "mean at the end": Row.mean,
    "IQM at the end": Row.iqm,
    "each seed at the end": lambda row: row.each(1),
    "each seed's last three evaluations": lambda row: row.each(3),
    "seeds": Row.seeds,
    "command": Row.command,
}


def read_row(name: str) -> Row:
    """Raises SystemExit if there is neither a preset nor a result file of this name."""
    file, own = ROOT / f"results/{name}.csv", ROOT / f"experiments/{name}.yaml"
    results = read_results(file) if file.exists() else None
    named = re.search(r"experiment=([\w/]+)", results.command() if results else "")
    path = own if own.exists() or not named else ROOT / f"experiments/{named[1]}.yaml"
    if not results and not path.exists():
        raise SystemExit(f"{name} is neither a preset nor a file in results/")
    if not path.exists():
        return Row({}, results)
    return Row(yaml.safe_load(path.read_text(encoding="utf-8")) | {"config": load_preset(str(path))}, results)


def refresh(table: str) -> str:
    """A table with the cells of FIGURES replaced."""
    head, _, *rows = [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in table.splitlines()]
    new = []
    for cells in rows:
        name = re.findall(r"`([a-z_0-9]+/[a-z_0-9]+)`", " ".join(cells))
        if not name:
            raise SystemExit(f"a row names no preset or result file: {' | '.join(cells)}")
        row, by_hand = read_row(name[0]), dict(zip(head, cells, strict=False))
        new.append([FIGURES[title](row) if title in FIGURES else by_hand[title] for title in head])
    return markdown(head, new)


def unmeasured() -> str:
    """A line for each folder of experiments/ with presets that nobody has measured."""
    names = [name for name in preset_names() if not is_measured(name)]
    folders = groupby(names, key=lambda name: name.partition("/")[0])
    return "".join(f"- {', '.join(f'`{name}`' for name in own)}\n" for _, own in folders)


def written(page: str) -> str:
    """The text of a page with all its tables made again."""
    return _UNMEASURED.sub(lambda _: unmeasured(), _TABLE.sub(lambda match: refresh(match[0]), page))


if __name__ == "__main__":
    for path in PAGES:
        path.write_text(written(path.read_text(encoding="utf-8")), encoding="utf-8")
        print(path.relative_to(ROOT))
