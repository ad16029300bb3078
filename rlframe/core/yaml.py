"""YAML of plain values: settings, and values that are passed on, such as env_kwargs, among which 1e-5 is a number."""

import math
import operator
import re
from collections.abc import Mapping
from typing import Any

import yaml

KWARGS = r"(?:[^.]+\.)*?(?:env_)?kwargs"  # a key whose value is passed on, and all below it
_OF_KWARGS = re.compile(rf"{KWARGS}(?:\..*)?")
_MAX_YAML, _MAX_DEPTH = 1 << 17, 100  # characters, and lists or mappings within one another
_TAGS = _TUPLE, _NOT_FINITE, _PAIRS = "!tuple", "!float", "!pairs"  # alone in a mapping, of what JSON does not have

# YAML 1.1 takes 1e-5, which JSON and Python write, for text, and does not know JSON's names of what is not finite.
# Settings keep such text, as names of runs do; among values that are passed on, such as env_kwargs, it is a number.
_FLOAT = "tag:yaml.org,2002:float"
_MORE_FLOATS = re.compile(r"(?:[-+]?(?:\d+\.?\d*|\.\d+)[eE][-+]?\d{1,3}|-?Infinity|NaN)$")


class _PlainLoader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]  # in C, ten times as fast
    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        twice = next((key for n, key in enumerate(keys) if key in keys[:n]), None)
        if twice is not None:
            raise yaml.YAMLError(f"line {node.start_mark.line + 1} and below: the key {twice} is there twice")
        for key, value in node.value:
            if _OF_KWARGS.fullmatch(str(key.value)):
                _tag_floats(value)
        return super().construct_mapping(node, deep)


def _tag_floats(node: Any) -> None:
    """Tag the texts without quotes in a YAML node that are numbers in JSON and Python."""
    if isinstance(node, yaml.ScalarNode):
        node.tag = _FLOAT if not node.style and _MORE_FLOATS.match(node.value) else node.tag
    for part in node.value if isinstance(node, yaml.CollectionNode) else ():
        _tag_floats(part[1] if isinstance(part, tuple) else part)


class _ValueLoader(_PlainLoader):
    """Of values that are passed on."""


class _ValueDumper(yaml.SafeDumper):
    """Writes what _ValueLoader reads."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_str(self, data: str) -> Any:
        """Text of several lines with escapes, in one; YAML itself reads some ends of lines as others."""
        node = super().represent_str(data)
        node.style = '"' if data and data.splitlines() != [data] else node.style
        return node


_ValueDumper.add_representer(str, _ValueDumper.represent_str)

for _each in (_ValueLoader, _ValueDumper):
    _each.add_implicit_resolver(_FLOAT, _MORE_FLOATS, list("+-.0123456789IN"))


def is_passed_on(key: str) -> bool:
    """Whether the values of a key are passed on to environments or parts of the user's own."""
    return bool(_OF_KWARGS.fullmatch(key))


def to_json(value: Any) -> Any:
    """A value that is passed on, in JSON from which `from_json` makes the same: tuples, inf, keys that are no text."""
    match value:
        case float() if not math.isfinite(value):
            return {_NOT_FINITE: str(float(value))}
        case tuple():
            return {_TUPLE: [to_json(each) for each in value]}
        case list():
            return [to_json(each) for each in value]
        case Mapping() if all(isinstance(key, str) and key not in _TAGS for key in value):
            return {key: to_json(each) for key, each in value.items()}
        case Mapping():
            return {_PAIRS: [[to_json(key), to_json(each)] for key, each in value.items()]}
    return value


def from_json(value: Any) -> Any:
    """The inverse of `to_json`; a value that holds none of its forms is itself. Raises ValueError for wrong ones."""
    if type(value) not in (dict, list):
        return value
    try:
        match value:
            case list():
                items = [from_json(each) for each in value]
                return value if all(map(operator.is_, items, value)) else items
            case {"!tuple": items} if len(value) == 1:
                return tuple(from_json(each) for each in items)
            case {"!float": text} if len(value) == 1:
                return float(text)
            case {"!pairs": pairs} if len(value) == 1:
                return {from_json(key): from_json(each) for key, each in pairs}
        found = {key: from_json(each) for key, each in value.items()}
        return value if all(found[key] is value[key] for key in value) else found
    except (TypeError, ValueError):
        raise ValueError(f"{value!s:.100} has one of {', '.join(_TAGS)}, but not as params.json writes it") from None


def parse_value(text: str) -> Any:
    """As `parse_yaml`, for a value that is passed on: also what JSON and Python write, such as 1e-5, is a number."""
    return parse_yaml(text, _ValueLoader)


def format_value(value: Any) -> str:
    """One line that `parse_value` reads as the same. Raises ValueError of what is not plain: None, numbers, texts..."""
    try:
        text: str = yaml.dump(
            value, Dumper=_ValueDumper, default_flow_style=True, allow_unicode=True, width=math.inf, sort_keys=False
        )
    except yaml.YAMLError as error:
        raise ValueError(f"{error.args[-1]!s:.100} is not a number, text, list or dict of them") from None
    return text.removesuffix("\n").removesuffix("\n...")


def parse_yaml(text: str, loader: type = _PlainLoader) -> Any:
    """The plain values of YAML text without aliases. Raises ValueError if it is not valid, too long or too deep."""
    if len(text) > _MAX_YAML:
        raise ValueError(f"it has {len(text):,} characters, more than the limit of {_MAX_YAML:,}")
    try:
        _check_plain(text)
        return yaml.load(text, loader)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None


def _check_plain(text: str) -> None:
    """Raise YAMLError for an alias, and before the loader would follow what is nested too deeply."""
    depth = 0
    for event in yaml.parse(text, _PlainLoader):
        if isinstance(event, yaml.AliasEvent):
            mark: Any = event.start_mark
            where = f"an alias in line {mark.line + 1}"
            raise yaml.YAMLError(f"{where}: aliases may grow endlessly, so write the value out")
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > _MAX_DEPTH:
            raise yaml.YAMLError("it is nested too deeply")
