"""What an unknown key may have meant: a key of that name, another framework's word, or a field of another part."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import Any

import chz

from rlframe.core.errors import ConfigError
from rlframe.core.flat import PARTS, flatten
from rlframe.core.parts import find_config, module_names
from rlframe.envs import EnvOptions
from rlframe.evaluation import EvalConfig
from rlframe.models import ModelConfig

_DEFAULT_PARTS = {"algo": "ppo", "sampler": "cpu", "runner": "minibatch_rl_eval"}  # of `Experiment`
_CHOSEN = ("algo.optimizer", "algo.explore", "algo.replay", "reward.bonus")  # parts whose fields depend on the kind
_OTHER_WORDS = {  # of other frameworks, and the last word of what they are called here
    "action_noise": "explore",
    "alpha": "decay",
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
    "learn_from": "learning_starts",
    "layer_norm": "norm",
    "lr": "learning_rate",
    "n_epochs": "epochs",
    "net_arch": "hidden",
    "num_envs": "batch_B",
    "optimizer_class": "optimizer",
    "policy_delay": "policy_interval",
    "sde_sample_freq": "interval",
    "total_timesteps": "n_steps",
    "train_freq": "replay_ratio",
    "use_attention": "memory",
    "use_lstm": "memory",
    "use_sde": "explore",
    "vf_coef": "value_coef",
}
_CUTOFF = 0.6  # how similar words are that are suggested


def keys_of(part: str, name: str) -> dict[str, Any]:
    """The keys of the fields of algo, sampler or runner `name`, and of such parts; none if there is no such part."""
    try:
        return flatten(**{part: find_config(name, PARTS[part])()})
    except (ConfigError, AttributeError, TypeError):  # reported when the config is made
        return {}


def suggestion(unknown: str, given: Mapping[str, Any], others: Iterable[str]) -> str:
    """`; did you mean ...?` or what else is to be said of an unknown key, or an empty string.

    Args:
        given: all settings.    others: keys that are of no part.
    """
    group, _, name = unknown.rpartition(".")
    chosen = {part: str(given.get(part, default)) for part, default in _DEFAULT_PARTS.items()}
    known = _known(chosen, given)
    if unknown in _CHOSEN:
        return f"; algo={chosen['algo']} has no such part"
    word = _OTHER_WORDS.get(name, "")
    named = [key for key in known if key.rpartition(".")[2] == name]
    named = named or [key for key in known if key.rpartition(".")[2] == word]
    inside = [key for key in named if key.startswith(f"{group}.")]
    if group in known and group in _CHOSEN and not inside and not (word and named):
        return _of_kind(group, name, known)
    part = next((part for part in _CHOSEN if part.endswith(f".{group}")), "")
    if part in known:
        return f"; did you mean {part}.{name}?"
    named = inside or named or get_close_matches(unknown, [*known, *others], n=1, cutoff=_CUTOFF)
    if group == "env" and not inside and not get_close_matches(name, chz.chz_fields(EnvOptions), cutoff=_CUTOFF):
        return f"; an argument of the environment is env_kwargs.{name}"
    return f"; did you mean {' or '.join(named)}?" if named else ""


def _known(chosen: Mapping[str, str], given: Mapping[str, Any]) -> dict[str, Any]:
    """The keys with the parts that are given, and their defaults."""
    known: dict[str, Any] = {"reward.bonus": "none"}
    for part, kind in chosen.items():
        known |= keys_of(part, kind)
    for part in _CHOSEN:
        if part in given:
            known = {key: value for key, value in known.items() if not key.startswith(f"{part}.")}
            known |= keys_of(part, str(given[part])) | {part: given[part]}
    return known | flatten(model=ModelConfig(), eval=EvalConfig(), env_options=EnvOptions())


def _of_kind(part: str, name: str, known: Mapping[str, Any]) -> str:
    """That the field is of other kinds of a part, or what this kind has."""
    own = [key.removeprefix(f"{part}.") for key in known if key.startswith(f"{part}.")]
    if near := get_close_matches(name, own, n=1, cutoff=_CUTOFF):
        return f"; did you mean {part}.{near[0]}?"
    kinds = [kind for kind in module_names(PARTS[part]) if f"{part}.{name}" in keys_of(part, kind)]
    here = f"{part}={known[part]} has {', '.join(own) or 'no keys'}"
    return f"; it is for {part}={' or '.join(kinds)}, and {here}" if kinds else f"; {here}"
