"""Presets, the YAML files of experiments/, and facts read from settings before torch is loaded."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlframe.core.config import nearest
from rlframe.core.errors import ConfigError
from rlframe.core.files import read_json, read_regular_file
from rlframe.core.yaml import parse_yaml
from rlframe.experiment.study_keys import GRIDS, PLAN_KEYS
from rlframe.system.env_vars import text_of

AUTO_PRESET = "auto"  # of experiment=: the preset for the algorithm and the environment
DEFAULT_PRESET = "classic/ppo_cartpole"  # if a command line names no env, algo, experiment or resume
_STUDY_ENTRIES = list(dict.fromkeys(key.partition(".")[0] for key in (*GRIDS, "experiments", *PLAN_KEYS)))
_OF_PRESET = ("like", "command", "expect", "measured")  # beside `config:`: the preset that it is like, what is claimed


@functools.cache
def presets_dir() -> Path:
    """The folder experiments/: beside the package in a clone, inside the package in a wheel."""
    in_wheel = Path(__file__).parents[1] / "experiments"
    return in_wheel if in_wheel.is_dir() else Path(__file__).parents[2] / "experiments"


def preset_names() -> list[str]:
    """Every preset by its path below experiments/, without .yaml."""
    root = str(presets_dir())
    files = [os.path.join(folder, name) for folder, _, names in os.walk(root) for name in names]
    return sorted(file[len(root) + 1 : -len(".yaml")] for file in files if file.endswith(".yaml"))


def load_preset(name: str) -> dict[str, Any]:
    """The config of a preset, by name or by the path of a YAML file or of a run's params.json.

    Raises:
        ConfigError: it does not exist (with the nearest names), is not valid YAML or JSON, has no `config`, has
            unknown keys beside it, or is `like` itself.
    """
    return {key: value for key, value in _keys_of(name).items() if not _is_of_study(key)}


def load_study(name: str) -> dict[str, Any]:
    """The config of a YAML file together with its sweep, zip, search and so on; empty if it has none of these.

    Raises:
        ConfigError: as `load_preset`.
    """
    keys = {} if name == AUTO_PRESET or name.endswith(".json") else _keys_of(name)
    return keys if any(map(_is_of_study, keys)) else {}


def _is_of_study(key: Any) -> bool:
    return str(key).partition(".")[0] in _STUDY_ENTRIES


def _what_there_is(name: str) -> str:
    """Names like this one; else those of its folder, or the folders."""
    known = preset_names()
    if near := nearest(name, known):
        return near
    of_folder: dict[str, list[str]] = {}
    for each in known:
        of_folder.setdefault(each.partition("/")[0], []).append(each)
    own = of_folder.get(name.partition("/")[0], [f"{folder}/..." for folder in of_folder])
    return f"; there are {', '.join(own)}"


def _keys_of(name: str, above: tuple[str, ...] = ()) -> dict[str, Any]:
    """The entries of `config:` and those of a study beside it; of a YAML file without `config:`, all entries.

    Those that it does not have are of the preset that it is `like`. `above`: the presets that are like this one.
    """
    is_file = name.endswith((".yaml", ".yml", ".json"))
    path = Path(name) if is_file else presets_dir() / f"{name}.yaml"
    if not path.is_file() and is_file:
        raise ConfigError(f"experiment={name}: no such file")
    if not path.is_file() and (Path(name) / "params.json").is_file():
        raise ConfigError(f"{name} is a run, not a preset; experiment={name}/params.json trains it again")
    if not path.is_file():
        raise ConfigError(f"no preset {name!r}{_what_there_is(name)}")
    content = read_json(path) if path.suffix == ".json" else _read_yaml(path)
    if path.suffix != ".json" and isinstance(content, dict) and content and "config" not in content:
        return dict(content)
    if not isinstance(content, dict) or not isinstance(content.get("config"), dict):
        raise ConfigError(f"{path} has no mapping `config:`")
    if path.suffix == ".json":
        return dict(content["config"])
    beside = {key: value for key, value in content.items() if key not in ("config", *_OF_PRESET)}
    for key in beside:
        if not _is_of_study(key):
            hint = nearest(str(key), ("config", *_STUDY_ENTRIES, *_OF_PRESET))
            raise ConfigError(f"{path}: unknown key {key!s:.60} beside `config:`; settings stand below it{hint}")
        if key in content["config"]:
            raise ConfigError(f"{path}: {key} stands in `config:` and beside it; remove one of them")
    if (like := content.get("like")) in (*above, name):
        raise ConfigError(f"{path}: like: {like} leads back to itself")
    return (_keys_of(str(like), (*above, name)) if like else {}) | beside | content["config"]


def _read_yaml(path: Path) -> Any:
    try:
        return _parsed(read_regular_file(path).decode())
    except ValueError as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from None


_parsed = functools.lru_cache(maxsize=64)(parse_yaml)  # a launch reads its preset several times


@functools.lru_cache(maxsize=512)
def _text(file: str, changed_ns: int) -> str:
    """The text of a file, read again when the time of its last change is another."""
    return Path(file).read_text(encoding="utf-8")


def with_default(words: Mapping[str, str]) -> dict[str, str]:
    """The words of a launch, with DEFAULT_PRESET if they name no run."""
    named = {"env", "algo", "experiment", "resume"} & set(words)
    return dict(words) if named else {"experiment": DEFAULT_PRESET, **words}


def presets_for(env: str, algo: str = "") -> list[str]:
    """The presets made for an environment, and with `algo` those of it: the one of the fewest keys first.

    Those that nobody has measured come later, and those with a runner of their own last. Files that do not mention
    both are not parsed, but one that is `like` another may have its algorithm, and not its environment, from there.
    """
    files = {name: f"{presets_dir()}/{name}.yaml" for name in preset_names()}
    texts = {name: _text(file, os.stat(file).st_mtime_ns) for name, file in files.items()}
    named = [name for name, text in texts.items() if env in text and (algo.lower() in text or "like:" in text)]
    configs = {name: load_preset(name) for name in named}
    found = [name for name in named if configs[name].get("env") == env]
    if algo:
        found = [name for name in found if configs[name].get("algo") == algo.lower()]
    return sorted(found, key=lambda name: ("runner" in configs[name], not is_measured(name), len(configs[name]), name))


def is_measured(name: str) -> bool:
    """Whether the file of a preset says what it reached."""
    return _read_yaml(presets_dir() / f"{name}.yaml").get("measured", "unmeasured") != "unmeasured"


def best_preset(algo: str, env: str) -> str:
    """The preset that experiment=auto takes.

    Raises:
        ConfigError: there is none for this algorithm and environment.
    """
    if names := presets_for(env, algo):
        return names[0]
    others = [f"experiment={name}" for name in presets_for(env)]
    there = f"; for {env} there are {', '.join(others)}" if others else ""
    raise ConfigError(f"experiment=auto: there is no preset for algo={algo} on env={env}{there}; leave it out")


_FROM_REPLAY = ("dqn", "r2d1", "sac")  # of algorithms that learn from images, those that make many updates a batch
_ONE_ENV = ("ddpg", "sac", "td3")  # algorithms whose default is one environment


def competing_work(keys: Mapping[str, Any]) -> str:
    """What competes with torch's threads for the cores, for `system.machine.limit_threads`, from a run's settings.

    Known before torch is loaded, so from keys and preset alone. "processes" or "threads" step the environments. With
    one environment, this process steps it or waits for it, and "nothing" competes. With images and replay, threads spin
    as beside processes: an update takes longer than the steps between two.
    """
    config = _settings(keys)
    images = "ALE/" in str(config.get("env"))
    algo = str(config.get("algo")).lower()
    n_envs = config.get("sampler.batch_B", 1 if algo in _ONE_ENV else 0)
    alone = str(n_envs) == "1" and not str(config.get("runner")).startswith("async")
    if images and (alone or algo in _FROM_REPLAY):
        return "processes"
    if alone:
        return "nothing"
    in_threads = "envpool" in str(config.get("env_backend")) or (images and str(config.get("sampler")) == "serial")
    return "threads" if in_threads else "processes"


def _settings(keys: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of the command line above those of its preset or run, if these can be read."""
    config: dict[str, Any] = {}
    with contextlib.suppress(ConfigError, OSError, ValueError):  # reported later, when the config is read
        source = f"{keys['resume']}/params.json" if "resume" in keys else str(keys.get("experiment", ""))
        if source == AUTO_PRESET:
            source = best_preset(str(keys.get("algo", "ppo")), str(keys.get("env", "CartPole-v1")))
        config = load_preset(source) if source else {}
    return config | dict(keys)


def early_env_vars(keys: Mapping[str, Any]) -> dict[str, str]:
    """The environment variables of a run, before its settings are read and torch is loaded.

    Those of a run's params.json, which may come from another person, only with trust=true.
    """
    is_of_run = "resume" in keys or str(keys.get("experiment", "")).endswith(".json")
    settings = _settings(keys) if not is_of_run or str(keys.get("trust")).lower() == "true" else keys
    found: dict[str, Any] = {}
    for key, value in settings.items():
        group, _, name = str(key).partition(".")
        if group == "env_vars":
            with contextlib.suppress(ValueError):  # reported later
                given = {name: value} if name else parse_yaml(value) if isinstance(value, str) else value
                found |= {each: text_of(x) for each, x in given.items()} if isinstance(given, Mapping) else {}
    return found
