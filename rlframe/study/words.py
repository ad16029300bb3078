"""The experiments of a study and their words, from a command line and the YAML file that it names."""

import json
import re
from collections.abc import Mapping
from typing import Any

from rlframe.core.config import split_values
from rlframe.core.errors import ConfigError, prefixed
from rlframe.core.yaml import parse_value, to_json
from rlframe.experiment.objects import long_key
from rlframe.experiment.presets import load_study
from rlframe.experiment.study_keys import GRIDS, REPEATS, SEARCH, STUDY_KEYS, SWEEP, ZIP
from rlframe.study.plan import bare_key

_SEEDS = {f"{SWEEP}seed", f"{ZIP}seed"}
_NAME = re.compile(r"(?!run_\d)\w[\w+=.,-]{0,99}")  # of a directory; run_0 would look like a run

Experiments = dict[str, dict[str, str]]  # words by name; the name is empty if there is only one, without a name


def read_experiments(arguments: Mapping[str, str]) -> Experiments:
    """The experiments of a command line, which overrides the YAML file that its `experiment=` names.

    Raises:
        ConfigError: an entry of the file is not of the right form; the message names its experiment and key.
    """
    source = arguments.get("experiment", "")
    study = load_study(source) if source else {}
    if not study:
        return {"": dict(arguments)}
    given = {key: value for key, value in arguments.items() if key != "experiment"}
    with prefixed(source):
        if "experiments" not in study:
            return {"": _override(_words(study), given)}
        named = study.pop("experiments")
        if not isinstance(named, Mapping) or not named:
            raise ConfigError(f"experiments needs the form {{name: {{key: value}}}}, not {str(named)[:60]}")
        common = _words(study)
    experiments = {}
    for name, entries in named.items():
        with prefixed(f"{source}: {str(name)[:60]}"):
            experiments[name] = _override(_override(common, _words_of_experiment(name, entries)), given)
    return experiments


def _words_of_experiment(name: Any, entries: Any) -> dict[str, str]:
    if not isinstance(name, str):
        raise ConfigError(f"an experiment's name is text, not {name!r:.60}; write it in quotes, as '{name!s:.60}'")
    if not is_name(name):
        raise ConfigError(
            "an experiment's name is a directory: use letters, digits and any of _ - + = . , but not run_N"
        )
    if not isinstance(entries, Mapping):
        raise ConfigError(f"an experiment needs the form {{key: value}}, not {str(entries)[:60]}")
    for key in ("experiments", *STUDY_KEYS):
        if key in entries:
            raise ConfigError(f"{key} is for the whole study; set it beside experiments:")
    return _words(entries)


def is_name(text: str) -> bool:
    """Whether an experiment may have this name, which is that of its directory."""
    return bool(_NAME.fullmatch(text))


def _words(entries: Mapping[Any, Any]) -> dict[str, str]:
    """Entries of a YAML file as words of a command line; `sweep: {KEY: values}` is sweep.KEY."""
    words: dict[str, str] = {}
    for key, value in entries.items():
        of_grid = f"{key}." in GRIDS
        if of_grid and not isinstance(value, Mapping):
            form = "KEY: uniform(LOW,HIGH)" if key == SEARCH[:-1] else "KEY: [value, value]"
            raise ConfigError(f"{key} needs the form {{{form}}}, not {str(value)[:60]}")
        for name, each in [(f"{key}.{name}", each) for name, each in value.items()] if of_grid else [(str(key), value)]:
            if each is None:
                raise ConfigError(f"{name} has no value; leave it out for its default")
            if name in words:
                raise ConfigError(f"{name} is set twice: {words[name]:.60} and {_text(name, each):.60}; remove one")
            words[name] = _text(name, each)
    return words


def _text(name: str, value: Any) -> str:
    """A value of a YAML file as on the command line: lists without quotes, and what environments get as JSON."""
    key = bare_key(name)
    if key != name and isinstance(value, list):
        values = [_text(key, each) for each in value]
        for text in values:
            if len(split_values(text)) > 1:
                raise ConfigError(f"{name}: the value {text} has a comma; write it in brackets, [{text}]")
        return ",".join(values)
    if key != name and isinstance(value, str):
        return value
    if "env_kwargs" in key.split("."):
        return value if isinstance(value, str) and _means_itself(value) else json.dumps(to_json(value), default=str)
    if isinstance(value, list):
        return f"[{','.join(_text(key, each) for each in value)}]"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _means_itself(text: str) -> bool:
    try:
        return bool(parse_value(text) == text)
    except ValueError:
        return False


def _override(below: Mapping[str, str], above: Mapping[str, str]) -> dict[str, str]:
    """The words of both. What is above replaces every form of its key: KEY, sweep.KEY and zip.KEY, or repeats."""
    replaced = {_full(name) for name in above} | ({REPEATS} if _SEEDS & above.keys() else set())
    seeds = _SEEDS if REPEATS in above else set()
    kept = {name: value for name, value in below.items() if _full(name) not in replaced and name not in seeds}
    return kept | dict(above)


def _full(name: str) -> str:
    """The full key of a word: that of sweep.explore.epsilon is algo.explore.epsilon."""
    return long_key(bare_key(name))


def are_words(experiments: Any) -> bool:
    """Whether a study's record has the form of experiments."""
    return (
        isinstance(experiments, dict)
        and bool(experiments)
        and all(name == "" or is_name(name) for name in experiments)
        and all(isinstance(words, dict) for words in experiments.values())
        and all(isinstance(text, str) for words in experiments.values() for text in words.values())
    )
