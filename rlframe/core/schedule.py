"""Schedules: numbers that change with env_steps, written linear(3e-4,3e-5), and fields of configs that take them.

A schedule is a pure function of env_steps counted over all ranks, so it does not depend on `world_size`, and a resumed
run goes on with it.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import chz
from chz.mungers import Munger
from chz.tiepin import CastError

from rlframe.core.config import key_of, nearest, plain_value, several_hint, within
from rlframe.core.errors import ConfigError

_FORMS = {  # of the text, by kind
    "linear": "linear(first,last) or linear(first,last,end)",
    "cosine": "cosine(first,last) or cosine(first,last,end)",
    "exponential": "exponential(first,last) or exponential(first,last,end)",
    "piecewise": "piecewise(0:value,place:value,...)",
}


@dataclass(frozen=True)
class Curve:
    """A number by env_steps: interpolated between points, and constant before the first and after the last.

    From a to b, with f the part of the way from 0 to 1: linear and piecewise a + f (b - a); cosine
    b + (a - b) (1 + cos πf) / 2 (Loshchilov & Hutter 2017, arXiv 1608.03983, eq. 5); exponential a^(1 - f) b^f.
    """

    kind: str
    places: tuple[float, ...]  # env_steps over all ranks, ascending; at two equal ones the number jumps
    values: tuple[float, ...]

    def __call__(self, env_steps: float) -> float:
        """The number at `env_steps`."""
        if len(self.values) == 1:
            return self.values[0]
        i = bisect_right(self.places, env_steps)
        if i in (0, len(self.places)):
            return self.values[max(i - 1, 0)]
        a, b = self.values[i - 1], self.values[i]
        f = (env_steps - self.places[i - 1]) / (self.places[i] - self.places[i - 1])
        match self.kind:
            case "cosine":
                return b + (a - b) * (1 + math.cos(math.pi * f)) / 2
            case "exponential":
                return a ** (1 - f) * b**f
        return a + f * (b - a)


@dataclass(frozen=True)
class Schedule:
    """A schedule as it was written, before the length of the run is known; `parse` makes it."""

    text: str
    kind: str
    places: tuple[float, ...]  # env_steps if above 1, else a part of the run
    values: tuple[float, ...]

    def __str__(self) -> str:
        return self.text

    def over(self, n_steps: float) -> Curve:
        """This schedule in a run of `n_steps` env_steps.

        Raises:
            ValueError: n_steps <= 0.
        """
        if n_steps <= 0:
            raise ValueError(f"n_steps={n_steps} of a schedule must be > 0 env_steps; use a longer run")
        return Curve(self.kind, tuple(x if x > 1 else x * n_steps for x in self.places), self.values)

    @classmethod
    def parse(cls, text: str) -> Schedule:
        """Read linear(a,b), cosine(a,b), exponential(a,b), each with an end as third argument, or piecewise(x:a,...).

        Ends and places are env_steps if above 1, else a part of the run; the default end is that of the run.

        Raises:
            ValueError: the text is not of this form, or a number is out of range.
        """
        name, bracket, inside = text.strip().partition("(")
        kind = name.strip()
        if not bracket or not inside.endswith(")"):
            raise ValueError(
                f"{text!r} is neither a number nor a schedule such as linear(3e-4,3e-5){several_hint(text)}"
            )
        if kind not in _FORMS:
            raise ValueError(f"{kind!r} is not a schedule ({', '.join(_FORMS)}){nearest(kind, _FORMS)}")
        places, values = _points(kind, inside[:-1].split(","))
        _check_places(kind, places)
        if kind == "exponential" and not min(values) > 0:
            raise ValueError(f"{text}: an exponential schedule needs numbers above 0; use linear or cosine")
        return cls(text.strip(), kind, tuple(places), tuple(values))


def _points(kind: str, arguments: Sequence[str]) -> tuple[list[float], list[float]]:
    """Places and values of the arguments of a schedule."""
    if kind == "piecewise":
        pairs = [argument.split(":") for argument in arguments]
        if any(len(pair) != 2 for pair in pairs):
            raise ValueError(f"write {_FORMS[kind]}")
        return [_number(place) for place, _ in pairs], [_number(value) for _, value in pairs]
    if len(arguments) not in (2, 3):
        raise ValueError(f"write {_FORMS[kind]}")
    first, last, *end = map(_number, arguments)
    if end and end[0] <= 0:
        raise ValueError(f"the end {end[0]:g} of a schedule must be above 0: env_steps, or a part of the run up to 1")
    return [0.0, *(end or [1.0])], [first, last]


def _check_places(kind: str, places: Sequence[float]) -> None:
    if places[0] < 0 or list(places) != sorted(places):
        raise ValueError(f"the places {', '.join(f'{x:g}' for x in places)} of a schedule must ascend from 0 on")
    if parts := [x for x in places if x > 1 and not x.is_integer()]:
        raise ValueError(
            f"the place {parts[0]:g} of a schedule is neither a part of the run, up to 1, nor a whole number of "
            f"env_steps"
        )
    if kind == "piecewise" and places[-1] > 1 and any(0 < x <= 1 for x in places):
        raise ValueError("the places of a schedule must be all env_steps, or all parts of the run up to 1")


def _number(text: str) -> float:
    try:
        value = float(text.replace("_", ""))
    except ValueError:
        raise ValueError(f"{text.strip()!r} is not a number") from None
    if not math.isfinite(value):
        raise ValueError(f"{text.strip()} in a schedule must be finite")
    return value


Scheduled = float | str | Schedule  # a field of a config that takes schedules; text only where it is written


def curve(value: Scheduled, n_steps: float) -> Curve:
    """A number or schedule in a run of `n_steps` env_steps."""
    read = read_scheduled(value)
    return read.over(n_steps) if isinstance(read, Schedule) else Curve("linear", (0.0,), (read,))


def at_last(value: Scheduled) -> float:
    """A number, or the last one of a schedule."""
    read = read_scheduled(value)
    return read.values[-1] if isinstance(read, Schedule) else read


def read_scheduled(value: Scheduled) -> float | Schedule:
    """A number, or the schedule that text says.

    Raises:
        ValueError: the text is neither.
    """
    if not isinstance(value, str):
        return value
    try:
        return float(value.replace("_", ""))
    except ValueError:
        return Schedule.parse(value)


def scheduled(
    default: Scheduled,
    doc: str,
    low: float = 0.0,
    high: float = math.inf,
    above: bool = False,
    infinite: bool = False,
    ends_at_low: bool = False,
) -> Any:
    """A field for a number, or a schedule of it, from `low` to `high`.

    Args:
        above: low itself is not allowed; `ends_at_low`: but as the last number of a schedule.
        infinite: a constant may also be inf, as if the default is; nan only if that is.
    """

    def numbers_of(value: Any) -> tuple[float, ...]:
        given = read_scheduled(value)  # of the field as it was set
        if not isinstance(given, Schedule):
            return (given,)
        return given.values[:-1] if ends_at_low and given.values[-1] == low else given.values

    check = within(low, high, above, infinite or default == math.inf, default != default, numbers_of)
    return chz.field(
        meta_factory=plain_value(),
        default=read_scheduled(default),
        doc=doc,
        munger=_ReadScheduled(),
        blueprint_cast=_cast,
        validator=check,
    )


def accepts_schedule(field: Any) -> bool:
    """Whether a field of a chz class is a `scheduled` one."""
    return field._blueprint_cast is _cast


def _cast(text: str) -> float | Schedule:
    try:
        return read_scheduled(text)
    except ValueError as error:
        raise CastError(str(error)) from None


class _ReadScheduled(Munger):
    """Reads the text of a field that is set in Python."""

    def __call__(self, value: Any, *, chzself: Any = None, field: Any = None) -> Any:
        try:
            return read_scheduled(value)
        except ValueError as error:
            raise ConfigError(f"{key_of(chzself, field.logical_name)}={value}: {error}") from None
