"""threads=auto and learners=auto: what is fastest here, measured by short trainings and remembered for the machine."""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import chz
import torch
from gymnasium import Space

from rlframe.agents import Agent
from rlframe.algos import Algorithm
from rlframe.core.config import AUTO
from rlframe.core.errors import ConfigError, pluralize
from rlframe.core.files import read_json, replace_file
from rlframe.core.ranks import current_ranks
from rlframe.core.types import BatchSpec
from rlframe.experiment.build import make_learners, untrained_agent
from rlframe.experiment.config import Experiment
from rlframe.experiment.ranks import share_of
from rlframe.experiment.settings import digest_of
from rlframe.kernels.device import learning_in, restoring_threads
from rlframe.replay.make import small_size
from rlframe.runners import Learner
from rlframe.runners.learner import Learners
from rlframe.samplers import serial
from rlframe.system.affinity import Affinity
from rlframe.system.distributed import RankInfo, join, launch_ranks
from rlframe.system.machine import FreeCpus, n_cpus

_ROUNDS = 3  # measurements of each way
_MIN_S = 0.1  # of a measurement
_WARM_ROUNDS = 1  # not counted: memory is touched first, and kernels are made
_REPLAY_ROWS = 20_000  # of the trial's replay: sampling from it takes as long as from a larger one
_SAME = ("env", "model.", "algo", "agents.", "precision", "sampler.batch_")  # of what decides the time of a step
_MOST_REMEMBERED = 500  # experiments
_BUSY = 0.5  # CPUs that others use, above which a measurement is not remembered


@dataclass(frozen=True)
class Way:
    """A way to learn: so many processes with so many torch threads each."""

    learners: int
    threads: int

    def __str__(self) -> str:
        return pluralize(self.threads, "thread") if self.learners == 1 else pluralize(self.learners, "learner")


def ways_to_learn(experiment: Experiment, threads: int) -> list[Way]:
    """The ways that threads= and learners= leave open, with powers of two up to so many threads in all."""
    numbers = [2**k for k in range(threads.bit_length()) if 2**k <= threads]
    alone = [Way(1, n) for n in ([experiment.threads] if experiment.threads > 0 else numbers)]
    if experiment.learners != AUTO:
        return alone
    return [*alone, *(Way(n, 1) for n in numbers[1:] if _divides(experiment, n))]


def _divides(experiment: Experiment, n: int) -> bool:
    with contextlib.suppress(ConfigError):
        share_of(chz.replace(experiment, learners=n), rank=0)
        return True
    return False


def fastest(experiment: Experiment, affinity: Affinity, ways: Sequence[Way]) -> tuple[Way, str]:
    """The fastest way to train an experiment, and the measurements in words.

    Raises:
        ConfigError: environment, model and algorithm do not fit together.
    """
    if len(ways) == 1:
        return ways[0], f"learning: {ways[0]}, there is no other way to choose"
    known = _remembered(experiment)
    new = [way for way in ways if str(way) not in known]
    if new:
        others = FreeCpus()
        known |= _measure(experiment, affinity, new)
        if others.n - others.look() < _BUSY:
            _remember(experiment, known)
    seconds = {way: known[str(way)] for way in ways}
    best = min(seconds, key=lambda way: seconds[way])
    times = ", ".join(f"{1e3 * s:.3g} ms with {way}" for way, s in seconds.items())
    source = "" if new else ", as measured before"
    return best, f"learning: {best}; an env_step and what is learned from it takes {times}{source}"


def _measure(experiment: Experiment, affinity: Affinity, ways: Sequence[Way]) -> dict[str, float]:
    """Seconds for an env_step and what is learned from it, by way."""
    T, B = experiment.sampler.batch_T, experiment.sampler.batch_B
    experiment = chz.replace(experiment, sampler=serial.Config(batch_T=T, batch_B=B), learners=1, world_size=1)
    seconds: dict[str, float] = {}
    numbers = [way.threads for way in ways if way.learners == 1]
    if numbers:
        seconds |= {str(Way(1, n)): s for n, s in _trial(experiment, affinity, numbers, RankInfo()).items()}
    for n in (way.learners for way in ways if way.learners > 1):
        shared = chz.replace(experiment, learners=n)
        times = launch_ranks(partial(_trial, shared, affinity, [1]), n, shared.n_samplers)
        seconds[str(Way(n, 1))] = times[1]
    return seconds


def _trial(experiment: Experiment, affinity: Affinity, threads: Sequence[int], place: RankInfo) -> dict[int, float]:
    """Seconds for each number of threads, measured in turns, as one of the learners."""
    seconds: dict[int, list[float]] = {n: [] for n in threads}
    with restoring_threads(), join(place), closing(_Trial(share_of(experiment, place.rank), affinity)) as trial:
        for round_ in range(_WARM_ROUNDS + _ROUNDS):
            for n in threads:
                torch.set_num_threads(n)
                measured = trial.seconds_per_step()
                if round_ >= _WARM_ROUNDS:
                    seconds[n].append(measured)
    return {n: statistics.median(found) for n, found in seconds.items()}


class _Trial:
    """Samples and learns like the experiment, but in this process, and learning starts at once."""

    def __init__(self, experiment: Experiment, affinity: Affinity) -> None:
        config, seed = experiment.sampler, experiment.seed
        self.precision = experiment.precision
        with ExitStack() as opened:
            envs = opened.enter_context(closing(config.make_envs(experiment.env_config(), seed, ())))
            agent = untrained_agent(experiment, affinity, envs.observation_space, envs.action_space)
            self.sampler = config.make_sampler(envs, agent, seed)
            try:
                self.learners = Learners(self._learners(experiment, agent, (envs.observation_space, envs.action_space)))
            except ValueError as error:
                raise ConfigError(str(error)) from error
            opened.pop_all()

    def _learners(self, experiment: Experiment, agent: Agent, in_spaces: tuple[Space, Space]) -> Mapping[str, Learner]:
        spec = self.sampler.batch_spec
        if agent.agents():
            at_once = experiment.without_init().with_algos(lambda algo, _: _learning_at_once(algo, spec))
            return make_learners(at_once, agent, self.sampler, in_spaces)
        algo = _learning_at_once(experiment.algo, spec)
        return {"agent": Learner(agent, algo.make_algorithm(agent, spec, experiment.runner.n_steps, experiment.seed))}

    def seconds_per_step(self) -> float:
        """Measure batches and all their updates; if one batch calls for many updates, measure a part of them."""
        learners, ranks, spent = self.learners, current_ranks(), 0.0
        before = learners.env_steps
        with learning_in(self.precision):
            while ranks.broadcast(spent < _MIN_S or learners.env_steps == before):
                spent += _timed(self._batch) + sum(map(_seconds_of_updates, learners.algos().values()))
        return spent / (learners.env_steps - before)

    def _batch(self) -> None:
        for learner, samples in self.learners.batches(self.sampler.collect()):
            learner.receive(samples)

    def close(self) -> None:
        self.sampler.close()


def _seconds_of_updates(algo: Algorithm) -> float:
    """Seconds that the updates take that are due; of many, a part of them is made."""
    due, made, learning = algo.updates_due(), 0, 0.0
    while algo.updates_due() and current_ranks().broadcast(learning < _MIN_S):
        learning += _timed(algo.update)
        made += 1
    if made < due:
        algo.drop_updates()
    return learning * due / max(made, 1)


def _timed(function: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


def _learning_at_once(algo: Any, batch_spec: BatchSpec) -> Any:
    """The algorithm's config with learning from the first batch on and a small replay, if it has these fields."""
    fields = chz.chz_fields(type(algo))
    changes: dict[str, Any] = {"learning_starts": 0} if "learning_starts" in fields else {}
    if "unique" in fields:
        changes["unique"] = False  # a small replay may have too few rows for it
    if "replay" in fields:
        rows = max(_REPLAY_ROWS, small_size(batch_spec))
        changes["replay"] = algo.replay.for_trial(rows)
    return chz.replace(algo, **changes)


def _memory() -> Path:
    """The file of earlier measurements."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "rlframe" / "learning.json"


def _key(experiment: Experiment) -> str:
    """What the time of a step depends on: the machine, torch, and the experiment's parts."""
    machine = [torch.__version__, torch.cpu.get_capabilities().get("cpu_name", ""), n_cpus(), experiment.device]
    return digest_of(machine, experiment, _SAME)


def _remembered(experiment: Experiment) -> dict[str, float]:
    """Seconds by way, of earlier measurements; empty if there are none, or if they cannot be read."""
    with contextlib.suppress(ConfigError, OSError):
        found = read_json(_memory()).get(_key(experiment))
        if isinstance(found, dict):
            return {str(way): float(s) for way, s in found.items() if isinstance(s, (int, float)) and s > 0}
    return {}


def _remember(experiment: Experiment, seconds: dict[str, float]) -> None:
    """Add measurements to those of earlier runs; without them where nothing can be written."""
    file = _memory()
    content: dict[str, Any] = {}
    with contextlib.suppress(ConfigError, OSError):
        content = read_json(file)
    content = {**content, _key(experiment): seconds}
    kept = dict([*content.items()][-_MOST_REMEMBERED:])
    with contextlib.suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        replace_file(file, json.dumps(kept, indent=1))
