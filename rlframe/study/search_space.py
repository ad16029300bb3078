"""What the values of a key are drawn from in a search or a population: `search.KEY=loguniform(1e-5,1e-2)`."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from rlframe.core.config import nearest, split_values
from rlframe.core.errors import ConfigError
from rlframe.experiment.study_keys import SEARCH

_KINDS = ("uniform", "loguniform", "int", "logint", "choice")
_FORM = re.compile(r"\s*([a-z]+)\s*\((.*)\)\s*")
_DIGITS = 6  # of a number in a word


@dataclass(frozen=True)
class Domain:
    """What the values of a key are drawn from."""

    kind: str  # of _KINDS
    values: tuple[str, ...]  # its bounds, or its choices

    def __str__(self) -> str:
        return f"{self.kind}({','.join(self.values)})"

    def made(self) -> Any:
        """That of Optuna."""
        from optuna import distributions

        if self.kind == "choice":
            return distributions.CategoricalDistribution(self.values)
        low, high = map(float, self.values)
        if "int" in self.kind:
            return distributions.IntDistribution(int(low), int(high), log=self.kind == "logint")
        return distributions.FloatDistribution(low, high, log=self.kind == "loguniform")

    def examples(self) -> tuple[str, ...]:
        """Its bounds or choices, as words."""
        return self.values if self.kind == "choice" else tuple(map(word_of, map(self._number, self.values)))

    def value(self, name: str, text: str) -> Any:
        """A value of it from its word; raises ConfigError if it cannot give that."""
        form = f"{name}={text:.60} is not of {self.kind}({','.join(self.values):.200})"
        if self.kind == "choice":
            if text not in self.values:
                raise ConfigError(f"{form}{nearest(text, self.values)}")
            return text
        try:
            value = self._number(text)
        except (ValueError, OverflowError):
            raise ConfigError(f"{form}: it needs a number") from None
        low, high = map(float, self.values)
        if not low <= value <= high or value != float(text):
            raise ConfigError(f"{form}: it needs a {'whole ' * ('int' in self.kind)}number from {low:g} to {high:g}")
        return value

    def _number(self, text: str) -> float | int:
        return int(float(text)) if "int" in self.kind else float(text)


def word_of(value: Any) -> str:
    """A value as on the command line."""
    return f"{value:.{_DIGITS}g}" if isinstance(value, float) else str(value)


def read_domain(name: str, text: str) -> Domain:
    """The domain of a word such as search.algo.learning_rate=loguniform(1e-5,1e-2).

    Raises:
        ConfigError: it is none; the message names the word and the form.
    """
    match = _FORM.fullmatch(text)
    kind = match[1] if match else ""
    if not match or kind not in _KINDS:
        raise ConfigError(
            f"{name}={text:.200} needs one of uniform(LOW,HIGH), loguniform(LOW,HIGH), int(LOW,HIGH), logint(LOW,HIGH) "
            f"and choice(VALUE,VALUE,...){nearest(kind, _KINDS) if kind else ''}"
        )
    values = split_values(match[2])
    if kind == "choice":
        if "" in values or len(set(values)) < max(2, len(values)):
            raise ConfigError(f"{name}={text:.200} needs two or more different values")
        return Domain(kind, values)
    try:
        low, high = map(float, values)
    except ValueError:
        raise ConfigError(f"{name}={text:.200} needs two numbers, {kind}(LOW,HIGH)") from None
    if not low < high or not math.isfinite(low + high) or ("log" in kind and low <= 0):
        raise ConfigError(f"{name}={text:.200} needs LOW < HIGH{', both above 0' if 'log' in kind else ''}")
    if "int" in kind and (low != int(low) or high != int(high)):
        raise ConfigError(f"{name}={text:.200} needs whole numbers")
    return Domain(kind, values)


def read_space(words: Mapping[str, str]) -> dict[str, Domain]:
    """The domains of all search.KEY= by key; raises ConfigError for a wrong one."""
    names = [name for name in words if name.startswith(SEARCH)]
    space = {name.removeprefix(SEARCH): read_domain(name, words[name]) for name in names}
    for key in space:
        if not key or key in words or key == "seed":
            what = f"{key}={words[key]} and search.{key}" if key in words else f"search.{key}"
            raise ConfigError(f"{what} cannot be in one study; remove one of them, or search another key")
    return space


def check_examples(space: Mapping[str, Domain], check: Callable[[Mapping[str, str]], Any]) -> list[Any]:
    """What `check` gives for words that reach each bound and each choice of the space; it raises ConfigError."""
    columns = [(key, each.examples()) for key, each in space.items()]
    n = max(len(values) for _, values in columns)
    return [check({key: values[min(i, len(values) - 1)] for key, values in columns}) for i in range(n)]
