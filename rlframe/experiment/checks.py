"""Whether the parts of an experiment are made for each other."""

from __future__ import annotations

from typing import Any

import chz

from rlframe.algos.defaults import learns_from
from rlframe.core.config import AUTO
from rlframe.core.errors import ConfigError
from rlframe.core.parts import part_name
from rlframe.data.transform import load_transform
from rlframe.envs.make import NO_ENV
from rlframe.evaluation import EvalConfig
from rlframe.experiment.config import Experiment, kind_of
from rlframe.runners.stop_rule import StopRule
from rlframe.system.cluster import RayOptions

_NOT_READ_BY = {  # what evaluates instead of episodes: the keys of episodes that it does not read
    "eval.function": ("explore", "max_length", "env_steps", "video_every"),
    "eval.estimate": ("max_length", "env_steps", "video_every"),
    "eval.opponents": ("env_steps", "video_every"),
}


def _check_places(experiment: Experiment) -> None:
    """Raise ConfigError unless its sampler can be where it is wanted, and be divided."""
    runner, sampler = experiment.runner, experiment.sampler
    if sampler.device and (not runner.samples_in_background or sampler.collects_ahead):
        raise ConfigError(
            f"sampler.device={sampler.device} is for a sampler in a process of its own (runner=async_rl); others act "
            f"on the learner's device, or in their workers"
        )
    if sampler.device not in ("", "cpu") and sampler.acts_in_workers:
        raise ConfigError(
            f"sampler.device={sampler.device}: the workers of sampler=cpu act on the CPU; use sampler=gpu"
        )
    if not experiment.on_ray() and experiment.ray != (default := RayOptions()):
        given = {name: getattr(experiment.ray, name) for name in chz.chz_fields(RayOptions)}
        key = next(name for name, value in given.items() if value != getattr(default, name))
        raise ConfigError(f"ray.{key}={given[key]} is for sampler=ray and replay=ray; remove it")
    if (n := runner.sampler_count()) > 1:
        if sampler.collects_ahead:
            name = kind_of("sampler", sampler)
            raise ConfigError(f"runner.n_samplers={n}: sampler={name} collects ahead by itself; use 1")
        sampler.divided(n, "runner.n_samplers")


def _check_evaluation(experiment: Experiment) -> None:
    """Raise ConfigError for keys of eval. that nothing would read."""
    config, plain, name = experiment.eval, EvalConfig(), kind_of("runner", experiment.runner)
    if config.env_steps and not config.n_episodes:
        raise ConfigError(f"eval.env_steps={config.env_steps} plays episodes, and eval.n_episodes=0 none; remove one")
    if not (other := config.replacement):
        return
    if not experiment.evaluates:
        raise ConfigError(
            f"{other} would do nothing: runner={name} with eval.n_episodes={config.n_episodes} never evaluates; use "
            f"runner=minibatch_rl_eval and episodes, or remove it"
        )
    for key in _NOT_READ_BY[other.partition("=")[0]]:
        if (value := getattr(config, key)) != getattr(plain, key):
            raise ConfigError(f"eval.{key}={value} is of episodes that rlframe plays, not of {other}; remove it")


def _check_recording(experiment: Experiment) -> None:
    """Raise ConfigError unless all that a run should record is there to be recorded."""
    runner, name = experiment.runner, f"record={experiment.record:.100}"
    load_transform(experiment.record_transform, "record_transform")
    for key in ("record_compression", "record_transform"):
        if not experiment.record and (value := getattr(experiment, key)) not in ("", "none"):
            raise ConfigError(f"{key}={value:.100} is for record=NAME; give both, or none")
    if experiment.record and (runner.evolves or runner.learns_from_data):
        raise ConfigError(f"{name} writes the batches of a sampler, which runner={kind_of('runner', runner)} has not")
    if experiment.record and experiment.env_options.normalize_reward:
        raise ConfigError(f"{name} writes the sampler's rewards, not those of env.normalize_reward=true; remove it")


def _check_data(experiment: Experiment) -> None:
    """Raise ConfigError unless a runner without a sampler has data, and one with a sampler a place for its rows."""
    algo, name = experiment.algo, kind_of("algo", experiment.algo)
    replay = algo.replay if learns_from(algo) == "replay" else None
    if replay is not None and replay.has_data:
        _check_rewards_of_data(experiment)
    if not experiment.runner.learns_from_data:
        if replay is not None and not replay.is_live():
            raise ConfigError(
                f"algo.replay.live=0: the rows of runner={kind_of('runner', experiment.runner)} would be lost; use "
                f"runner=offline_rl, or algo.replay.live=0.5 to learn from both"
            )
        if not experiment.agents.policies:
            _check_learns(algo, "algo", experiment.runner.n_steps)
        return
    if experiment.env == NO_ENV and experiment.evaluates and not (experiment.eval.env or experiment.eval.estimate):
        raise ConfigError(f"env={NO_ENV} cannot be played: give eval.env=, eval.estimate= or eval.n_episodes=0")
    how = "algo.replay=dataset algo.replay.path=NAME"
    if replay is None:
        raise ConfigError(f"runner=offline_rl needs an algorithm with replay ({how}), which algo={name} has not")
    if not replay.has_data:
        raise ConfigError(f"runner=offline_rl learns from data: give {how}, or another runner")
    if replay.is_live():
        raise ConfigError(f"algo.replay.live={replay.live:g} is not for runner=offline_rl, which plays nothing")
    if experiment.stop and (name := StopRule(experiment.stop).needs("env_steps", "episode")):
        raise ConfigError(
            f"stop={experiment.stop:.200}: runner=offline_rl plays nothing, so that {name} is never known"
        )


def _check_rewards_of_data(experiment: Experiment) -> None:
    """Raise ConfigError for keys that change the rewards of play, and would not those of recorded rows."""
    options, data_alone = experiment.env_options, experiment.runner.learns_from_data
    bonus = part_name(experiment.reward.bonus, "rlframe.rewards")
    for key, is_given in {
        "env.normalize_reward=true": options.normalize_reward,
        "algo.normalize_return=true": getattr(experiment.algo, "normalize_return", False),
        f"reward.bonus={bonus}": bonus != "none",
        f"env.reward_scale={options.reward_scale:g}": data_alone and options.reward_scale != 1,
        f"env.reward_clip={options.reward_clip}": data_alone and options.reward_clip,
    }.items():
        if is_given:
            raise ConfigError(
                f"{key} would leave the rewards of algo.replay=dataset as they were recorded; leave it out, and change "
                f"those by algo.replay.transform, or of data alone by algo.replay.return_range"
            )


def _check_learns(algo: Any, key: str, n_steps: int) -> None:
    """Raise ConfigError, with the keys below `key`, if an algorithm makes no update in so many env_steps."""
    try:
        if check := getattr(algo, "check_run", None):
            check(n_steps)
    except ConfigError as error:
        raise ConfigError(str(error).replace("algo.", f"{key}.")) from None


def _check_policies(experiment: Experiment) -> None:
    """Raise ConfigError unless the algorithms of several policies can learn here, and side by side."""
    for name, policy in experiment.agents.policies.items():
        algo, kind, key = policy.algo, learns_from(policy.algo), f"agents.policies.{name}.algo"
        if kind == "episodes":
            raise ConfigError(
                f"{key}={kind_of('algo', algo)} learns from whole episodes of a single agent; use another"
            )
        if kind == "replay" and not algo.replay.is_live():
            raise ConfigError(f"{key}.replay.live=0: the rows of its agents would be lost; use {key}.replay.live=0.5")
        if not experiment.runner.learns_from_data and experiment.agents.learns(name):
            _check_learns(algo, key, experiment.runner.n_steps)
        if experiment.learners > 1 and experiment.n_samplers == 1:
            n, rows = experiment.learners, getattr(algo, "batch_size", 0)
            if kind != "replay" or rows % n:
                has = f"batch_size={rows}" if rows else "no replay"
                raise ConfigError(
                    f"learners={n} divides the rows of updates from replay, and {key}={kind_of('algo', algo)} has "
                    f"{has}; use learners=1, or world_size={n}"
                )


def _check_league(experiment: Experiment) -> None:
    """Raise ConfigError unless opponents can be replaced exactly between batches."""
    runner, n = experiment.runner, experiment.agents.league.opponents
    if n and (runner.samples_in_background or runner.evolves or runner.learns_from_data or experiment.sampler.on_ray):
        name = kind_of("runner", runner)
        raise ConfigError(
            f"agents.league.opponents={n} replaces opponents between batches, for which runner={name} with "
            f"sampler={kind_of('sampler', experiment.sampler)} is not made; use runner=minibatch_rl_eval"
        )
    if n and experiment.n_ranks > 1:
        raise ConfigError(f"agents.league.opponents={n} needs world_size=1 and learners=1, not {experiment.n_ranks}")


def _check_evolution(experiment: Experiment) -> None:
    """Raise ConfigError unless an algorithm that learns from episodes has the runner for it, and that no other."""
    algo, runner, sampler = experiment.algo, experiment.runner, experiment.sampler
    evolves, name = learns_from(algo) == "episodes", kind_of("algo", algo)
    if evolves and not runner.evolves:
        raise ConfigError(f"algo={name} needs runner=evolution, not runner={kind_of('runner', runner)}")
    if runner.evolves and not evolves:
        raise ConfigError(f"runner=evolution is for algo=es or ars, not algo={name}")
    if not evolves:
        return
    if (bonus := part_name(experiment.reward.bonus, "rlframe.rewards")) != "none":
        raise ConfigError(f"reward.bonus={bonus} changes rewards step by step, but algo={name} learns from episodes")
    workers = sampler.worker_count()
    for key, wrong in {
        f"sampler={kind_of('sampler', sampler)}": workers and not (sampler.acts_in_workers or sampler.undecided),
        f"sampler.decorrelation_steps={sampler.decorrelation_steps}": sampler.decorrelation_steps,
        f"sampler.statistics=[{','.join(sampler.statistics)}]": sampler.statistics,
        f"sampler.collector={sampler.collector}": sampler.collector,
        "sampler.complete_episodes=true": sampler.complete_episodes,
        f"sampler.env_restarts={sampler.env_restarts}": sampler.env_restarts,
        "env.normalize_reward=true": experiment.env_options.normalize_reward,
        "threads=auto": experiment.threads == AUTO,
    }.items():
        if wrong:
            raise ConfigError(
                f"{key} has no meaning with runner=evolution, whose workers play whole episodes; remove it"
            )


def check_parts(experiment: Experiment) -> None:
    """Raise ConfigError unless its algorithm, runner and sampler are made for each other."""
    _check_data(experiment)
    _check_evaluation(experiment)
    _check_recording(experiment)
    _check_places(experiment)
    _check_policies(experiment)
    _check_league(experiment)
    experiment.sampler.collector_class()
    _check_evolution(experiment)
