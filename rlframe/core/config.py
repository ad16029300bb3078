"""Fields of config classes: numbers with their range, choices, and lists written as [64,64]."""

import difflib
import math
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from numbers import Integral, Real
from types import UnionType
from typing import Any, Union, get_args, get_origin

import chz
from chz.factories import MetaFactory, MetaFromString
from chz.tiepin import CastError, _simplistic_try_cast

from rlframe.core.errors import ConfigError, qualified_name, shortened


class plain_value(MetaFactory):
    """Parses a field's text as a plain value. chz would also import module:name or evaluate a lambda."""

    def unspecified_factory(self) -> Callable[..., Any] | None:
        return None

    def from_string(self, factory: str) -> Callable[..., Any]:
        raise MetaFromString(f"{factory!r} is a plain value")

    def perform_cast(self, value: str) -> Any:
        try:
            return _simplistic_try_cast(value, self.field_annotation)
        except CastError:
            if self.field_annotation is bool:
                raise CastError("write true or false") from None
            if self.field_annotation is float and value.endswith(")"):
                raise CastError("this number is the same for the whole run; it cannot be a schedule") from None
            if self.field_annotation is float:
                raise CastError(_not_a_number(value, {"k": 1e3, "min": 60, "h": 3600})) from None
            raise


Check = Callable[[Any, str], None]  # of a config and the name of its field; raises ConfigError


def plain_field(default: Any, doc: str, check: Check, cast: Callable[[str], Any] | None = None) -> Any:
    """A field of plain values; `cast` reads their text, without one the field's type says how."""
    return chz.field(meta_factory=plain_value(), default=default, doc=doc, blueprint_cast=cast, validator=check)


def several_hint(text: str) -> str:
    """A remedy where the values of several runs stand in the place of one; empty elsewhere."""
    return "; values of several runs are written sweep.KEY=1,2,3" if "," in text and "(" not in text else ""


def _not_a_number(text: str, units: Mapping[str, float]) -> str:
    """With the number to write, if it is one with a unit, or with commas, as people say it."""
    text = text.strip()
    bare = text.replace(",", "") if re.fullmatch(r"[1-9]\d{0,2}(,\d{3})+", text) else text
    found = re.fullmatch(r"(\d+\.?\d*)([a-z]*)", bare.lower())
    number = float(found[1]) * units.get(found[2], bare != text) if found else 0.0
    remedy = f"; write {number:_.0f}" if number and number.is_integer() else several_hint(text)
    return f"{text!r} is not a number{remedy}"


def _count(text: str) -> int:
    with suppress(ValueError):
        return int(text)  # exact, where a float is not
    try:
        value = float(text.replace("_", ""))
    except ValueError:
        raise CastError(_not_a_number(text, {"k": 1e3, "m": 1e6})) from None
    if not value.is_integer():
        raise CastError(f"{text!r} is not a whole number")
    return int(value)


def cast(key: str, text: str, kind: Any) -> Any:
    """The value of a word key=text of a command line, of a type such as int, bool or tuple[int, ...].

    Raises:
        ConfigError: it is none.
    """
    origin = get_origin(kind)
    if (origin in (tuple, list) or kind is tuple) and text[:1] + text[-1:] in ("[]", "()"):
        text = text[1:-1]
    try:
        if kind is int:
            return _count(text)
        with suppress(CastError):
            if origin in (Union, UnionType) and int in get_args(kind):  # int | None
                return _count(text)
        return _simplistic_try_cast(text, kind)
    except CastError as error:
        raise ConfigError(f"{key}={text!r}: {'write true or false' if kind is bool else error}") from None


AUTO = -1  # value of a field that is `auto`
_LARGEST = 2**53  # of a count: larger whole numbers are not exact when written as 1e20
_LARGEST_FLOAT = 3.4028234663852886e38  # of a number: tensors are float32
_MAX_NAME = 200
_QUOTED = re.compile(r"(?<![^\s,(\[{:=])(?:'[^']*'|\"[^\"]*\")")  # it's has no quote that begins
_SIMILAR, _PIECE = 0.6, 4  # least similarity of names that are suggested, and letters of a piece
_KEYS = {  # what comes before the name of a field on the command line, by the package of its config
    "rlframe.algos": "algo.",
    "rlframe.rewards": "reward.bonus.",
    "rlframe.envs.options": "env.",
    "rlframe.exploration": "algo.explore.",
    "rlframe.models": "model.",
    "rlframe.models.base.CriticConfig": "model.critic.",
    "rlframe.optimizers": "algo.optimizer.",
    "rlframe.replay": "algo.replay.",
    "rlframe.runners": "runner.",
    "rlframe.runners.league": "agents.league.",
    "rlframe.samplers": "sampler.",
    "rlframe.evaluation": "eval.",
}


def key_of(config: Any, name: str) -> str:
    """The key of a field on the command line; its name alone in a config of the user's own, unless it inherits ours."""
    classes = [(each.__module__, each.__name__) for each in type(config).__mro__]
    places = [place for module, cls in classes for place in (f"{module}.{cls}", module, module.rpartition(".")[0])]
    return next((_KEYS[place] for place in places if place in _KEYS), "") + name.removeprefix("X_")  # chz adds X_


def split_values(text: str) -> tuple[str, ...]:
    """Split at commas outside of brackets and quotes: `[64,64],[256,256]` are two values."""
    values, depth = [""], 0
    quoted = {i for match in _QUOTED.finditer(text) for i in range(*match.span())}
    for i, character in enumerate(text):
        if i not in quoted:
            depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0 and i not in quoted:
            values.append("")
        else:
            values[-1] += character
    return tuple(value.strip() for value in values)


def entries_of(text: str) -> list[str]:
    """The entries of a list: a,b or [a,b] or (a,b). Raises ValueError if it has lists in it, or empty entries."""
    inside = text.strip()
    if inside[:1] + inside[-1:] in ("[]", "()"):
        inside = inside[1:-1]
    entries = list(split_values(inside))
    entries = entries if entries[-1] else entries[:-1]
    if "" in entries or any("[" in name or "]" in name for name in (entry.partition("(")[0] for entry in entries)):
        raise ValueError
    return entries


def within(
    low: float,
    high: float,
    above: bool = False,
    infinite: bool = False,
    nan: bool = False,
    numbers_of: Callable[[Any], tuple[float, ...]] = lambda given: given if isinstance(given, tuple) else (given,),
    below: bool = False,
    kind: type = Real,
) -> Check:
    """A validator of a number, or of each of several, from `low` to `high`; `infinite`, `nan`: also inf, nan.

    `above`, `below`: not `low`, not `high` itself. `kind`: Integral for whole numbers.
    """
    least = f"above {low:g}" if above else f"at least {low:g}"
    span = f"{least} and below {high:g}" if below else f"from {low:g} to {high:g}"
    span = f"{least} and at most {high:g}" if above else span
    text = "a number" if low == -math.inf else least if high in (_LARGEST, math.inf) else span
    text += ", or inf" * infinite + ", or nan" * nan or " and finite" * (high == math.inf)

    def check(config: Any, name: str) -> None:
        given = getattr(config, name)
        for value in numbers_of(given):
            if not isinstance(value, kind):
                raise ConfigError(f"{key_of(config, name)}={given!r} must be a {'whole ' * (kind is Integral)}number")
            inside = abs(value) <= _LARGEST_FLOAT and (low < value if above else low <= value)
            inside = inside and (value < high if below else value <= high)
            if not (inside or (infinite and value == math.inf) or (nan and math.isnan(value))):
                shown = list(given) if isinstance(given, tuple) else given
                limit = text
                if high == _LARGEST < value:
                    limit = f"at most {_LARGEST:,}; larger numbers are not exact"
                elif low <= value <= high and _LARGEST_FLOAT < abs(value) < math.inf:
                    limit = f"from {-_LARGEST_FLOAT:.2g} to {_LARGEST_FLOAT:.2g}, the range of float32"
                raise ConfigError(f"{key_of(config, name)}={shown} must be {limit}")

    return check


def count(default: int, doc: str, low: int | None = None, high: int = _LARGEST) -> Any:
    """A field for a whole number that may be written 1e6 or 1_000_000: at least `low`, by default min(default, 1)."""
    check = within(min(default, 1) if low is None else low, high, kind=Integral)
    return plain_field(default, doc, check, _count)


def _count_or_auto(text: str) -> int:
    return AUTO if text == "auto" else _count(text)


def count_or_auto(doc: str, default: int = AUTO) -> Any:
    """A field for a whole number or `auto`, which is resolved once the hardware is known."""
    return _or_auto(default, doc, _count_or_auto, within(0, _LARGEST, kind=Integral))


def _number_or_auto(text: str) -> float:
    if text == "auto":
        return AUTO
    try:
        value = float(text)
    except ValueError:
        raise CastError(f"{text!r} is neither a number nor auto") from None
    if value == AUTO:
        raise CastError(f"{text} is no fraction; write auto")
    return value


def fraction_or_auto(default: float, doc: str) -> Any:
    """A field for a number from 0 to 1 or `auto`, which is resolved with the experiment."""
    return _or_auto(default, doc, _number_or_auto, within(0, 1))


def _or_auto(default: float, doc: str, cast: Callable[[str], float], in_range: Check) -> Any:
    def check(config: Any, name: str) -> None:
        if getattr(config, name) != AUTO:
            in_range(config, name)

    return plain_field(default, doc, check, cast)


def accepts_auto(field: Any) -> bool:
    """Whether a field of a chz class takes `auto`."""
    return field._blueprint_cast in (_count_or_auto, _number_or_auto)


def option(default: Any, doc: str) -> Any:
    """A field with its documentation; one that is annotated with str or bool takes nothing else."""

    def check(config: Any, name: str) -> None:
        value, field = getattr(config, name), chz.chz_fields(config)[name.removeprefix("X_")]
        if field.final_type is str and not isinstance(value, str):
            by_name = f' such as "{qualified_name(value)}"' if isinstance(value, type) else ""
            raise ConfigError(f"{key_of(config, name)}={shortened(repr(value), 60)} must be text{by_name}: {doc}")
        if field.final_type is bool and not isinstance(value, bool):
            raise ConfigError(f"{key_of(config, name)}={shortened(repr(value), 60)} must be True or False: {doc}")

    return plain_field(default, doc, check)


def number(default: float, doc: str, low: float = 0.0, infinite: bool = False, high: float = math.inf) -> Any:
    """A field for a number from `low` to `high`; NaN only if that is the default; `infinite`, or so too, also inf."""
    check = within(low, high, infinite=infinite or default == math.inf, nan=math.isnan(default))
    return plain_field(default, doc, check)


def positive(default: float, doc: str, infinite: bool = False) -> Any:
    """A field for a number above 0; `infinite`, or with such a default, also inf; with a default of nan also nan."""
    check = within(0.0, math.inf, above=True, infinite=infinite or default == math.inf, nan=math.isnan(default))
    return plain_field(default, doc, check)


def _list_of(kind: type, described: str) -> Callable[[str], tuple[Any, ...]]:
    """A cast of text to a tuple of values of a kind; a CastError says what it should be."""

    def cast(text: str) -> tuple[Any, ...]:
        try:
            return tuple(map(kind, entries_of(text)))
        except ValueError:
            raise CastError(f"{text!r} is not a list of {described}") from None

    return cast


_sizes = _list_of(int, "whole numbers such as [64,64]")
_names = _list_of(str, "names such as [a,b]")
_decays = _list_of(float, "numbers such as [0.9,0.999]")


def sizes(default: tuple[int, ...], doc: str) -> Any:
    """A field for a list of whole numbers, written [64,64]."""
    inside = within(1, _LARGEST, kind=Integral)

    def check(config: Any, name: str) -> None:
        if not isinstance(given := getattr(config, name), tuple):
            raise ConfigError(f"{key_of(config, name)}={given!r} must be a tuple of whole numbers such as (64, 64)")
        inside(config, name)

    return plain_field(default, doc, check, _sizes)


def names(default: tuple[str, ...], doc: str) -> Any:
    """A field for a list of names, written [a,b] or a,b."""

    def check(config: Any, name: str) -> None:
        given = getattr(config, name)
        if isinstance(given, str) or not all(isinstance(each, str) for each in given):
            raise ConfigError(f"{key_of(config, name)}={shortened(repr(given), 60)} must be a tuple of names: {doc}")

    return plain_field(default, doc, check, _names)


def choice(default: str, choices: tuple[str, ...], doc: str) -> Any:
    """A field for one of a few names; any other name is an error that lists them."""

    def check(config: Any, name: str) -> None:
        check_one_of(key_of(config, name), getattr(config, name), choices)

    return plain_field(default, f"{' | '.join(choices)}: {doc}", check)


def true_or_auto(doc: str) -> Any:
    """A field for true, false or auto, the default."""

    def check(config: Any, name: str) -> None:
        if not isinstance(value := getattr(config, name), bool) and value != "auto":
            raise ConfigError(f"{key_of(config, name)}={shortened(repr(value), 60)} must be true, false or auto")

    return plain_field("auto", doc, check)


def fraction(default: float, doc: str, above: bool = False) -> Any:
    """A field for a number from 0 to 1; `above`: not 0 itself."""
    return plain_field(default, doc, within(0, 1, above))


def below_one(default: float, doc: str) -> Any:
    """A field for a number from 0 to below 1."""
    return plain_field(default, doc, within(0, 1, below=True))


def decays(default: tuple[float, ...], doc: str) -> Any:
    """A field for a list of numbers from 0 to below 1, as many as in `default`, written [0.9,0.999]."""
    inside = within(0, 1, below=True)

    def check(config: Any, name: str) -> None:
        given = getattr(config, name)
        if len(given) != len(default):
            raise ConfigError(
                f"{key_of(config, name)}={list(given)} must be {len(default)} numbers such as {list(default)}"
            )
        inside(config, name)

    return plain_field(default, doc, check, _decays)


def check_one_of(key: str, value: Any, known: Iterable[str]) -> None:
    """Raise ConfigError, with the nearest of these names, unless the value of a key is one of them."""
    if value not in (names := tuple(known)):
        hint = nearest(getattr(value, "__name__", str(value)), names)
        raise ConfigError(f"{key}={shortened(repr(value), 60)} is not one of {', '.join(names)}{hint}")


def nearest(name: str, known: Any) -> str:
    """`; did you mean ...?` with up to three names that are similar or that it abbreviates, or an empty string."""
    if len(name) > _MAX_NAME:  # the search takes time with the square of the length
        return ""
    scores = {str(each): _similarity(name.lower(), str(each).lower()) for each in known}
    similar = [each for each in scores if each.lower() == name.lower()]
    similar = similar or [each for each in scores if scores[each] >= _SIMILAR]
    matches = sorted(similar, key=lambda each: (-scores[each], each[:1] != name[:1]))[:3]
    return f"; did you mean {' or '.join(matches)}?" if matches else ""


def _similarity(name: str, other: str) -> float:
    """How near a name is to another: 1 if it is short for it, and high if most of it is one piece of it."""
    if len(name) > 1 and _is_short_for(re.sub(r"[\W_]", "", name), re.split(r"[\W_]+", other)):
        return 1.0
    matcher = difflib.SequenceMatcher(None, other, name)
    piece = matcher.find_longest_match().size
    return max(matcher.ratio(), piece / len(name) if piece >= _PIECE else 0.0)


def _is_short_for(name: str, words: list[str]) -> bool:
    """Whether it is a beginning of the first word, of the second, and so on: ou, or param_noise without the line."""
    if not name or not words:
        return not name
    lengths = range(1, len(name) + 1)
    return any(words[0].startswith(name[:n]) and _is_short_for(name[n:], words[1:]) for n in lengths)
