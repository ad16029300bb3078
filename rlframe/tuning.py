"""How many torch threads train fastest: found by training for a moment with each number, on objects thrown away."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from typing import Any

import chz
import torch

from rlframe.algos.parts import UpdateDebt
from rlframe.core.errors import counted
from rlframe.experiment import Experiment, choose_device, make_agent
from rlframe.ops.precision import learning_in
from rlframe.samplers import serial
from rlframe.system.affinity import Affinity

_ROUNDS = 3  # of one measurement with each number of threads
_LEAST_S = 0.1  # of a measurement
_WARM_ROUNDS = 1  # which is not counted: memory is touched first, and kernels are made
_REPLAY_ROWS = 20_000  # of the trial's replay: drawing takes as long as from many more


def fastest_threads(experiment: Experiment, affinity: Affinity) -> tuple[int, str]:
    """A number of threads from 1 to the cores at hand, by powers of two, and why. Nothing of the trial is kept.

    Raises:
        ConfigError: environment, model and algorithm do not fit together.
    """
    numbers = [2**k for k in range(affinity.threads.bit_length()) if 2**k <= affinity.threads]
    if len(numbers) == 1:
        return 1, "threads: 1, there is one core to compute with"
    seconds: dict[int, list[float]] = {n: [] for n in numbers}
    with ExitStack() as stack:
        trial = stack.enter_context(closing(_Trial(experiment, affinity)))
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        for round_ in range(_WARM_ROUNDS + _ROUNDS):
            for n in numbers:
                torch.set_num_threads(n)
                taken = trial.seconds_a_step()
                if round_ >= _WARM_ROUNDS:
                    seconds[n].append(taken)
    medians = {n: statistics.median(found) for n, found in seconds.items()}
    best = min(medians, key=lambda n: medians[n])
    told = ", ".join(f"{1e6 * s:.3g} us with {counted(n, 'thread')}" for n, s in medians.items())
    return best, f"threads: {best}, an env_step and what is learned from it takes {told}"


class _Trial:
    """Sampling and learning as the experiment does, in this process, from the first step on."""

    def __init__(self, experiment: Experiment, affinity: Affinity) -> None:
        T, B = experiment.sampler.batch_T, experiment.sampler.batch_B
        config = serial.Config(batch_T=T, batch_B=B)
        device = choose_device(experiment.device, affinity.gpus)
        self.precision = experiment.precision
        envs = config.make_envs(experiment.env_config(), experiment.seed, ())
        try:
            agent = make_agent(chz.replace(experiment, init=""), envs.observation_space, envs.action_space, device)
            self.sampler = config.make_sampler(envs, agent, experiment.seed)
            algo = _learning_at_once(experiment.algo)
            self.algo = algo.make_algorithm(agent, self.sampler.batch_spec, experiment.runner.n_steps, experiment.seed)
        except BaseException:
            envs.close()
            raise

    def seconds_a_step(self) -> float:
        """One measurement: of batches and their updates, or of one batch and some of the many that it calls for."""
        progress, spent = self.algo.progress, 0.0
        before = progress.env_steps
        with learning_in(self.precision):
            while spent < _LEAST_S or progress.env_steps == before:
                spent += _timed(self._batch)
                due, made, learning = self.algo.updates_due(), 0, 0.0
                while self.algo.updates_due() and learning < _LEAST_S:
                    learning += _timed(self.algo.update)
                    made += 1
                spent += learning * due / max(made, 1)
                if made < due and isinstance(debt := getattr(self.algo, "debt", None), UpdateDebt):
                    debt.forgive()
        return spent / (progress.env_steps - before)

    def _batch(self) -> None:
        self.algo.prepare()
        self.algo.receive(self.sampler.collect())

    def close(self) -> None:
        """Close the environments."""
        self.sampler.close()


def _timed(act: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    act()
    return time.perf_counter() - begin


def _learning_at_once(algo: Any) -> Any:
    """The algorithm's config with a small replay from which it learns from the first batch on, if it has one."""
    fields = chz.chz_fields(type(algo))
    changes: dict[str, Any] = {"learn_from": 0} if "learn_from" in fields else {}
    if "replay" in fields:
        changes["replay"] = chz.replace(algo.replay, size=min(algo.replay.size, _REPLAY_ROWS))
    return chz.replace(algo, **changes)
