"""The trials of a search and the importance of its keys, from the journal of a study, which may be a stranger's.

The journal is one that Optuna wrote: lines of JSON. It is read here as JSON alone, without Optuna and within limits.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rlframe.core.errors import ConfigError, printable
from rlframe.core.files import open_regular_file, parse_json

SEARCH_JOURNAL = "search.journal"  # in the study's directory
RUNNING, DONE, PRUNED, FAILED, WAITING = _STATES = ("running", "done", "pruned", "failed", "waiting")  # Optuna's order
_STUDY, _ATTRIBUTE, _TRIAL, _VALUE, _STATE, _REPORT = 0, 2, 4, 5, 6, 7  # its operations that matter here
_MINIMIZE = 1
_KINDS = ("uniform", "loguniform", "int", "logint", "choice")
_MAX_BYTES, _MAX_LINES, _MAX_LINE_BYTES = 1 << 26, 1_000_000, 1 << 20
_MAX_TRIALS, _MAX_KEYS, _MAX_CHOICES, _MAX_TEXT = 10_000, 60, 100, 200
_MAX_NUMBER = 1e100  # a figure can show it
_N_TOP = 5  # trials that count as good, at least; with fewer than twice as many there is no importance
_N_GRID = 50  # points of the estimated densities


@dataclass(frozen=True)
class SearchedKey:
    """A key of the search, and what its values were drawn from."""

    name: str
    low: float = 0.0
    high: float = 1.0
    log: bool = False  # whether its values were drawn on a logarithmic scale
    choices: tuple[str, ...] = ()  # empty: numbers from low to high

    def unit(self, values: np.ndarray) -> np.ndarray:
        """Numbers on the scale that they were drawn from, low is 0 and high is 1."""
        low, high, x = (np.log(each) if self.log else each for each in (self.low, self.high, values))
        return np.clip((x - low) / (high - low), 0.0, 1.0)

    def text(self, value: float) -> str:
        """A value of a trial as on the command line, to 6 digits."""
        return self.choices[int(value)] if self.choices else f"{value:.6g}"


@dataclass
class Trial:
    """One trial. While it is made from the lines of a journal, it changes."""

    number: int
    state: str
    score: float = math.nan  # of a pruned one the last value that it reported; nan: none
    values: dict[str, float] = field(default_factory=dict)  # by key; of a choice its index
    added: bool = False  # by hand, not chosen by the searcher


@dataclass(frozen=True)
class SearchData:
    """A search: what was searched for, and every trial in order."""

    metric: str
    lower_is_better: bool
    keys: tuple[SearchedKey, ...]
    trials: tuple[Trial, ...]

    def scored(self, state: str) -> list[Trial]:
        """The trials in this state that have a score."""
        return [trial for trial in self.trials if trial.state == state and math.isfinite(trial.score)]

    def best(self) -> Trial | None:
        """The complete trial with the best score; None if there is none."""
        sign = -1.0 if self.lower_is_better else 1.0
        return max(self.scored(DONE), key=lambda trial: sign * trial.score, default=None)

    def words(self, trial: Trial) -> str:
        """The values of a trial as on the command line."""
        keys = (key for key in self.keys if key.name in trial.values)
        return " ".join(f"{key.name}={key.text(trial.values[key.name])}" for key in keys)


def read_search(directory: Path) -> SearchData:
    """The search whose journal is in a study's directory.

    Raises:
        ConfigError: the journal is damaged, larger than any of a study, or not a regular file.
    """
    path, found = directory / SEARCH_JOURNAL, _Journal()
    with open_regular_file(path, _MAX_BYTES) as file:
        for number, line in enumerate(iter(lambda: file.readline(_MAX_LINE_BYTES), b""), 1):
            if not line.endswith(b"\n") and len(line) < _MAX_LINE_BYTES:
                break  # torn, or being written
            try:
                if number > _MAX_LINES or len(found.trials) > _MAX_TRIALS:
                    raise ValueError(f"more than {_MAX_LINES:,} lines or {_MAX_TRIALS:,} trials, the limit")
                found.take(parse_json(line))
            except (ValueError, KeyError, TypeError, IndexError, AttributeError, OverflowError) as error:
                what = printable(str(error)[:_MAX_TEXT])
                raise ConfigError(f"{path} is damaged in line {number}: {what}; plot its runs: DIR/trial_*") from None
    return SearchData(found.metric, found.lower_is_better, tuple(found.keys.values()), tuple(found.trials))


class _Journal:
    """What the lines of a journal add up to. A wrong line raises one of many exceptions of Python's."""

    def __init__(self) -> None:
        self.metric, self.lower_is_better = "score", False
        self.keys: dict[str, SearchedKey] = {}
        self.trials: list[Trial] = []

    def take(self, line: Mapping[str, Any]) -> None:
        operation = line["op_code"]
        if operation == _STUDY:
            self.lower_is_better = line["directions"][0] == _MINIMIZE
        elif operation == _ATTRIBUTE:
            self._take_attributes(line["user_attr"])
        elif operation == _TRIAL:
            state = _STATES[_index(line.get("state", 0), len(_STATES))]
            self.trials.append(Trial(len(self.trials), state, added="added" in line.get("user_attrs", ())))
        elif operation == _VALUE:
            key = self.keys[line["param_name"]]
            value = _finite(line["param_value_internal"])
            at = _index(int(value), len(key.choices)) if key.choices else min(max(value, key.low), key.high)
            self._trial(line).values[key.name] = float(at)
        elif operation == _REPORT:
            trial, value = self._trial(line), float(line["intermediate_value"])
            if trial.state == RUNNING and abs(value) < _MAX_NUMBER:
                trial.score = value
        elif operation == _STATE:
            self._finish(self._trial(line), _STATES[_index(line["state"], len(_STATES))], line["values"])

    def _trial(self, line: Mapping[str, Any]) -> Trial:
        return self.trials[_index(line["trial_id"], len(self.trials))]

    def _finish(self, trial: Trial, state: str, values: Sequence[Any] | None) -> None:
        if trial.state in (RUNNING, WAITING):
            trial.state = state
            if values and abs(_finite(values[0])) < _MAX_NUMBER:
                trial.score = _finite(values[0])

    def _take_attributes(self, attributes: Mapping[str, Any]) -> None:
        self.metric = _text(attributes.get("metric", self.metric)).removeprefix("-")
        space = attributes.get("space", {})
        if len(space) > _MAX_KEYS:
            raise ValueError(f"{len(space):,} keys are searched, more than the limit of {_MAX_KEYS}")
        self.keys |= {_text(name): _read_key(name, *values) for name, values in space.items()}


def _read_key(name: str, kind: str, *values: str) -> SearchedKey:
    if kind not in _KINDS:
        raise ValueError("an unknown kind of distribution")
    if kind == "choice":
        if not 1 <= len(values) <= _MAX_CHOICES:
            raise ValueError(f"{len(values):,} choices, and the limit is {_MAX_CHOICES}")
        return SearchedKey(name, choices=tuple(map(_text, values)))
    low, high = map(_finite, values)
    if not low < high or (kind.startswith("log") and low <= 0) or max(abs(low), abs(high)) > _MAX_NUMBER:
        raise ValueError("wrong bounds of a distribution")
    return SearchedKey(name, low, high, kind.startswith("log"))


def _index(value: Any, n: int) -> int:
    if type(value) is not int or not 0 <= value < n:
        raise ValueError(f"an index is not from 0 to {n - 1}")
    return value


def _finite(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError("a number is not finite")
    return number


def _text(value: Any) -> str:
    if not isinstance(value, str) or len(value) > _MAX_TEXT:
        raise ValueError(f"a name is not text of at most {_MAX_TEXT} characters")
    return printable(value)


def importance(data: SearchData) -> dict[str, float]:
    """How much each key decided which trials were good, as shares of 1, the largest first; empty for few trials.

    PED-ANOVA (Watanabe, Bansal and Hutter, IJCAI 2023): the Pearson divergence of the values of the best tenth of the
    trials, at least 5, from those of all trials, each key by itself. Pruned trials are not among the best. Densities
    are kernel estimates with a uniform prior that weighs as one trial.
    """
    done = sorted(data.scored(DONE), key=lambda trial: trial.score, reverse=not data.lower_is_better)
    trials = [*done, *(trial for trial in data.trials if trial.state == PRUNED)]
    n_top = max(_N_TOP, len(trials) // 10)
    if min(len(done), len(trials) // 2) < n_top:
        return {}
    found = {}
    for key in data.keys:
        values = np.array([trial.values.get(key.name, math.nan) for trial in trials])
        if np.isfinite(values).all():
            top, every = _density(key, values[:n_top]), _density(key, values)
            found[key.name] = float(every @ (top / every - 1.0) ** 2)
    total = sum(found.values()) or 1.0
    return {name: x / total for name, x in sorted(found.items(), key=lambda pair: -pair[1])}


def _density(key: SearchedKey, values: np.ndarray) -> np.ndarray:
    """The estimated probabilities of its choices, or of cells of equal width of its scale; they sum to 1."""
    if key.choices:
        counts = np.bincount(values.astype(int), minlength=len(key.choices)) + 1.0 / len(key.choices)
    else:
        x = key.unit(values)
        width = max(0.05, float(np.std(x)) * len(x) ** -0.2)  # Scott's rule
        grid = (np.arange(_N_GRID) + 0.5) / _N_GRID
        kernels = np.exp(-0.5 * ((grid - x[:, None]) / width) ** 2)
        kernels /= kernels.sum(axis=1, keepdims=True)  # cut at the bounds
        counts = kernels.sum(axis=0) + 1.0 / _N_GRID
    return counts / counts.sum()
