"""PopulationSampler: its batch is a generation of perturbed policies, which each play an episode; for evolution."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rlframe.agents import Agent
from rlframe.core.struct import leaves, map_tree, write
from rlframe.core.types import AgentInputs, BatchSpec, Samples, Trajectory
from rlframe.envs import EnvConfig, Envs, make_envs
from rlframe.envs.make import fixed_backend
from rlframe.evaluation.evaluator import EvaluationStopped, Stop, never
from rlframe.rollout.episodes import EpisodeStatistic
from rlframe.rollout.population import (
    EVALUATE,
    EvaluateHandler,
    EvaluationInfo,
    Generation,
    Player,
    Population,
    empty_evaluations,
    population_of,
)
from rlframe.rollout.worker_pool import WorkerPool, WorkerTask
from rlframe.samplers import cpu, serial
from rlframe.samplers.base import Sampler, SamplerConfig
from rlframe.system.shared import make_shared_parameters, post_parameters, share_zeros
from rlframe.system.supervision import Supervision


def make_single_envs(
    env: EnvConfig, seed: int, n_workers: int, cpus: Sequence[Sequence[int]], supervision: Supervision
) -> Envs | WorkerPool:
    """One environment in each of `n_workers` processes, all with the same seed; with 0, one in this process."""
    env = replace(env, backend=fixed_backend(env, 1))
    if not n_workers:
        return make_envs(env, 1, [seed])
    supervision = replace(supervision, fresh_seeds=False)
    return WorkerPool(env, n_workers, [seed] * n_workers, n_workers, cpus, supervision, ("rlframe.rollout.population",))


class PopulationSampler(Sampler):
    """Plays the generation of the last `propose`; a row of its samples [1, P] is an episode, its reward the return.

    The same in this process and with any number of workers. A worker that dies is replaced, and plays the episode that
    it was in again, from the same seed. A worker without work takes it from the others.
    """

    def __init__(
        self,
        envs: Envs | WorkerPool,
        agent: Agent,
        directions: int,
        max_length: int = 200_000,
        discount: float = 1.0,
        seed: int = 0,
    ) -> None:
        """Args:
        envs: of `make_single_envs`.    directions: of a generation, each two policies.
        max_length: env_steps after which an episode is cut.    discount: of `Trajectory.discounted_return`.
        """
        self.envs, self.env, self.seed, self.max_length = envs, envs.env, seed, max_length
        self.backend, self.batch_spec = f"{envs.backend}; a step is an episode", BatchSpec(1, 2 * directions)
        self._generation, self._stop = -1, never
        self._finished: list[Trajectory] = []
        found = empty_evaluations(agent, 2 * directions)
        own = copy.deepcopy(agent).to("cpu")
        self._players: _Players
        self.config: SamplerConfig
        if isinstance(envs, WorkerPool):
            self.config = cpu.Config(n_workers=envs.n, batch_B=envs.n)
            example = population_of(agent, np.zeros(directions), 0.0, 0)
            self._players = _Workers(envs, own, found, example, (discount, max_length))
        else:
            self.config = serial.Config()
            self._players = _Local(Player(envs, own, discount, max_length, np.zeros(1, np.int64)), found)
        self._found = self._players.found
        self.samples = _samples(self._found)

    def propose(self, population: Population, stop: Stop = never) -> None:
        """The generation that `collect` plays, until `stop()` returns True."""
        self._stop, generation = stop, int(population.generation[0])
        if generation != self._generation:
            self._generation, self._found.done[...] = generation, False
        self._found.claimed[~self._found.done] = 0
        self._players.propose(population)

    def collect(self) -> Samples:
        """Play the episodes of the generation that are not played yet.

        Raises:
            EvaluationStopped: `stop()` returned True; the episodes that ended before are kept.
            EnvError, WorkersFailed.
        """
        self._players.play(self._stop)
        if not self._found.done.all():
            raise EvaluationStopped
        self._finished = [self._found.trajectory(column) for column in range(self.batch_spec.B)]
        write(self.samples.reward, self._found.fitness[None])
        write(self.samples.truncated, ~self._found.terminated[None])
        return replace(self.samples, n_env_steps=int(self._found.length.sum()), start=self._generation)

    def trajectories(self) -> list[Trajectory]:
        finished, self._finished = self._finished, []
        return finished

    def refresh(self, agent: Agent) -> None:
        """Does nothing: `propose` has the parameters."""

    def env_seeds(self, seed: int) -> Sequence[int]:
        """None: an episode's seed depends on its generation too."""
        return ()

    def made_with(self) -> dict[str, Any]:
        return {"max_length": self.max_length}

    def counters(self) -> dict[str, float]:
        return self.envs.counters() if isinstance(self.envs, WorkerPool) else {}

    def follow_episodes(self, discount: float, statistics: Sequence[Callable[[], EpisodeStatistic]]) -> None:
        """Does nothing: the discount is an argument, and statistics see no steps of workers."""

    def set_heartbeat(self, heartbeat: np.ndarray) -> None:
        self._players.set_heartbeat(heartbeat)

    def state_dict(self) -> dict[str, Any]:
        """Of a generation that was stopped, the episodes that have ended; empty between generations."""
        if self._found.done.all() or not self._found.done.any():
            return {}
        return {"generation": self._generation, "evaluations": [np.copy(x) for x in leaves(self._found)]}

    def load_state_dict(self, state: Mapping[str, Any]) -> list[str]:
        self._generation = state.get("generation", -1)
        for place, saved in zip(leaves(self._found), state.get("evaluations", []), strict=False):
            place[...] = saved
        self._found.stop[...] = False
        return []

    def close(self) -> None:
        self.envs.close()


class _Players(ABC):
    """Where the episodes are played."""

    found: Generation

    @abstractmethod
    def propose(self, population: Population) -> None:
        """The policies of the next `play`."""

    @abstractmethod
    def play(self, stop: Stop) -> None:
        """Play what is not done in `found`, until it is, or `stop()` returns True."""

    @abstractmethod
    def set_heartbeat(self, heartbeat: np.ndarray) -> None:
        """See Sampler."""


class _Local(_Players):
    """In this process."""

    def __init__(self, player: Player, found: Generation) -> None:
        self._player, self.found = player, found
        self._population: list[Population] = []

    def propose(self, population: Population) -> None:
        self._population = [population.numpy()]

    def play(self, stop: Stop) -> None:
        self._player.evaluate(self._population[0], self.found, 0, 1, stop)

    def set_heartbeat(self, heartbeat: np.ndarray) -> None:
        self._player.progress = heartbeat


class _Workers(_Players):
    """In the workers of a pool, each with an agent of its own."""

    def __init__(self, pool: WorkerPool, agent: Agent, found: Generation, example: Population, options: Any) -> None:
        """`options`: discount and max_length of the players."""
        self._pool, n = pool, len(pool.workers)
        shared, self._parameters = share_zeros(found, "population"), make_shared_parameters(example)
        self.found = shared.tree
        pool.assign(WorkerTask(EvaluateHandler, (self._parameters, shared), (agent, n, *options)))

    def propose(self, population: Population) -> None:
        post_parameters(self._parameters.tree, population)

    def play(self, stop: Stop) -> None:
        self.found.stop[0] = False

        def look() -> None:
            self.found.stop[0] |= stop()

        pending = self._pool.workers
        while pending and not self.found.stop[0]:
            for worker in pending:
                worker.needs_reset = False  # every episode begins with a reset
                worker.child.start_command(EVALUATE)
            results = self._pool.wait(pending, look)
            pending = [worker for worker, result in zip(pending, results, strict=True) if not result.done]

    def set_heartbeat(self, heartbeat: np.ndarray) -> None:
        self._pool.heartbeat = heartbeat


def _samples(found: Generation) -> Samples:
    """Torch views of the episodes as one row of P environments, each ended; `reward` is a copy in float32."""
    P = len(found.done)
    rows = np.zeros((2, P), np.float32)
    info = EvaluationInfo(found.length[None], map_tree(lambda x: x[None], found.moments))
    ended, ones = found.terminated[None], np.ones((2, P), bool)
    inputs = AgentInputs((), (), rows, ones)
    answers = np.arange(P)[None], rows[1:], ended, ~ended, ones[1:], info
    return Samples(inputs, *answers, (), (), n_env_steps=0, start=0).torch()
