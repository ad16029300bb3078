"""The grid of a study: the combinations of values that sweep.KEY=, zip.KEY= and repeats= make."""

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass

from rlframe.core.command_line import KeyValues
from rlframe.core.errors import ConfigError

SWEEP, ZIP, REPEATS = "sweep.", "zip.", "repeats"
MAX_RUNS = 5_000


@dataclass(frozen=True)
class Grid:
    """Every combination of the swept values, with each tuple of the zipped values."""

    swept: Mapping[str, tuple[str, ...]]
    zipped: Mapping[str, tuple[str, ...]]  # equally many of each key

    def n_runs(self) -> int:
        return math.prod(map(len, self.swept.values())) * len(self.tuples())

    def combinations(self) -> list[dict[str, str]]:
        """The values of each run; the zipped ones vary fastest, then the last swept key."""
        product = itertools.product(*self.swept.values())
        return [dict(zip(self.swept, values, strict=True)) | each for values in product for each in self.tuples()]

    def tuples(self) -> list[dict[str, str]]:
        tuples = zip(*self.zipped.values(), strict=True)
        return [dict(zip(self.zipped, values, strict=True)) for values in tuples] or [{}]


def has_grid(arguments: Mapping[str, str]) -> bool:
    """Whether any of the arguments makes a grid."""
    return any(name == REPEATS or bare_key(name) != name for name in arguments)


def bare_key(name: str) -> str:
    """KEY of sweep.KEY and zip.KEY; any other name unchanged."""
    prefix = next((prefix for prefix in (SWEEP, ZIP) if name.startswith(prefix)), "")
    return name.removeprefix(prefix)


def split_values(text: str) -> tuple[str, ...]:
    """Split at commas outside of brackets: `[64,64],[256,256]` are two values."""
    values, depth = [""], 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            values.append("")
        else:
            values[-1] += character
    return tuple(value.strip() for value in values)


def read_grid(arguments: Mapping[str, str]) -> Grid:
    """The grid of these arguments.

    Raises:
        ConfigError: a value is empty or repeated, zipped keys have different numbers of values, a key is given in two
            ways, or there are too many runs.
    """
    swept, zipped = _values(arguments, SWEEP), _values(arguments, ZIP)
    for key in swept:
        if key in zipped:
            raise ConfigError(f"{key} is in both sweep.{key} and zip.{key}; remove one of them")
    if len(set(map(len, zipped.values()))) > 1:
        numbers = ", ".join(f"zip.{key} has {len(values)}" for key, values in zipped.items())
        raise ConfigError(f"zipped keys need the same number of values, but {numbers}")
    if REPEATS in arguments:
        swept["seed"] = _repeated_seeds(arguments)
    grid = Grid(swept, zipped)
    if grid.n_runs() > MAX_RUNS:
        raise ConfigError(f"the sweep has {grid.n_runs():,} runs, more than {MAX_RUNS:,}; sweep fewer values or keys")
    _check_distinct(grid)
    return grid


def _values(arguments: Mapping[str, str], prefix: str) -> dict[str, tuple[str, ...]]:
    """The values of every PREFIX.KEY=v1,v2."""
    found: dict[str, tuple[str, ...]] = {}
    for name, text in arguments.items():
        if not name.startswith(prefix):
            continue
        key, values = name.removeprefix(prefix), split_values(text)
        if not key or "" in values:
            raise ConfigError(f"{name}={text} needs the form {prefix}KEY=value,value without empty values")
        if key in arguments:
            raise ConfigError(f"{key} is given as {arguments[key]} and as {name}={text}; remove one of them")
        found[key] = values
    return found


def _check_distinct(grid: Grid) -> None:
    for key, values in grid.swept.items():
        if len(set(values)) < len(values):
            repeated = next(value for value in values if values.count(value) > 1)
            raise ConfigError(f"sweep.{key}={','.join(values)} contains {repeated} twice; remove one")
    tuples = grid.tuples()
    for index, each in enumerate(tuples):
        if each in tuples[:index]:
            shown = " ".join(f"{key}={value}" for key, value in each.items())
            raise ConfigError(f"the zipped values contain {shown} twice; remove one")


def _repeated_seeds(arguments: Mapping[str, str]) -> tuple[str, ...]:
    """seed, seed + 1, ..., as many as `repeats`."""
    words = KeyValues(f"{key}={arguments[key]}" for key in (REPEATS, "seed") if key in arguments)
    n, first = words.count(REPEATS, 1), words.count("seed", 0)
    if not 1 <= n <= MAX_RUNS:
        raise ConfigError(f"repeats={n} must be from 1 to {MAX_RUNS:,}")
    for name in (f"{SWEEP}seed", f"{ZIP}seed"):
        if name in arguments:
            raise ConfigError(f"repeats={n} and {name}={arguments[name]} both set the seeds; remove one of them")
    return tuple(str(first + k) for k in range(n))
