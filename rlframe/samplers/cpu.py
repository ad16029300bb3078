"""CpuSampler: each worker process has a copy of the agent, and acts and steps for its own columns of the batch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import chz
import numpy as np

from rlframe.agents import Agent
from rlframe.core.arguments import checked
from rlframe.core.ranks import first_env_of_rank
from rlframe.core.seeding import STATE_WORDS, Role, generators, new_round, spawned, unpack_state
from rlframe.core.struct import write
from rlframe.core.types import BatchSpec, Samples, Trajectory
from rlframe.rollout import cpu_worker
from rlframe.rollout.buffer import BatchBuffer, empty_rows
from rlframe.rollout.collector import Collector
from rlframe.rollout.episodes import EpisodeStatistic
from rlframe.rollout.inference import block_size, empty_agent_outputs, load_noise, noise_state
from rlframe.rollout.stepper import BatchEvents, Interruptions
from rlframe.rollout.stream import BatchStream
from rlframe.rollout.worker_pool import Worker, WorkerPool, WorkerTask
from rlframe.samplers.base import NOT_SAVED, Sampler, WorkersConfig, name_of_collector
from rlframe.system.shared import make_shared_parameters, post_parameters, share_zeros


@chz.chz
class Config(WorkersConfig):
    """For environments that are slow compared to the policy: workers do not wait for each other within a batch."""

    acts_in_workers = True

    def preload(self) -> tuple[str, ...]:
        return ("rlframe.rollout.cpu_worker",)

    def make_sampler(self, envs: WorkerPool, agent: Agent, seed: int) -> CpuSampler:
        return CpuSampler(envs, agent, self.batch_T, seed, self.decorrelation_steps, self.collector_class())


class CpuSampler(Sampler):
    """Workers read new parameters between batches only, so each batch is exactly on-policy."""

    @checked
    def __init__(
        self,
        envs: WorkerPool,
        agent: Agent,
        batch_T: int,
        seed: int = 0,
        decorrelation_steps: int = 0,
        collector: type[Collector] = Collector,
    ) -> None:
        sizes: dict[str, Any] = {"batch_T": batch_T, "batch_B": envs.n, "n_workers": len(envs.workers)}
        name = name_of_collector(collector)
        self.config = Config(**sizes, decorrelation_steps=decorrelation_steps, collector=name)
        self.envs, self.backend = envs, f"{envs.backend}, each with its own agent"
        self.batch_spec, self.env, self.seed = BatchSpec(batch_T, envs.n), envs.env, seed
        rows = empty_rows(envs.observation_space, envs.action_space, batch_T, envs.n)
        first = first_env_of_rank(envs.n)
        outputs = empty_agent_outputs(agent, rows, range(first, first + envs.n))
        shared = share_zeros(BatchBuffer(rows, outputs), "batch")
        write(shared.tree.outputs, outputs)  # the agent's initial state: a snapshot may come before the first batch
        self.stream = BatchStream(shared.tree, envs.observation_space)
        self.stream.tracker.partial[:] = decorrelation_steps > 0
        self.shared_parameters = make_shared_parameters(cpu_worker.parameters(agent))
        arguments = (copy.deepcopy(agent).to("cpu"), seed, decorrelation_steps, block_size(envs.n), first, name)
        noise = share_zeros(np.zeros((envs.n, STATE_WORDS), np.uint64), "noise")
        self.noise: np.ndarray = noise.tree  # states of the workers' generators after the last batch
        envs.assign(WorkerTask(cpu_worker.CollectHandler, (shared, self.shared_parameters, noise), arguments))

    def collect(self) -> Samples:
        return self.stream.fill(self._take_steps)

    def _take_steps(self) -> list[BatchEvents]:
        ready = [worker for worker in self.envs.workers if not worker.needs_reset]
        unfinished = {worker: -1 for worker in self.envs.workers if worker.needs_reset}  # worker: steps done
        for worker in ready:
            worker.child.start_command(cpu_worker.COLLECT)
        events: list[BatchEvents] = []
        for worker, result in zip(ready, self.envs.wait(ready), strict=True):
            if not result.done:
                unfinished[worker] = result.value
            elif result.value:
                events.append(result.value)
        return events + [self._complete(worker, progress) for worker, progress in unfinished.items()]

    def _complete(self, worker: Worker, progress: int) -> BatchEvents:
        """Make a worker's new process complete the batch after the `progress` steps of the one that died."""
        interruptions: Interruptions = set()
        while True:
            t = min(max(progress, 0), self.batch_spec.T - 1)
            interruptions |= {(t, env) for env in range(worker.lo, worker.hi)}
            worker.child.start_command(cpu_worker.COMPLETE, progress)
            (result,) = self.envs.wait([worker])
            if result.done:
                worker.needs_reset = False
                found = result.value or BatchEvents({}, set())
                return BatchEvents(found.diagnostics, interruptions | found.interruptions)
            progress = max(progress, result.value)

    def trajectories(self) -> list[Trajectory]:
        return self.stream.tracker.pop()

    def follow_episodes(self, discount: float, statistics: Sequence[Callable[[], EpisodeStatistic]]) -> None:
        self.stream.tracker.follow(discount, statistics)

    def refresh(self, agent: Agent) -> None:
        post_parameters(self.shared_parameters.tree, cpu_worker.parameters(agent))

    def counters(self) -> dict[str, float]:
        return {**self.envs.counters(), **self.stream.bounds.counters()}

    def set_heartbeat(self, heartbeat: np.ndarray) -> None:
        self.envs.heartbeat = heartbeat

    def state_dict(self) -> dict[str, Any]:
        noise = {"noise": [unpack_state(words) for words in self.noise]}
        if not self.stream.complete:
            return noise
        envs = [each for worker in self.envs.workers for each in self.envs.states(worker, cpu_worker.STATE)]
        return {**noise, "envs": envs, **self.stream.running_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> list[str]:
        rngs = generators(0, Role.NOISE, self.envs.n)
        load_noise(rngs, state["noise"])
        self.envs.number_from(new_round(spawned(rngs)))
        round_ = 0 if "envs" in state else new_round(rngs)
        noise = noise_state(rngs)
        if "envs" in state:
            self.stream.batch.load_last_row(state["row"])
        reasons: list[str] = []
        for worker in self.envs.workers:
            own = state.get("envs", [])[worker.lo : worker.hi], noise[worker.lo : worker.hi]
            reasons += self.envs.call(worker, cpu_worker.LOAD_STATE, round_, [own])
            worker.needs_reset = False  # also of a process that replaced one meanwhile
        if "envs" not in state:
            self.stream.restart(partial=self.config.decorrelation_steps > 0)
            return [NOT_SAVED] * self.envs.n
        self.stream.load_running_state(state, reasons)
        return reasons

    def close(self) -> None:
        self.envs.close()
