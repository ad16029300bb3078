"""CpuSampler: worker processes act and step, each with its own copy of the agent and its own columns of the batch."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import chz
import numpy as np

from rlframe.agents import Agent
from rlframe.core.ranks import first_of_rank
from rlframe.core.seeding import STATE_WORDS, Role, generators, pack_state, unpack_state
from rlframe.core.types import BatchSpec, Samples, Trajectory
from rlframe.envs.observations import BoundsCheck
from rlframe.rollout import cpu_worker
from rlframe.rollout.buffer import Batch, empty_rows
from rlframe.rollout.collector import EpisodeTracker, load_running, running
from rlframe.rollout.env_pool import EnvPool, Job, Worker
from rlframe.rollout.inference import block_of, empty_answers, load_noise
from rlframe.rollout.stepper import Cut, Events
from rlframe.samplers.base import NOT_SAVED, Sampler, WorkersConfig, check_workers
from rlframe.system.shared import make_shared_parameters, post_parameters, share


@chz.chz
class Config(WorkersConfig):
    """For environments that are slow next to the policy: nothing is handed over, and no core waits, within a batch."""

    def preload(self) -> tuple[str, ...]:
        return ("rlframe.rollout.cpu_worker",)

    def make_sampler(self, envs: EnvPool, agent: Agent, seed: int) -> CpuSampler:
        return CpuSampler(envs, agent, self.batch_T, seed, self.decorrelation_steps)


class CpuSampler(Sampler):
    """Workers take over the parameters between batches only: a batch is exactly on-policy as of the last `refresh`."""

    def __init__(self, envs: EnvPool, agent: Agent, batch_T: int, seed: int = 0, decorrelation_steps: int = 0) -> None:
        check_workers(envs, "CpuSampler")
        self.envs, self.backend = envs, f"{envs.backend}, each acting for its own"
        self.batch_spec = BatchSpec(batch_T, envs.n)
        rows = empty_rows(envs.observation_space, envs.action_space, batch_T, envs.n)
        first = first_of_rank(envs.n)
        shared = share(Batch(rows, empty_answers(agent, rows, range(first, first + envs.n))), "batch")
        self.batch: Batch = shared.tree
        self.samples = self.batch.samples()
        self.board = make_shared_parameters(cpu_worker.parameters(agent))
        self.tracker, self.bounds = EpisodeTracker(envs.n), BoundsCheck(envs.observation_space)
        self.whole = True  # the batch is complete, and every environment stands at its last row
        self.tracker.partial[:] = decorrelation_steps > 0
        arguments = (copy.deepcopy(agent).to("cpu"), seed, decorrelation_steps, block_of(envs.n), first)
        noise = share(np.zeros((envs.n, STATE_WORDS), np.uint64), "noise")
        self.noise: np.ndarray = noise.tree  # of the workers' generators, as of the last batch
        envs.run(Job(cpu_worker.collect_batches, (shared, self.board, noise), arguments))

    def collect(self) -> Samples:
        self.whole = False
        ready = [place for place in self.envs.workers if not place.took_over]
        left = {place: -1 for place in self.envs.workers if place.took_over}  # batches to complete, after which step
        for place in ready:
            place.child.begin(cpu_worker.COLLECT)
        events: list[Events] = []
        for place, answer in zip(ready, self.envs.finish(ready), strict=True):
            if not answer.done:
                left[place] = answer.value
            elif answer.value:
                events.append(answer.value)
        events += [self._completed(place, progress) for place, progress in left.items()]
        self.tracker.follow(self.batch.rows, events)
        self.bounds.check(self.batch.rows.observation)
        self.whole = True
        return self.samples

    def _completed(self, place: Worker, progress: int) -> Events:
        """Let the process that replaced a dead one complete its batch from where that one stood."""
        cuts: list[Cut] = []
        while True:
            cuts.append(Cut(min(max(progress, 0), self.batch_spec.T - 1), place.lo, place.hi))
            place.child.begin(cpu_worker.GO_ON, progress)
            (answer,) = self.envs.finish([place])
            if answer.done:
                place.took_over = False
                return Events(answer.value.diagnostics if answer.value else [], cuts)
            progress = max(progress, answer.value)

    def trajectories(self) -> list[Trajectory]:
        return self.tracker.pop()

    def refresh(self, agent: Agent) -> None:
        post_parameters(self.board.tree, cpu_worker.parameters(agent))

    def counters(self) -> dict[str, float]:
        return {**self.envs.counters(), **self.bounds.counters()}

    def tell_life(self, life: np.ndarray) -> None:
        self.envs.life = life

    def state_dict(self) -> dict[str, Any]:
        noise = {"noise": [unpack_state(words) for words in self.noise]}
        if not self.whole:
            return noise
        envs = [each for place in self.envs.workers for each in self.envs.states(place, cpu_worker.STATE)]
        return {**noise, "envs": envs, **running(self.batch, self.tracker, self.bounds)}

    def load_state_dict(self, state: Mapping[str, Any]) -> list[str]:
        rngs = generators(0, Role.NOISE, self.envs.n)
        load_noise(rngs, state["noise"])
        self.noise[...] = [pack_state(rng) for rng in rngs]
        if "envs" in state:
            self.batch.load_last_row(state["row"])
        reasons: list[str] = []
        for place in self.envs.workers:
            reasons += self.envs.call(place, cpu_worker.RESUME, values=[state.get("envs", [])[place.lo : place.hi]])
        if "envs" not in state:
            return [NOT_SAVED] * self.envs.n
        load_running(state, reasons, self.tracker, self.bounds)
        return reasons

    def close(self) -> None:
        self.envs.close()
