"""Tables of a result of `benchmarks.compare`, printed, or put into pages in place of those of an earlier result.

    python -m benchmarks.compare out=compare.json chart=docs/images/speed.png
    python -m benchmarks.table result=compare.json
    python -m benchmarks.table result=compare.json pages=README.md,docs/guides/speed.md

A page marks the place: what stands between the lines `<!-- speed: short -->` and `<!-- speed: end -->` is replaced by
the sentence that says where it was measured and the short table; after `<!-- speed: long -->` it is the long one.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import chz

from benchmarks.parts.rows import ROWS

_END = "<!-- speed: end -->"
PEERS = ("Stable-Baselines3", "SBX")
_VERSIONS = {"PyTorch": "torch", "Stable-Baselines3": "stable-baselines3", "SBX": "sbx-rl", "JAX": "jax"}
_NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")

Result = Mapping[str, Any]  # the JSON of benchmarks.compare
Lines = Mapping[tuple[str, str], Mapping[str, Any]]  # rates and ratios by row and name


def where(result: Result) -> str:
    """On which machine and how it was measured."""
    machine, n = result["machine"], len(result["rates"][0]["rounds"])
    found = {name: machine[package].partition("+")[0] for name, package in _VERSIONS.items() if package in machine}
    units = "no units for bfloat16" if machine["bf16_units"] == "none" else machine["bf16_units"]
    text = (
        f"One run on {_number(machine['n_cpus'])} cores of an {machine['cpu']} ({units}), medians of {_number(n)} "
        f"rounds of {result['seconds']:g} s; {', '.join(f'{name} {number}' for name, number in found.items())}."
    )
    return textwrap.fill(text, 120)


def _number(n: int) -> str:
    return _NUMBERS[n] if n < len(_NUMBERS) else str(n)


def short(result: Result) -> str:
    """A line for each training: rlframe's rate, and how many times that of each peer."""
    head = ["training", "cores", "rlframe, steps/s", *(f"over {peer}" for peer in PEERS)]
    lines = _lines(result)

    def row(name: str) -> list[str]:
        title = f"{name.partition('_')[0].upper()}, {ROWS[name].env}"
        return [title, str(ROWS[name].n_threads), _rate(lines, name), *_ratios(lines, name, _median)]

    return _table(head, [row(name) for name in ROWS if (name, "rlframe") in lines])


def long(result: Result) -> str:
    """The same with the names of the rows, and the lowest and highest ratio of a round."""
    head = ["row", "rlframe, steps/s", *(f"over {peer}" for peer in PEERS)]
    lines = _lines(result)

    def row(name: str) -> list[str]:
        limit = lines.get((name, "over its limit"))
        of_limit = f", {_with_range(limit)} of its limit" if limit else ""
        return [f"`{name}`", _rate(lines, name) + of_limit, *_ratios(lines, name, _with_range)]

    return _table(head, [row(name) for name in ROWS if (name, "rlframe") in lines])


def _lines(result: Result) -> Lines:
    return {(line["group"], line["name"]): line for line in [*result["rates"], *result["ratios"]]}


def _rate(lines: Lines, row: str) -> str:
    return f"{lines[row, 'rlframe']['median']:,.0f}"


def _median(line: Mapping[str, Any]) -> str:
    return f"{line['median']:.2f}"


def _with_range(line: Mapping[str, Any]) -> str:
    return f"{line['median']:.2f} ({min(line['rounds']):.2f} to {max(line['rounds']):.2f})"


def _ratios(lines: Lines, row: str, text: Callable[[Mapping[str, Any]], str]) -> list[str]:
    """A cell for each peer, with a star where the work is not the same, empty where it was not measured."""
    cells = []
    for peer in PEERS:
        same, other = lines.get((row, f"over {peer}")), lines.get((row, f"over {peer} *"))
        cells.append(text(same) if same else rf"{text(other)} \*" if other else "")
    return cells


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    ruler = "|---" * len(head) + "|"
    return "\n".join([f"| {' | '.join(head)} |", ruler, *(f"| {' | '.join(row)} |" for row in rows)])


def put(page: str, result: Result) -> str:
    """The text of a page with the tables of this result.

    Raises:
        SystemExit: the page marks no place.
    """
    for kind, table in (("short", short), ("long", long)):
        before, begin, rest = page.partition(f"<!-- speed: {kind} -->\n")
        _, end, after = rest.partition(_END)
        if end:
            return f"{before}{begin}{where(result)}\n\n{table(result)}\n{end}{after}"
    raise SystemExit(f"no line <!-- speed: short --> or <!-- speed: long --> with {_END} after it")


def main(result: str, pages: str = "") -> None:
    """Print both tables, or put them into pages.

    Args:
        result: JSON file of benchmarks.compare.    pages: Markdown files, separated by commas.
    """
    found = json.loads(Path(result).read_text(encoding="utf-8"))
    if not pages:
        print(where(found), short(found), long(found), sep="\n\n")
    files = [Path(page) for page in pages.split(",") if page]
    for file, text in [(file, put(file.read_text(encoding="utf-8"), found)) for file in files]:
        file.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    chz.entrypoint(main)
