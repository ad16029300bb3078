"""The defaults that the algorithm of a run brings, as keys below all that are given."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from contextlib import closing
from typing import Any

import cloudpickle
import gymnasium
from gymnasium.envs.registration import EnvSpec

from rlframe.algos.defaults import Kind, defaults_of, kind_of, learns_from
from rlframe.core.parts import ROOTS, part_name
from rlframe.data.reading import open_dataset
from rlframe.envs import EnvConfig, Envs, make_envs
from rlframe.envs.make import NO_ENV, is_atari, resolve
from rlframe.experiment.config import Experiment
from rlframe.experiment.settings import from_flat, merge
from rlframe.samplers.auto import TimingProcess

_OF_VECTORS = tuple(f"gymnasium.envs.{name}" for name in ("classic_control", "mujoco", "toy_text"))
_CONTINUOUS = "gymnasium.envs.mujoco", "PendulumEnv", "Continuous_MountainCarEnv"  # in the entry points of those


def algorithm_defaults(*layers: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Where they come from, for --show, and the keys that the algorithm named by `layers` brings.

    An environment whose id does not tell its kind of spaces is made once, if that decides a key that is not given.

    Raises:
        ConfigError: as `from_flat`, or there is no such environment.    EnvError: its constructor raised.
    """
    experiment = from_flat(*layers)
    given, _ = merge(*layers)
    source = f"default of algo={part_name(experiment.algo, ROOTS['algo'])}"
    if dataset := _only_data(experiment):
        return source, _of_data(dataset, experiment, given)
    of_kind = {kind: _brought(experiment, kind) for kind in Kind}
    found = of_kind[Kind.VECTORS]
    others = [keys for kind, keys in of_kind.items() if kind is not Kind.VECTORS]
    if any(found.get(key) != keys.get(key) for keys in others for key in {**found, **keys} if key not in given):
        here = part_name(experiment.sampler, ROOTS["sampler"]) == "serial"
        found = of_kind[_kind(experiment.env_config(), here)]
    if experiment.record or experiment.env_options.reward_clip == "sign":  # of rewards as they are, or are no more
        found = {key: value for key, value in found.items() if key != "env.normalize_reward"}
    if ":" in experiment.model.encoder:  # the user's own, which normalises by itself or not
        found = {key: value for key, value in found.items() if key not in ("model.norm", "model.image_norm")}
    of_explore = [key for key in found if key.startswith("algo.explore.")]
    if _has_noisy_layers(experiment.algo):  # which explore without random actions
        found = {key: value for key, value in found.items() if key not in of_explore}
    for name in [name for name, each in experiment.agents.policies.items() if _has_noisy_layers(each.algo)]:
        own = f"agents.policies.{name}."
        found = {key: value for key, value in found.items() if not key.startswith(f"{own}algo.explore.")}
        found |= {own + key: 0.0 for key in of_explore if key in found and key not in given}
    if learns_from(experiment.algo) == "episodes":
        found = {"runner": "evolution", **found}
    return source, found


def _brought(experiment: Experiment, kind: Kind) -> dict[str, Any]:
    """The keys that a run's algorithm brings for spaces of a kind, and those of policies that learn with another."""
    found = defaults_of(experiment.algo, kind).keys()
    for name, policy in experiment.agents.policies.items():
        if type(policy.algo) is not type(experiment.algo):
            own = defaults_of(policy.algo, kind).own
            found |= {f"agents.policies.{name}.algo.{key}": value for key, value in own.items()}
    return found


def _has_noisy_layers(algo: Any) -> bool:
    return getattr(getattr(algo, "explore", None), "noisy_layers", False)


def _only_data(experiment: Experiment) -> str:
    """The dataset that an algorithm learns from without a sampler; empty if it learns from experience too."""
    if learns_from(experiment.algo) != "replay" or experiment.algo.replay.is_live():
        return ""
    return next(iter(experiment.algo.replay.names()), "")


def _of_data(name: str, experiment: Experiment, given: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a run that learns from a dataset alone: no sampler, and the environment that the dataset is from.

    Raises:
        ConfigError: there is no such dataset.
    """
    dataset = open_dataset(name, "algo.replay.path")
    kwargs = dataset.env_kwargs
    known = dataset.env_id in gymnasium.registry and ":" not in dataset.env_id and kwargs is not None
    env = given.get("env", dataset.env_id if known else NO_ENV)
    found = {"runner": "offline_rl", "sampler": "serial", "env": env}
    if "env" not in given and known:
        found |= {f"env_kwargs.{key}": value for key, value in (kwargs or {}).items()}
    if env == NO_ENV:
        found |= {"env_kwargs.dataset": name, "eval.n_episodes": 0}
    kind = kind_of(dataset.observation_space, dataset.action_space)
    return found | defaults_of(experiment.algo, kind).keys()


def _kind(env: EnvConfig, here: bool) -> Kind:
    """The kind of spaces. `here`: an environment may be made in this process, as the run will do."""
    target, options = resolve(env.id), env.options
    if isinstance(target, EnvSpec) and not (options.wrappers or options.changes_observations or env.kwargs):
        if is_atari(target):
            return Kind.IMAGES
        place = str(target.entry_point)
        if place.startswith(_OF_VECTORS) and not target.additional_wrappers:
            return Kind.CONTINUOUS if any(each in place for each in _CONTINUOUS) else Kind.VECTORS
    try:
        pickled = cloudpickle.dumps(env)
    except Exception:  # pickling runs user code, which may raise anything
        if not here:
            raise
        return _kind_of(make_envs(env, 1, [0]))
    return _seen(pickled, here)


@functools.lru_cache(maxsize=64)  # a study reads the keys of each of its runs
def _seen(pickled: bytes, here: bool) -> Kind:
    """Make one environment and look at its spaces; in a process of its own unless `here`."""
    env = cloudpickle.loads(pickled)
    return _kind_of(make_envs(env, 1, [0]) if here else TimingProcess(env, 1, 1))


def _kind_of(envs: Envs | TimingProcess) -> Kind:
    with closing(envs):
        return kind_of(envs.observation_space, envs.action_space)
