"""What launch's --help, --show and --list print: the keys of an experiment, where values come from, and all parts."""

from __future__ import annotations

import ast
import inspect
import shutil
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import chz
import gymnasium

from rlframe.core.config import AUTO, accepts_auto, nearest
from rlframe.core.errors import ConfigError, printable
from rlframe.core.field_effects import idle_fields
from rlframe.core.parts import GROUPS, Part, kinds_of, module_names, named_values
from rlframe.core.schedule import accepts_schedule
from rlframe.envs import pettingzoo
from rlframe.envs.atari import register_atari
from rlframe.envs.make import gives_raw_frames
from rlframe.experiment.agents import without_policy
from rlframe.experiment.config import Experiment
from rlframe.experiment.presets import load_preset, preset_names
from rlframe.experiment.settings import long_keys
from rlframe.models import ModelConfig

_LEAST_WIDTH, _MOST_WIDTH = 80, 160  # characters of a line
_COLUMN = 40  # where meanings begin
_MAPPING = "name=value"
_TYPES: Mapping[Any, str] = {
    int: "whole number",
    float: "number",
    bool: "true|false",
    str: "text",
    bool | str: "true|false|auto",
}


@dataclass(frozen=True)
class Key:
    """A key of the command line."""

    name: str
    kind: str  # of its values
    value: str  # as the command line reads it
    doc: str
    part: Part | None = None


def keys_of(config: Any, prefix: str = "") -> Iterator[Key]:
    """Every key of an experiment or another config, in the order of its fields, with the value that it has there."""
    for key, value, field in named_values(config, prefix):
        if field.part:
            yield Key(key, "part", str(value), field.chz._doc, field.part)
        else:
            kind = "number or schedule" if accepts_schedule(field.chz) else _TYPES.get(field.chz.final_type, "list")
            kind = _MAPPING if isinstance(value, Mapping) else kind
            yield Key(key, kind, as_typed(value, accepts_auto(field.chz)), field.chz._doc)


def idle_keys(config: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Keys that do nothing beside the value of another key; and that other key."""
    for name, other in idle_fields(config).items():
        yield f"{prefix}{name}", f"{prefix}{other}"
    for name in chz.chz_fields(config):
        key, value = f"{prefix}{name}", getattr(config, name)
        below = {f".{inside}": each for inside, each in value.items()} if isinstance(value, Mapping) else {"": value}
        for inside, each in below.items():
            if chz.is_chz(each):
                yield from idle_keys(each, f"{GROUPS.get(key, key)}{inside}.")


def as_typed(value: Any, may_be_auto: bool = False) -> str:
    """A value as it is written on the command line."""
    if may_be_auto and value == AUTO:
        return "auto"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return repr(value).removesuffix(".0")
    if isinstance(value, (tuple, list)):
        return f"[{','.join(map(str, value))}]"
    if isinstance(value, Mapping):
        return printable(f"{{{', '.join(f'{name}: {each}' for name, each in value.items())}}}")
    return printable(str(value))  # it may come from another person's run


def describe_keys(experiment: Experiment) -> str:
    """For --help: every key with its value and its meaning, by part."""
    lines, width, section = [], _width(), ""
    for key in keys_of(experiment):
        head = key.name.partition(".")[0]
        of = head if key.part or "." in key.name else ""
        if of != section:
            section = of
            lines.append("")
        if key.part:
            part = f"{key.name}={key.value}: "
            lines += _wrapped(part + _title_of(key.part, key.value).removeprefix(part), "", width)
        else:
            left = f"  {key.name}={key.value}".ljust(_COLUMN - 1)
            lines += _wrapped(f"{left} {key.doc} ({key.kind})", " " * _COLUMN, width)
    return "\n".join(lines[1:])


def show_keys(experiment: Experiment, sources: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """For --show: every key with its value and where that comes from: the first of `sources` that has it.

    What a policy has not of its own comes from the run's key.
    """
    keys, sources = [*keys_of(experiment)], [(name, long_keys(given)) for name, given in sources]
    longest = max(len(f"{key.name}={key.value}") for key in keys)
    values, lines = {key.name: key.value for key in keys}, []
    for key in keys:
        source, plain = _source_of(key, sources), without_policy(key.name)
        if source == "default" and plain != key.name and values.get(plain) == key.value:
            inherited = _source_of(replace(key, name=plain), sources)
            source = f"{inherited}, {plain}" if inherited != "default" else source
        lines.append(f"{f'{key.name}={key.value}'.ljust(longest)}  {source}")
    return "\n".join(lines)


def _source_of(key: Key, sources: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    return next((name for name, given in sources if _has(given, key)), "default")


def _has(given: Mapping[str, Any], key: Key) -> bool:
    return key.name in given or (key.kind == _MAPPING and any(name.startswith(f"{key.name}.") for name in given))


def _title_of(part: Part, name: str) -> str:
    found = part.find(name)
    if found in kinds_of(part.package).values():
        return (inspect.getdoc(found) or "").partition("\n")[0]
    return _title(Path(inspect.getfile(found)))


def _title(file: Path) -> str:
    """The first line of a Python file, which says what it holds."""
    text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    return text.partition("\n")[0]


def _wrapped(text: str, indent: str, width: int) -> list[str]:
    wrapper = textwrap.TextWrapper(width, break_long_words=False, break_on_hyphens=False, subsequent_indent=indent)
    return wrapper.wrap(text)


def _width() -> int:
    return min(max(shutil.get_terminal_size().columns, _LEAST_WIDTH), _MOST_WIDTH)


def _kinds(package: str) -> list[tuple[str, str]]:
    return [(name, _title_of(Part(package, name), name)) for name in module_names(package)]


def _presets() -> list[tuple[str, str]]:
    configs = [(name, load_preset(name)) for name in preset_names()]
    return [(name, f"{config.get('algo')} on {config.get('env')}") for name, config in configs]


def _envs() -> list[tuple[str, str]]:
    """The ids that Gymnasium and PettingZoo know here, without raw frames, and where each comes from."""
    register_atari()
    known = [spec for spec in gymnasium.registry.values() if not gives_raw_frames(spec)]
    found = [(spec.id, str(spec.vector_entry_point or spec.entry_point).partition(":")[0]) for spec in known]
    return sorted([*found, *((id_, "pettingzoo, of several agents") for id_ in pettingzoo.known())])


def _models() -> list[tuple[str, str]]:
    return [(key.name, f"{key.value} by default: {key.doc}") for key in keys_of(ModelConfig(), "model.")]


def _encoders() -> list[tuple[str, str]]:
    return [
        ("auto", "nature for images of 36 pixels a side and more, impala for smaller ones, mlp for vectors"),
        ("mlp", "fully connected layers of the widths model.hidden"),
        ("nature", "three convolutions (Mnih et al. 2015), for images"),
        ("impala", "three stages of residual blocks (Espeholt et al. 2018), for images"),
        ("hadamax", "three stages of products of two convolutions (Kooi et al. 2025), for images"),
        ("module:Class", "an nn.Module of your own, also ./file.py:Class"),
    ]


KINDS: Mapping[str, Callable[[], list[tuple[str, str]]]] = {
    "algos": lambda: _kinds("rlframe.algos"),
    "envs": _envs,
    "presets": _presets,
    "bonuses": lambda: _kinds("rlframe.rewards"),
    "optimizers": lambda: _kinds("rlframe.optimizers"),
    "explorations": lambda: _kinds("rlframe.exploration"),
    "samplers": lambda: _kinds("rlframe.samplers"),
    "runners": lambda: _kinds("rlframe.runners"),
    "models": _models,
    "encoders": _encoders,
}


def list_parts(kind: str) -> str:
    """For --list: the names of a kind of part, and what each is.

    Raises:
        ConfigError: there is no such kind.
    """
    if kind not in KINDS:
        raise ConfigError(f"--list {kind}: use one of {', '.join(KINDS)}{nearest(kind, KINDS)}")
    found, width = KINDS[kind](), _width()
    longest = max(len(name) for name, _ in found)
    lines = [_wrapped(f"{name.ljust(longest)}  {text}", " " * (longest + 2), width) for name, text in found]
    return "\n".join(line for each in lines for line in each)
