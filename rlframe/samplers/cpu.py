"""CpuSampler: worker processes act and step, each with its own copy of the agent and its own columns of the batch."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import chz

from rlframe.agents import Agent
from rlframe.core.types import BatchSpec, Samples, Trajectory
from rlframe.envs.rows import empty_rows
from rlframe.envs.stepper import Cut, Events
from rlframe.envs.workers import EnvWorkers, Job, Worker
from rlframe.samplers import acting
from rlframe.samplers.actor import block_of
from rlframe.samplers.base import Sampler
from rlframe.samplers.batch import Batch, empty_answers
from rlframe.samplers.bounds import BoundsWatch
from rlframe.samplers.episodes import EpisodeTracker
from rlframe.samplers.workers import WorkersConfig
from rlframe.system import board
from rlframe.system.shared import share


@chz.chz
class Config(WorkersConfig):
    """For environments that are slow next to the policy: nothing is handed over, and no core waits, within a batch."""

    def preload(self) -> tuple[str, ...]:
        return ("rlframe.samplers.acting",)

    def make_sampler(self, envs: EnvWorkers, agent: Agent, seed: int) -> CpuSampler:
        return CpuSampler(envs, agent, self.batch_T, seed, self.decorrelation_steps)


class CpuSampler(Sampler):
    """Workers take over the parameters between batches only: a batch is exactly on-policy as of the last `refresh`."""

    def __init__(
        self, envs: EnvWorkers, agent: Agent, batch_T: int, seed: int = 0, decorrelation_steps: int = 0
    ) -> None:
        self.envs, self.backend = envs, f"{envs.backend}, each acting for its own"
        self.batch_spec = BatchSpec(batch_T, envs.n)
        rows = empty_rows(envs.observation_space, envs.action_space, batch_T, envs.n)
        shared = share(Batch(rows, empty_answers(agent, rows, range(envs.n))), "batch")
        self.batch: Batch = shared.tree
        self.samples = self.batch.samples()
        self.board = board.make_board(acting.parameters(agent))
        self.tracker, self.bounds = EpisodeTracker(envs.n), BoundsWatch(envs.observation_space)
        self.tracker.partial[:] = decorrelation_steps > 0
        arguments = (copy.deepcopy(agent).to("cpu"), seed, decorrelation_steps, block_of(envs.n))
        envs.run(Job(acting.collect_batches, (shared, self.board), arguments))

    def collect(self) -> Samples:
        for place in self.envs.workers:
            place.child.begin(acting.COLLECT)
        events: list[Events] = []
        for place, answer in zip(self.envs.workers, self.envs.finish(self.envs.workers), strict=True):
            if answer.done:
                events += [answer.value] if answer.value else []
            else:
                events.append(self._completed(place, answer.value))
        self.tracker.follow(self.batch.rows, events)
        self.bounds.look(self.batch.rows.observation)
        return self.samples

    def _completed(self, place: Worker, progress: int) -> Events:
        """Let the process that replaced a dead one complete its batch from where that one stood."""
        cuts: list[Cut] = []
        while True:
            cuts.append(Cut(min(max(progress, 0), self.batch_spec.T - 1), place.lo, place.hi))
            place.child.begin(acting.GO_ON, progress)
            (answer,) = self.envs.finish([place])
            if answer.done:
                return Events(answer.value.diagnostics if answer.value else [], cuts)
            progress = max(progress, answer.value)

    def trajectories(self) -> list[Trajectory]:
        return self.tracker.pop()

    def refresh(self, agent: Agent) -> None:
        board.post(self.board.tree, acting.parameters(agent))

    def counters(self) -> dict[str, float]:
        return {**self.envs.counters(), **self.bounds.counters()}

    def state_dict(self) -> dict[str, Any]:
        return {"noise": [state for place in self.envs.workers for state in self.envs.call(place, acting.NOISE)]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for place in self.envs.workers:
            place.child.send(state["noise"][place.lo : place.hi])
            self.envs.call(place, acting.LOAD_NOISE)

    def close(self) -> None:
        self.envs.close()
