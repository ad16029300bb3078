"""PopulationSampler: its batch is a generation of perturbed policies, which each play an episode; for evolution."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from typing import Any

import numpy as np

from rlframe.agents import Agent
from rlframe.algos.evolution import EvaluationInfo, Generation, population_of
from rlframe.core.types import AgentInputs, BatchSpec, Samples, Trajectory
from rlframe.evaluation.evaluator import EvaluationStopped, Stop, never
from rlframe.evaluation.players import Played, Players
from rlframe.samplers.base import Sampler

_DONE = -1  # in `claims`, where 0 is a column that nobody plays yet, and k + 1 one of worker k


class PopulationSampler(Sampler):
    """Plays the generation of the last `propose`; a row of its samples [1, P] is an episode, its reward the return.

    The same in this process and with any number of workers. A worker that dies is replaced, and plays the episodes that
    it was in again, from the same seeds. A worker without work takes it from the others.
    """

    def __init__(
        self,
        players: Players,
        agent: Agent,
        directions: int,
        max_length: int = 200_000,
        discount: float = 1.0,
        seed: int = 0,
    ) -> None:
        """Args:
        players: of `make_players`.    directions: of a generation, each two policies.
        max_length: env_steps after which an episode is cut.    discount: of `Trajectory.discounted_return`.
        """
        envs = players.envs
        self.env, self.seed, self.config = envs.env, seed, players.config
        self.backend, self.batch_spec = f"{envs.backend}; a step is an episode", BatchSpec(1, 2 * directions)
        self._stop, self._generation, self._n_finished = never, -1, 0
        self._played: dict[int, Played] = {}  # by column
        self._players, own = players, copy.deepcopy(agent).to("cpu")
        population = population_of(agent, np.zeros(directions), 0.0, 0)
        claims = np.zeros(2 * directions + 1, np.int64)  # of each column, and a stop request for the workers
        self._claims = players.start(own, population, claims, discount, max_length)
        self.max_length = max_length

    def propose(self, population: Generation, stop: Stop = never) -> None:
        """The generation that `collect` plays, until `stop()` returns True."""
        self._stop, generation = stop, int(population.generation[0])
        if generation != self._generation:
            self._generation, self._played = generation, {}
        self._players.post(population)

    def collect(self) -> Samples:
        """Play the episodes of the generation that are not played yet.

        Raises:
            EvaluationStopped: `stop()` returned True; the episodes that ended before are kept.
            EnvError, WorkersFailed.
        """
        self._claims[:] = 0
        self._claims[list(self._played)] = _DONE
        for played in self._players.play(self._claims, self._stop):
            self._add(played)
        if len(self._played) < self.batch_spec.B:
            raise EvaluationStopped
        self._n_finished = self.batch_spec.B
        return self._samples()

    def _add(self, played: Sequence[Played]) -> None:
        for each in played:
            self._played[each.episode.env] = each
            self._claims[each.episode.env] = _DONE

    def _samples(self) -> Samples:
        """The episodes as one row of P environments, each ended."""
        P = self.batch_spec.B
        played = [self._played[column] for column in range(P)]
        moments = tuple(np.stack(each)[None] for each in zip(*(each.moments for each in played), strict=True))
        info = EvaluationInfo(np.array([[each.episode.length for each in played]]), moments)
        with np.errstate(over="ignore"):  # the algorithm says it
            reward = np.array([[each.fitness for each in played]]).astype(np.float32)
        terminated, ones = np.array([[each.episode.terminated for each in played]]), np.ones((2, P), bool)
        inputs = AgentInputs((), (), np.concatenate([np.zeros_like(reward), reward]), ones)
        answers = np.arange(P)[None], reward, terminated, ~terminated, ones[1:], info
        n_env_steps = int(info.length.sum())
        return Samples(inputs, *answers, (), (), n_env_steps=n_env_steps, start=self._generation).torch()

    def trajectories(self) -> list[Trajectory]:
        n, self._n_finished = self._n_finished, 0
        return [self._played[column].episode for column in range(n)]

    def refresh(self, agent: Agent) -> None:
        """Does nothing: `propose` has the parameters."""

    def env_seeds(self, seed: int) -> Sequence[int]:
        """None: an episode's seed depends on its generation too."""
        return ()

    def made_with(self) -> dict[str, Any]:
        return {"max_length": self.max_length}

    def counters(self) -> dict[str, float]:
        return self._players.envs.counters()

    def set_heartbeat(self, heartbeat: np.ndarray) -> None:
        self._players.set_heartbeat(heartbeat)

    def state_dict(self) -> dict[str, Any]:
        """Of a generation that was stopped, the episodes that have ended; empty between generations."""
        if len(self._played) in (0, self.batch_spec.B):
            return {}
        played = [[list(astuple(each.episode)), each.fitness, each.moments] for each in self._played.values()]
        return {"generation": self._generation, "played": played}

    def load_state_dict(self, state: Mapping[str, Any]) -> list[str]:
        self._generation, self._played = state.get("generation", -1), {}
        for episode, fitness, moments in state.get("played", []):
            self._add([Played(Trajectory(*episode), fitness, list(moments))])
        return []

    def close(self) -> None:
        self._players.close()
