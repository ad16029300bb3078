"""Collector: the time-step loop that fills a batch, used by all samplers and the evaluator."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium import Space

from rlframe.agents import Agent
from rlframe.core.seeding import round_seed
from rlframe.core.struct import leaves
from rlframe.core.types import Samples
from rlframe.envs import Envs
from rlframe.rollout.buffer import BatchBuffer, empty_rows
from rlframe.rollout.first_ready import FirstReadyStepper
from rlframe.rollout.inference import BatchInference, block_size, check_spaces, empty_agent_outputs, empty_batch
from rlframe.rollout.stepper import BatchEvents, LocalStepper, Stepper, worker_steppers
from rlframe.rollout.stream import BatchStream
from rlframe.rollout.worker_pool import WorkerPool
from rlframe.system.shared import share_zeros


class Collector(BatchStream):
    """Fills one batch again and again. Each group of environments has one stepper and one inference.

    One of your own is a subclass (`sampler.collector=`). In the workers of `sampler=cpu` each has one, of its columns,
    of which `start_batch` and `run_steps` are called.
    """

    def __init__(
        self,
        batch: BatchBuffer,
        inferences: Sequence[BatchInference],
        steppers: Sequence[Stepper],
        observation_space: Space,
    ) -> None:
        super().__init__(batch, observation_space)
        self.inferences, self.steppers = list(inferences), list(steppers)
        self._decorrelation = 0, 0, 0  # see `decorrelate`
        inputs = batch.inputs()
        self._rows = list(zip(leaves(inputs[0]), leaves(inputs[-1]), strict=True))

    def collect(self) -> Samples:
        """Fill the batch and update the running episodes."""
        return self.fill(self._take_steps)

    def _take_steps(self) -> list[BatchEvents]:
        self.start_batch()
        self.run_steps(0)
        return [stepper.pop_events() for stepper in self.steppers]

    def start_batch(self) -> None:
        """Copy row T of the last batch to row 0, and save the agent's state before it."""
        for to, row in self._rows:
            to[...] = row
        for inference in self.inferences:
            inference.save_initial_state()

    def run_steps(self, start: int) -> None:
        """Take the steps from `start` to T - 1."""
        T, pairs = self.batch.rows.T, list(zip(self.inferences, self.steppers, strict=True))
        for inference in self.inferences:
            inference.draw_noise()
        for t in range(start, T):
            for inference, stepper in pairs:
                if t > start:
                    stepper.finish_step(t - 1)
                inference.act(t, stepper.waits)
                stepper.start_step(t)
        for inference, stepper in pairs:
            if start < T:
                stepper.finish_step(T - 1)
            inference.save_final_state()

    def state(self) -> dict[str, Any]:
        """The state between two batches: the last row, the environments and their running episodes."""
        envs = [state for stepper in self.steppers for state in stepper.state()]
        return {"envs": envs, **self.running_state()}

    def load_state(self, saved: Mapping[str, Any]) -> list[str]:
        """Continue from a saved state; returns for each environment why its episode was restarted, or ""."""
        self.batch.load_last_row(saved["row"])
        reasons: list[str] = []
        for stepper in self.steppers:
            reasons += stepper.restore(saved["envs"][stepper.lo : stepper.hi])
        for inference in self.inferences:
            inference.load_state()
        self.load_running_state(saved, reasons)
        return reasons

    def reset(self, round_: int = 0) -> None:
        """Restart all episodes, from the seeds of a round (see `Envs.reset`), decorrelated as before."""
        for stepper in self.steppers:
            stepper.reset(round_)
        self.restart(partial=False)
        n_steps, seed, first = self._decorrelation
        self._take_random_steps(n_steps, round_seed(seed, round_), first)

    def decorrelate(self, n_steps: int, seed: int, first: int) -> None:
        """Take random steps, so that episodes do not all start together (see `Stepper.decorrelate`).

        Episodes that include random steps are not reported.
        """
        self._decorrelation = n_steps, seed, first
        self._take_random_steps(n_steps, seed, first)

    def _take_random_steps(self, n_steps: int, seed: int, first: int) -> None:
        if not n_steps:
            return
        for stepper in self.steppers:
            stepper.decorrelate(n_steps, seed, first + stepper.lo)
            stepper.pop_events()
        self.tracker.partial[:] = True


def local_collector(
    envs: Envs,
    agent: Agent,
    T: int,
    rngs: Sequence[np.random.Generator],
    explore: bool = True,
    first: int = 0,
    collector: type[Collector] = Collector,
) -> Collector:
    """Environments and agent in this process; `first` is the first environment's index over all ranks."""
    batch = empty_batch(envs.observation_space, envs.action_space, agent, T, envs.n, first)
    stepper = LocalStepper(envs, batch.rows, 0, np.zeros(1, np.int64))
    stepper.reset()
    inference = BatchInference(agent, batch, first, rngs, explore, block_size(envs.n))
    return collector(batch, [inference], [stepper], envs.observation_space)


def worker_collector(
    pool: WorkerPool,
    agent: Agent,
    T: int,
    rngs: Sequence[np.random.Generator],
    explore: bool,
    n_groups: int,
    first: int,
    wait_s: float = math.inf,
    collector: type[Collector] = Collector,
) -> Collector:
    """The agent in this process, the environments in n_groups groups of workers; `first` as in `local_collector`.

    `wait_s`: see FirstReadyStepper, which steps on rows of a single step; inf: every step waits for all.
    """
    check_spaces(agent, pool.observation_space, pool.action_space)
    waits = wait_s < math.inf
    shared = share_zeros(empty_rows(pool.observation_space, pool.action_space, 1 if waits else T, pool.n), "rows")
    groups = worker_steppers(pool, shared, n_groups)
    steppers: list[Stepper] = [*groups]
    if waits:
        batch = empty_batch(pool.observation_space, pool.action_space, agent, T, pool.n, first)
        parts = [(each, shared.tree.columns(each.lo, each.hi), batch.columns(each.lo, each.hi)) for each in groups]
        steppers = [FirstReadyStepper(pool, each.group, rows, own, wait_s) for each, rows, own in parts]
    else:
        batch = BatchBuffer(shared.tree, empty_agent_outputs(agent, shared.tree, range(first, first + pool.n)))
    inferences = [
        BatchInference(agent, batch.columns(s.lo, s.hi), first + s.lo, rngs[s.lo : s.hi], explore, block_size(pool.n))
        for s in steppers
    ]
    return collector(batch, inferences, steppers, pool.observation_space)
