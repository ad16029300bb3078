"""Trust: what a config read from a file may contain without trust=true.

A config names code: modules, and module:attribute. The command line is the user's own, but a run directory may come
from another person, so its config may name only parts of rlframe, registered environments and plain values.
"""

from __future__ import annotations

import importlib
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import Tensor

from rlframe.core.errors import ConfigError, one_line, printable
from rlframe.core.files import read_json
from rlframe.core.yaml import is_passed_on, parse_yaml
from rlframe.evaluation.matches import RANDOM
from rlframe.experiment.agents import OF_POLICY, without_policy
from rlframe.experiment.objects import is_object
from rlframe.record.loggers import LOGGERS

_MAX_WEIGHTS = 1 << 28  # of a network, estimated from its widths: 1 GB
NEW_WEIGHTS = 1 << 24  # of a network that is made anew from a stranger's config: initialised within seconds
_MAX_POLICIES = 1 << 10
_FEW_WEIGHTS = 1 << 22  # never too many, whatever a snapshot holds
_BONUS_LAYERS = "reward.bonus.hidden"  # of no weights that a policy has
_LAYERS, _MAX_LAYERS = ("model.hidden", "model.image_hidden", _BONUS_LAYERS), 100
_LISTS = (*_LAYERS, "model.channels", "model.kernels", "model.strides", "model.pools")
_MAX = {  # of fields that decide how much memory or how many processes a run takes
    **dict.fromkeys(("sampler.batch_B", "eval.n_envs", "algo.n_atoms"), 1 << 16),
    **dict.fromkeys(("sampler.n_workers", "eval.n_workers", "sampler.n_groups"), 1 << 10),
    **dict.fromkeys(("world_size", "learners", "threads"), 1 << 10),
    **dict.fromkeys(("runner.n_slots", "algo.learn_T", "algo.burn_in", "model.memory_window"), 1 << 12),
    "model.memory_layers": _MAX_LAYERS,
    "env.frame_stack": 1 << 7,
    "algo.batch_size": 1 << 20,
    "reward.bonus.batch_size": 1 << 20,
    **dict.fromkeys(("reward.bonus.embedding", "reward.bonus.model_hidden"), 1 << 13),
    "sampler.batch_T": 1 << 24,
}
_MAX_TEXT = 10_000  # characters of an environment's arguments
_OWN_MODULE = re.compile(r"rlframe(\.[A-Za-z_]\w*)+")
_OWN_ENVS = "rlframe.envs.debug_envs"  # whose callables alone, of rlframe's, are environments
_OWN_WRAPPER = "rlframe.envs.wrappers:ActionMaskFromInfo"
_OWN_PLAYERS = "rlframe.envs.debug_players"
_NAME = re.compile(r"[A-Za-z_]\w*")
_REGISTERED = re.compile(r"[\w\-./]+")  # a Gymnasium id without module:
_PRESET = re.compile(r"\w[\w\-]*(/[\w\-]+)*")  # a name below experiments/, not a path
_VALUE = re.compile(r"[\w\-+ ,\[\]()]*")  # of a typed field: cannot name a module
_DIGITS = re.compile(r"[+\-]?(\d[\d_]*)?\.?\d*([eE][+\-]?\d+)?")
_SCHEDULE = re.compile(r"[a-z]+\([\d.eE+\-:,_ ]*\)")
_ARGUMENT = re.compile(r"(?![.~])[^:/\\~]*")  # of an environment: no path, no module:attribute
_TEXT = (
    "stop",
    "env.reward_clip",
    "snapshot_best",
    "name",
    "log_dir",
    "init",
    "record",  # resumed, it goes on only with a dataset that has its token
    "metric",  # of a search
    *("algo.replay.path", "eval.dataset"),
    "device",
    "affinity",
)  # fields of free text
_GROUPS = ("model", "eval", "env_options", "reward")  # they have fields, but no value
_AGENTS = re.compile(r"agents\.(map(\..*)?|map_function)")
_PATTERN = re.compile(r"[\w*?\-]*")  # of names of agents
_KWARGS = re.compile(r"([\w-]+\.)*(env_)?kwargs(\..*)?")  # keys of arguments


def read_config(
    path: Path, trust: bool, given: Mapping[str, Any] = MappingProxyType({}), without: Collection[str] = ()
) -> dict[str, Any]:
    """The `config` of a params.json, for `from_flat`. Its sync is not checked: only a resumed run copies itself.

    Args:
        given: settings in the place of its own: its env, and what they name by an object, then need no trust.
        without: keys that are left out, and need none.
    Raises:
        ConfigError: it does not exist, is damaged or too large, is not that of an experiment, or needs trust (see
            `check_trusted`).
    """
    config = read_json(path).get("config")
    if not isinstance(config, dict):
        raise ConfigError(f"{printable(str(path))} has no config")
    if "env" not in config and "env" not in given:
        raise ConfigError(
            f"{printable(str(path))} names no env, so only the script that trained this run can make its agent; "
            "rlframe.record.snapshot.load_snapshot reads its weights"
        )
    config = {key: x for key, x in config.items() if key not in without}
    unused = {"sync", *(key for key, x in given.items() if key == "env" or is_object(x))}
    check_trusted({key: x for key, x in config.items() if key not in unused}, str(path), trust)
    return config


def check_trusted(config: Mapping[str, Any], source: str, trust: bool, most_weights: int = _MAX_WEIGHTS) -> None:
    """Check a config that was read from the file `source`.

    Raises:
        ConfigError: it has foreign entries, which the message lists, and `trust` is false.
    """
    found = [] if trust else foreign(config, most_weights)
    if found:
        more = f" and {len(found) - 5} more" if len(found) > 5 else ""
        hand = "; in Python, hand these objects over again, such as env=MyEnv" if any(map(_names_code, found)) else ""
        raise ConfigError(
            printable(
                f"{source} names code or files that are not part of rlframe: {', '.join(found[:5])}{more}; if you "
                f"trust its author, or it is yours, add trust=true{hand}"
            )
        )


def _names_code(entry: str) -> bool:
    key, _, value = entry.partition("=")
    return not is_passed_on(key) and (":" in value or "()" in value)


def check_sync(config: Mapping[str, Any], given: Mapping[str, Any], source: str, trust: bool) -> None:
    """Raise ConfigError if a run would copy itself to where only its own config, in the file `source`, says."""
    if config.get("sync") and "sync" not in given and not trust:
        raise ConfigError(
            printable(
                f"{source} copies the run to sync={one_line(config['sync'], 60)}; give sync= again, or empty for no "
                f"copy, or if you trust its author, add trust=true"
            )
        )


def check_network(config: Mapping[str, Any], weights: Any, source: str) -> None:
    """Raise ConfigError if the config describes a network far larger than a snapshot's weights, before it is made."""
    held = sum(x.numel() for x in weights.values() if isinstance(x, Tensor)) if isinstance(weights, Mapping) else 0
    n_weights = sum(map(_count_weights, _networks({key: x for key, x in config.items() if key != _BONUS_LAYERS})))
    if n_weights > max(held, _FEW_WEIGHTS):
        raise ConfigError(f"{source} holds another network: {held:,} weights, and the config at least {n_weights:,}")


def foreign(config: Mapping[str, Any], most_weights: int = _MAX_WEIGHTS) -> list[str]:
    """The entries of a config, key=value, that run foreign code, set variables, read files or need much memory."""
    found = [
        f"{one_line(key, 60)}={one_line(value, 60)}" for key, value in config.items() if not _is_plain(str(key), value)
    ]
    networks = _networks(config)
    if len(networks) > _MAX_POLICIES:
        return [*found, f"agents.policies.*: {len(networks):,} policies"]
    n_weights = sum(map(_count_weights, networks))
    return [*found, f"model.*: at least {n_weights:,} weights"] if n_weights > most_weights else found


def _is_plain(key: str, value: Any) -> bool:
    """Whether an entry is harmless: by the rule of its key, else as a number, a plain word or a part of rlframe."""
    key = without_policy(key)
    if rule := _RULES.get(key):
        return rule(value)
    if key.partition(".")[0] == "env_vars":  # libraries load code by many of them
        return value == {}
    if _AGENTS.fullmatch(key):
        return all(_PATTERN.fullmatch(text) for text in _texts(value))
    if _KWARGS.fullmatch(key):
        return len(str(value)) <= _MAX_TEXT and all(_ARGUMENT.fullmatch(text) for text in _texts(_parsed(value)))
    if (key in _LISTS and len(_widths(value)) > _MAX_LAYERS) or _number(value) > _MAX.get(key, math.inf):
        return False
    if isinstance(value, Mapping) or key in _GROUPS:
        return False
    forms = _VALUE, _DIGITS, _SCHEDULE, _OWN_MODULE
    return all(any(form.fullmatch(text) for form in forms) for text in _texts(value))


def _is_of(module: str, name: str) -> bool:
    """Whether a name is module:attribute of a callable that this module of rlframe defines, not one that it imports."""
    head, _, attribute = name.partition(":")
    if head != module or not _NAME.fullmatch(attribute):
        return False
    found = getattr(importlib.import_module(module), attribute, None)
    return callable(found) and getattr(found, "__module__", "") == module


def _matches(value: Any, form: re.Pattern[str]) -> bool:
    return isinstance(value, str) and bool(form.fullmatch(value))


def _is_env(value: Any) -> bool:
    return value == "" or _matches(value, _REGISTERED) or (isinstance(value, str) and _is_of(_OWN_ENVS, value))


_RULES: dict[str, Callable[[Any], bool]] = {  # of keys that no general rule is for
    **dict.fromkeys(_TEXT, lambda x: isinstance(x, str)),
    **dict.fromkeys(("env", "eval.env"), _is_env),
    **dict.fromkeys(("callbacks", "sampler.statistics", "sync"), lambda x: x in ("", [])),
    **dict.fromkeys(("eval.function", "sampler.collector"), lambda x: x == ""),
    "experiment": lambda x: _matches(x, _PRESET),
    "model.encoder": lambda x: _matches(x, _NAME),
    "env.wrappers": lambda x: all(name in ("", _OWN_WRAPPER) for name in _names(x)),
    "eval.opponents": lambda x: all(name in ("", RANDOM) or _is_of(_OWN_PLAYERS, name) for name in _names(x)),
    "loggers": lambda x: all(name in ("", *LOGGERS) for name in _names(x)),
    "agents.league.members": lambda x: True,  # runs whose weights alone are read
    "agents.global_state": lambda x: str(x).lower() in ("", "true", "false"),
}


def _number(value: Any) -> float:
    """The number that a count will be read as; 0 if it is none."""
    try:
        return float(str(value)[:100].replace("_", ""))
    except ValueError:
        return 0.0


def _parsed(value: Any) -> Any:
    """An argument of an environment as `from_flat` reads it; what it cannot read becomes text that is not allowed."""
    try:
        return parse_yaml(value) if isinstance(value, str) else value
    except ValueError:
        return f"unreadable: {value[:60]}"


def _texts(value: Any) -> Iterator[str]:
    """All text in a value, keys included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield str(key)
            yield from _texts(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _texts(each)


def _names(value: Any) -> Iterator[str]:
    """Those of a list, also of one that is written as text."""
    return (name.strip() for text in _texts(value) for name in text.strip("[] ").split(","))


def _networks(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """What describes the networks of a config: its own keys, or those of each policy that has a name."""
    found: dict[str, dict[str, Any]] = {}
    for key, value in config.items():
        if match := OF_POLICY.fullmatch(str(key)):
            found.setdefault(match[1], {})[match[2]] = value
    return [*found.values()] if len(found) > 1 else [config, *found.values()]


def _count_weights(config: Mapping[str, Any]) -> int:
    """A lower bound on the number of weights of the network that a config describes."""
    blocks = sum(_widths(config.get("model.memory_layers", 0)))
    n_gates = {"lstm": 4, "gru": 3, "transformer": 12 * blocks}.get(str(config.get("model.memory")), 0)
    memory = _widths(config.get("model.memory_size", 0)) if n_gates else [0]
    layers = [*(_widths(config.get(key, ())) for key in _LAYERS), 2 * _widths(config.get("model.action_embedding", 0))]
    products = [a * b for widths in layers for a, b in pairwise(widths)]
    channels = _widths(config.get("model.channels", ()))
    kernels = _widths(config.get("model.kernels", ())) or [3] * len(channels)
    products += [a * b * side**2 for (a, b), side in zip(pairwise([1, *channels]), kernels, strict=False)]
    return sum(products) + sum(map(sum, layers)) + sum(n_gates * width * width for width in memory)


def _widths(value: Any) -> list[int]:
    numbers = re.findall(r"\d+", str(value)[:10_000])
    return [int(number[:12]) for number in numbers]
