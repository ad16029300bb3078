"""Settings: flat keys with values, as on the command line, in presets and in params.json; and their Experiment."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

import chz

from rlframe.core.errors import ConfigError
from rlframe.core.parts import GROUPS, OWN, Part, fields_of, flatten, inner_parts, known_keys, module_names
from rlframe.core.yaml import KWARGS, from_json, parse_value, parse_yaml
from rlframe.envs import EnvOptions
from rlframe.experiment.agents import with_policies
from rlframe.experiment.config import Experiment
from rlframe.experiment.discounts import with_discounts
from rlframe.experiment.objects import SHORT_KEYS, check_objects, is_object, long_key
from rlframe.experiment.study_keys import COMMAND_LINE_KEYS, GRIDS, PLAN_KEYS, SINGLE_RUN_KEYS
from rlframe.system.env_vars import text_of

_MAX_KEY, _MAX_VALUE = 200, 1 << 14  # characters
_FREE = re.compile(rf"({KWARGS}|env_vars|agents\.map)(?:\.(.*))?")  # a mapping whose keys are not rlframe's
_ARGUMENT = re.compile(rf"({KWARGS}|env_vars)(?:\..*)?")  # of two ways of writing one, the last in order counts
_STUDY_ONLY = ("stall_s", "seeds", "stack", *PLAN_KEYS)
# Keys of the command line that are not fields of Experiment.
_COMMAND_KEYS = ("experiment", "retries", *SINGLE_RUN_KEYS, *COMMAND_LINE_KEYS, *_STUDY_ONLY)
_CUTOFF = 0.6  # how similar words are that are suggested
_OTHER_WORDS = {  # of other frameworks, and the last word, or words, of what they are called here
    **dict.fromkeys(("run_dir", "save_dir", "output_dir", "out", "out_dir", "logdir", "tensorboard_log"), "log_dir"),
    **dict.fromkeys(
        ("max_steps", "max_timesteps", "steps", "timesteps", "total_frames", "total_steps"), "n_steps env_steps"
    ),
    "action_noise": "explore",
    "alpha": "temperature decay",
    "batch_size": "minibatches",
    "bonus": "bonus",
    "buffer_size": "size",
    "clip_coef": "clip",
    "clip_range": "clip",
    "clip_range_vf": "value_clip",
    "clip_reward": "reward_clip",
    "conv_filters": "channels",
    "ent_coef": "entropy_coef",
    "exploration": "explore",
    "exploration_final_eps": "explore",
    "exploration_fraction": "explore",
    "gamma": "discount",
    "grad_clip": "max_grad_norm",
    "gradient_steps": "replay_ratio",
    "kl_coeff": "kl_coef",
    "kl_target": "kl_coef_target",
    "lambda_": "gae_lambda",
    "layer_norm": "norm",
    "learn_from": "learning_starts",
    "lr": "learning_rate",
    "lstm": "memory",
    "n_envs": "batch_B",
    "n_epochs": "epochs",
    "n_step": "n_steps",
    "net_arch": "hidden",
    "nsteps": "n_steps",
    "num_envs": "batch_B",
    "optimizer_class": "optimizer",
    "policy_delay": "policy_interval",
    "polyak": "tau",
    "recurrent": "memory",
    "rnn": "memory",
    "sde_sample_freq": "interval",
    "target_score": "target_return",
    "total_timesteps": "n_steps",
    "train_freq": "replay_ratio",
    "use_attention": "memory",
    "use_lstm": "memory",
    "use_sde": "explore",
    "vf_coef": "value_coef",
}


def to_flat(experiment: Experiment) -> dict[str, Any]:
    """Every key of an experiment with its value, as in params.json; `from_flat` reads it back."""
    return flatten(**{field: getattr(experiment, field) for field in chz.chz_fields(experiment)})


def long_keys(layer: Mapping[str, Any]) -> dict[str, Any]:
    """A layer with the full names of keys that have a shorter one, such as explore=.

    Raises:
        ConfigError: a key is given twice.
    """
    found: dict[str, Any] = {}
    for key, value in layer.items():
        long = long_key(str(key))
        if long in found or (long != key and long in layer):
            raise ConfigError(f"{key} is short for {long}; give one of them")
        found[long] = value
    if found.get("algo.explore") == "random":
        raise ConfigError(
            "algo.explore=random: random first steps of ddpg, td3 and sac are algo.random_steps, those of dqn and r2d1 "
            "a schedule such as explore.epsilon=linear(1,0.1,0.02)"
        )
    if isinstance(given := found.get("agents.map"), str):
        if given.startswith("{"):
            found["agents.map"] = _map_of_agents(given)
        else:
            found["agents.map_function"] = found.pop("agents.map")
    return found


def _map_of_agents(text: str) -> dict[str, str]:
    """The policies of agents in `agents.map={agent_*: red}`."""
    found = _parse("agents.map", text)
    if not isinstance(found, dict) or not all(isinstance(name, str) for pair in found.items() for name in pair):
        raise ConfigError(f"agents.map={text:.100} must be written {{agent_*: red, other: blue}}, with a space after :")
    return found


def digest_of(machine: Sequence[Any], experiment: Experiment, prefixes: tuple[str, ...]) -> str:
    """Names what is remembered of a machine for experiments that agree in the settings that begin so."""
    config = {key: value for key, value in to_flat(experiment).items() if key.startswith(prefixes)}
    text = json.dumps([machine, config], sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def merge(*layers: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """All layers as one, and the keys that were dropped: a later layer names another part, which has no such field.

    Parts of a part that a layer replaces stay if they were named and fit.
    """
    merged: dict[str, Any] = {}
    dropped: list[str] = []
    for layer in map(long_keys, layers):
        parts = known_keys(Experiment, {**merged, **layer}) if merged and layer else {}
        for key, part in parts.items():
            if isinstance(part, Part) and key in layer and merged.get(key) != layer[key]:  # also if it is the default
                lost = _of_another(key, part, merged, layer)
                dropped += lost
                merged = {name: value for name, value in merged.items() if name not in lost}
        merged = {key: value for key, value in merged.items() if key not in layer or not _ARGUMENT.fullmatch(key)}
        merged |= layer
    return merged, dropped


def _of_another(key: str, part: Part, before: Mapping[str, Any], layer: Mapping[str, Any]) -> list[str]:
    """The keys below a part that its kind in a layer does not have, or that do not fit it."""
    below = [name for name in before if name.startswith(f"{key}.")]
    try:
        config = part.find(layer[key])
    except ConfigError:  # reported when the config is made
        return below
    inner = {name: x for name, x in known_keys(config, {}, f"{key}.").items() if isinstance(x, Part)}
    fitting = {name: x for name, x in {**before, **layer}.items() if name in inner and inner[name].fits(x)}
    known = known_keys(config, fitting, f"{key}.")
    kept = [name for name in below if name in (fitting if name in inner else known)]
    free = [name for name in below if (found := _FREE.fullmatch(name)) and found[1] in known]
    return [name for name in below if name not in (*kept, *free)]


def from_flat(*layers: Mapping[str, Any]) -> Experiment:
    """The experiment that layers of key: value describe; later layers override earlier ones.

    Raises:
        ConfigError: an unknown key or name (with the nearest), a wrong type or value.
    """
    for layer in layers:
        _check_length(layer)
        _check_once(layer)
    merged = merge(*layers)[0]
    inherited = {key: value for key, value in with_policies(merged).items() if key not in merged}
    return _experiment(merge(inherited, merged)[0])  # without keys of parts that a policy has others of


def _check_once(layer: Mapping[str, Any]) -> None:
    """Raise ConfigError if a layer sets a name of env_kwargs, or the like, in both ways of writing it."""
    for key in layer:
        free = _FREE.fullmatch(str(key))
        if free and free[2] and free[1] in layer:
            inside = _parse(free[1], layer[free[1]])
            if isinstance(inside, Mapping) and free[2] in inside:
                raise ConfigError(f"{key} is set twice, also in {free[1]}={{...}}; remove one of them")


def _check_length(layer: Mapping[str, Any]) -> None:
    """Raise ConfigError for a text that is too long; an argument of the environment may be long."""
    for key, value in layer.items():
        if isinstance(value, str) and len(value) > _MAX_VALUE and not _FREE.fullmatch(str(key)):
            raise ConfigError(
                f"{key!s:.200}={value:.200}... has {len(value):,} characters, more than the limit of {_MAX_VALUE:,}"
            )


def _experiment(merged: Mapping[str, Any]) -> Experiment:
    known, arguments = known_keys(Experiment, merged), dict[str, Any]()
    for key, value in merged.items():
        if not isinstance(key, str) or len(key) > _MAX_KEY:
            raise ConfigError(f"unknown key {str(key)[:60]!r} (--help lists the keys)")
        part = known.get(key)
        if free := _FREE.fullmatch(key):
            arguments[free[1]] = {**arguments.get(free[1], {}), **_free_values(key, free[2], value)}
        elif isinstance(part, type):
            raise ConfigError(_without_name(key, value, part))
        elif isinstance(value, Mapping):
            raise ConfigError(f"{key} has keys below it; write them as {key}.{next(iter(value), 'name')}=VALUE")
        elif isinstance(value, list) and is_object(value):
            arguments[_field_of(key)] = tuple(value)  # text would leave the objects behind
        elif isinstance(part, Part) and part.is_own(value):
            arguments |= {key: chz.Castable(OWN), f"{key}.name": chz.Castable(_text(value))}
        elif value is None:
            raise ConfigError(f"{key} has no value; leave it out for its default")
        else:
            arguments[_field_of(key)] = chz.Castable(_text(value))
    try:
        made = chz.Blueprint(Experiment).apply({**_untouched(merged), **arguments}).make()
    except chz.blueprint._entrypoint.EntrypointException as error:
        message = str(error).strip()
        for field, group in GROUPS.items():
            message = message.replace(f"'{field}.", f"'{group}.")
        raise ConfigError(_readable(message, merged)) from None
    except (ConfigError, TypeError, ValueError) as error:
        raise ConfigError(str(error)) from None  # a new one, without the lines that chz notes on it
    check_objects(merged, known)
    return with_discounts(made)


def _untouched(given: Mapping[str, Any]) -> dict[str, Any]:
    """The configs of which no key is given, made here: chz takes four times as long, field by field."""
    fields = {name: field for name, field in fields_of(Experiment).items() if field.below and not field.is_mapping}
    groups = {key.partition(".")[0] for key in given if "." in key}
    if "" in groups:  # chz finds ...hidden= in any of them
        return {}
    below = {name: field.below for name, field in fields.items() if GROUPS.get(name, name) not in groups}
    return {name: config() for name, config in below.items() if config}


def _free_values(key: str, name: str | None, value: Any) -> Mapping[str, Any]:
    are_texts = key.partition(".")[0] == "env_vars"
    if are_texts and name:
        return {name: text_of(value)}
    parsed = _parse(key, value, parse_yaml if are_texts else parse_value)
    try:
        parsed = from_json(parsed)
    except ValueError as error:
        raise ConfigError(f"{key}: {error}") from None
    if name:
        return {name: parsed}
    if not isinstance(parsed, Mapping):
        raise ConfigError(f"{key}={value!r} must be a mapping; write {key}.name=value")
    return {each: text_of(x) for each, x in parsed.items()} if are_texts else parsed


def _without_name(key: str, value: Any, config: type) -> str:
    """What is wrong with a value of a key that has none of its own, but keys below it."""
    fields = chz.chz_fields(config)
    meant = [name for name in fields if str(value) in re.findall(r"\w+", fields[name]._doc)]
    meant = list(fields) if len(fields) == 1 else meant
    if not meant:
        return f"{key}={value}: it takes no value, but has the keys {', '.join(f'{key}.{name}' for name in fields)}"
    return f"{key}={value}: write {key}.{meant[0]}={value} (--help lists the keys)"


def _field_of(key: str) -> str:
    """The path of a key's field: env.resize is env_options.resize. Raises ConfigError if that is written as a key."""
    head, dot, name = key.partition(".")
    if dot and head in GROUPS:
        raise ConfigError(f"unknown key {key}; did you mean {GROUPS[head]}.{name}? (--help lists the keys)")
    group = {group: field for field, group in GROUPS.items()}
    return f"{group[head]}.{name}" if dot and head in group else key


def _readable(message: str, given: Mapping[str, Any]) -> str:
    """The relevant line of an error message of chz about these settings."""
    unknown = re.match(r"Extraneous argument '([^']+)'", message)
    if unknown:
        key, whose = unknown[1], "the command line"
        if key in _STUDY_ONLY or key.startswith(GRIDS):
            whose = "a study, with sweep.KEY=, search.KEY= or repeats="
        elif key not in _COMMAND_KEYS:
            around = key.rpartition(".")[0]
            if isinstance(part := known_keys(Experiment, given).get(around), Part):
                part.find(given.get(around, part.default))  # raises ConfigError if it has no keys, and says why
            hint = suggestion(key, given, (*SHORT_KEYS, *_COMMAND_KEYS, *chz.chz_fields(Experiment)))
            return f"unknown key {key}{hint} (--help lists the keys)"
        return f"{key}={given.get(key)} is no setting of a run: it is for {whose}"
    bad = re.match(r"Could not interpret argument (?:'(.*)'|\"(.*)\") provided for param '([^']+)'", message)
    reasons = re.findall(r"^- Failed to interpret it as a .*:\n(.+)$", message, re.MULTILINE)
    if not bad or len(reasons) != 2:
        return message
    is_part = isinstance(known_keys(Experiment, given).get(bad[3]), Part)
    if below := re.search(r"since subparameters were provided \(e\.g\. '([^']+)'\)", reasons[is_part]):
        return f"unknown key {below[1]}: {bad[3]} has no keys below it"
    return f"{bad[3]}={bad[1] or bad[2] or ''}: {reasons[is_part]}"


def _parse(key: str, value: Any, parse: Callable[[str], Any] = parse_value) -> Any:
    try:
        return parse(value) if isinstance(value, str) else value
    except ValueError:
        raise ConfigError(f"{key}={value:.60} is not valid YAML; write such text in quotes: '\"...\"'") from None


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()  # also of a key that is one of a few names: compile=True
    return f"[{','.join(map(str, value))}]" if isinstance(value, (list, tuple)) else str(value)


def suggestion(unknown: str, given: Mapping[str, Any], others: Iterable[str]) -> str:
    """`; did you mean ...?` or what else is to be said of an unknown key, or an empty string.

    Args:
        given: all settings.    others: keys that are of no part.
    """
    group, _, name = unknown.rpartition(".")
    first, _, rest = unknown.partition(".")
    if rest and (several := get_close_matches(f"{first}.", GRIDS, n=1, cutoff=_CUTOFF)):
        return f"; did you mean {several[0]}{rest}?"
    given = {"sampler": "cpu", **given}
    keys = known_keys(Experiment, given)
    known = {key: x for key, x in keys.items() if "." in key and not isinstance(x, type)}
    around = keys.get(group)
    if isinstance(around, Part) and inner_parts(around, name):
        return f"; {group}={given.get(group, around.default)} has no such part"
    words = _OTHER_WORDS.get(name, "").split()
    named = [key for each in dict.fromkeys((*words, name)) for key in known if key.rpartition(".")[2] == each]
    inside = [key for key in named if key.startswith(f"{group}.")]
    outer, _, inner = group.rpartition(".")
    if around is None and isinstance(of := keys.get(outer), Part) and (kinds := _kinds_with(of, inner)):
        return f"; {group} is for {outer}={_listed(kinds)}, not {given.get(outer, of.default)}"
    if isinstance(around, Part) and not inside and not (words and named):
        if kinds := next(filter(None, (_kinds_with(around, each) for each in (name, *words))), []):
            return f"; it is for {group}={_listed(kinds)}, not {given.get(group, around.default)}"
        if group in known:
            return _what_it_has(group, around, name, given, [*known])
    longer = next((key for key, x in known.items() if isinstance(x, Part) and key.endswith(f".{group}")), "")
    if longer:
        return f"; did you mean {longer}.{name}?"
    named = inside or named or [word for word in words if word in others] or _near(name, group, known)
    named = named or get_close_matches(unknown, [*known, *others], n=1, cutoff=_CUTOFF)
    if group == "env" and not inside and not get_close_matches(name, chz.chz_fields(EnvOptions), cutoff=_CUTOFF):
        return f"; an argument of the environment is env_kwargs.{name}"
    return f"; did you mean {' or '.join(named)}?" if named else ""


def _what_it_has(key: str, part: Part, name: str, given: Mapping[str, Any], known: Iterable[str]) -> str:
    """The field of this kind of a part that is near, or all of them."""
    if near := _near(name, key, known):
        return f"; did you mean {near[0]}?"
    own = [each.removeprefix(f"{key}.") for each in known if each.startswith(f"{key}.")]
    return f"; {key}={given.get(key, part.default)} has {', '.join(own) or 'no keys'}"


def _near(name: str, group: str, known: Iterable[str]) -> list[str]:
    """The key of a group whose last word, or its word in another framework, is near."""
    words = {key.removeprefix(f"{group}."): key for key in known if key.startswith(f"{group}.")}
    words |= {other: words[x] for other, ours in _OTHER_WORDS.items() for x in ours.split() if x in words}
    return [words[each] for each in get_close_matches(name, words, n=1, cutoff=_CUTOFF)]


def _listed(kinds: Sequence[str]) -> str:
    """a, b or c."""
    return " or ".join(", ".join(kinds).rsplit(", ", 1))


def _kinds_with(part: Part, name: str) -> list[str]:
    """The kinds of a part that have this field."""
    return [kind for kind in module_names(part.package) if name in chz.chz_fields(part.find(kind))]
