"""What a config from a file may name without being trusted: parts of rlframe, registered environments, plain values.

A run directory is data, perhaps a stranger's. But a config names code: parts by their modules, and whatever else is
written module:attribute. What the command line says is the user's own; what a file says is looked at here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from rlframe.core.errors import ConfigError, printable
from rlframe.core.files import read_json
from rlframe.experiment.config import PARTS

_MOST_UNITS = 1 << 28  # weights of a network, as far as its widths tell: 1 GB
_LAYERS, _MOST_LAYERS = ("model.hidden", "model.image_hidden"), 100
_MOST = {  # of fields that so much memory, or so many processes, are made for
    **dict.fromkeys(("sampler.batch_B", "eval.n_envs", "algo.n_atoms"), 1 << 16),
    **dict.fromkeys(("sampler.n_workers", "eval.n_workers", "sampler.n_groups", "world_size", "threads"), 1 << 10),
    "sampler.batch_T": 1 << 24,
}
_MOST_TEXT = 10_000  # of an environment's arguments
_OURS = re.compile(r"rlframe(\.[A-Za-z_]\w*)+")
_PROBE = re.compile(r"rlframe\.envs\.debug_envs:[a-z]\w*")  # the only environments that are callables of ours
_NAME = re.compile(r"[A-Za-z_]\w*")
_REGISTERED = re.compile(r"[\w\-./]+")  # a Gymnasium id without module:
_PRESET = re.compile(r"\w[\w\-]*(/[\w\-]+)*")  # a name below experiments/, not a path
_VALUE = re.compile(r"[\w\-+ ,\[\]()]*")  # of a typed field: nothing that could name a module
_DIGITS = re.compile(r"[+\-]?(\d[\d_]*)?\.?\d*([eE][+\-]?\d+)?")
_ARGUMENT = re.compile(r"(?![.~])[^:/\\~]*")  # of an environment: no path, no module:attribute
_TEXT = ("name", "log_dir", "init", "device", "affinity")  # fields that are nothing but text
_GROUPS = ("model", "eval")  # whose fields have values; they have none
_ENV_KWARGS = ("env_kwargs", "eval.env_kwargs")


def read_config(path: Path, trust: bool) -> dict[str, Any]:
    """The `config` of a params.json, as `from_flat` reads it.

    Raises:
        ConfigError: it is not there, damaged or too large, or without `trust` names what is not built in.
    """
    config = read_json(path).get("config")
    if not isinstance(config, dict):
        raise ConfigError(f"{printable(str(path))} has no config")
    refuse_foreign(config, str(path), trust)
    return config


def refuse_foreign(config: Mapping[str, Any], source: str, trust: bool) -> None:
    """Raises:
    ConfigError: without `trust`, and the config names what is not built in; lists it.
    """
    found = [] if trust else foreign(config)
    if found:
        more = f" and {len(found) - 5} more" if len(found) > 5 else ""
        raise ConfigError(
            printable(
                f"{source} names what is no part of rlframe, and would be run: {', '.join(found[:5])}{more}; if you "
                f"know whose it is and what it does, say trust=true"
            )
        )


def foreign(config: Mapping[str, Any]) -> list[str]:
    """The entries of a config, key=value, that would import or call something not built in, or reach into files."""
    found = [f"{key}={_shown(value)}" for key, value in config.items() if not _is_plain(str(key), value)]
    units = _units(config)
    return [*found, f"model.*: at least {units:,} weights"] if units > _MOST_UNITS else found


def _shown(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


def _is_plain(key: str, value: Any) -> bool:
    if key in PARTS:
        return isinstance(value, str) and bool(_NAME.fullmatch(value) or _OURS.fullmatch(value))
    if key == "env":
        return isinstance(value, str) and bool(_REGISTERED.fullmatch(value) or _PROBE.fullmatch(value))
    if key == "model.encoder":
        return isinstance(value, str) and bool(_NAME.fullmatch(value))
    if key == "experiment":
        return isinstance(value, str) and bool(_PRESET.fullmatch(value))
    if key in _TEXT:
        return isinstance(value, str)
    if key in _ENV_KWARGS or key.startswith(tuple(f"{name}." for name in _ENV_KWARGS)):
        if len(str(value)) > _MOST_TEXT or "&" in str(value):  # aliases of YAML may stand for more than any memory
            return False
        return all(_ARGUMENT.fullmatch(text) for text in _texts(_parsed(value)))
    if key in _LAYERS and len(_widths(value)) > _MOST_LAYERS:
        return False
    if key in _MOST and _number(value) > _MOST[key]:
        return False
    if isinstance(value, Mapping) or key in _GROUPS or key.endswith(".replay"):
        return False
    return all(_VALUE.fullmatch(text) or _DIGITS.fullmatch(text) for text in _texts(value))


def _number(value: Any) -> float:
    """Of a count, as it will be read; 0 of what is none."""
    try:
        return float(str(value)[:100].replace("_", ""))
    except ValueError:
        return 0.0


def _parsed(value: Any) -> Any:
    """As `from_flat` will read an argument of an environment; what cannot be read is refused, as text with a colon."""
    try:
        return yaml.safe_load(value) if isinstance(value, str) else value
    except (yaml.YAMLError, RecursionError, ValueError):
        return f"unreadable: {value[:60]}"


def _texts(value: Any) -> Iterator[str]:
    """All that is text in a value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield str(key)
            yield from _texts(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _texts(each)


def _units(config: Mapping[str, Any]) -> int:
    """A lower bound on the weights of the network that a config describes."""
    memory = _widths(config.get("model.memory_size", 0)) if config.get("model.memory", "none") != "none" else [0]
    layers = [_widths(config.get(key, ())) for key in _LAYERS]
    products = [a * b for widths in layers for a, b in pairwise(widths)]
    return sum(products) + sum(map(sum, layers)) + sum(width * width for width in memory)


def _widths(value: Any) -> list[int]:
    numbers = re.findall(r"\d+", str(value)[:10_000])
    return [int(number[:12]) for number in numbers]
