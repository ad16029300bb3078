"""Players: play the episodes of a generation of perturbed policies, in this process or in workers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from rlframe.agents import Agent
from rlframe.algos.evolution import Generation, flat_parameters
from rlframe.core.struct import Tree, as_numpy, leaves, write, writer
from rlframe.core.types import AgentInputs, Trajectory
from rlframe.envs import EnvConfig, Envs, make_envs
from rlframe.envs.make import fixed_backend
from rlframe.evaluation.evaluator import Stop
from rlframe.models.normalize import ObservationNorm, RunningNorm
from rlframe.ops.evolution import perturbation
from rlframe.rollout.buffer import empty_rows
from rlframe.rollout.inference import CpuInference
from rlframe.rollout.worker_pool import WorkerContext, WorkerPool, WorkerTask
from rlframe.samplers import cpu, serial
from rlframe.samplers.base import SamplerConfig
from rlframe.system.machine import retain_freed_memory
from rlframe.system.service import Supervision
from rlframe.system.shared import make_shared_parameters, post_parameters, read_parameters, share_zeros
from rlframe.system.worker_main import PROGRESS, Handler

_CHUNK = 64  # steps between looks at a stop request


@dataclass(frozen=True)
class Played:
    """An episode of a generation."""

    episode: Trajectory  # `env` is its column
    fitness: float  # sum of the learning rewards
    moments: list[np.ndarray]  # [3, *shape]: number, mean and variance of each normalised vector


class Players(ABC):
    """Plays episodes in single environments, of this process or of workers."""

    envs: Envs | WorkerPool

    def __init__(self, envs: Envs | WorkerPool, config: SamplerConfig) -> None:
        """`config`: of a sampler, which describes it."""
        self.envs, self.config = envs, config
        self.observation_space, self.action_space = envs.observation_space, envs.action_space

    @abstractmethod
    def start(
        self, agent: Agent, population: Generation, claims: np.ndarray, discount: float, max_length: int
    ) -> np.ndarray:
        """Prepare to play such generations with this agent, whose parameters change; returns claims to be changed."""

    @abstractmethod
    def post(self, population: Generation) -> None:
        """Play this generation from now on."""

    @abstractmethod
    def play(self, claims: np.ndarray, stop: Stop) -> Iterator[list[Played]]:
        """Play what is not claimed, until `stop()` returns True."""

    @abstractmethod
    def set_heartbeat(self, heartbeat: np.ndarray) -> None:
        """Increment `heartbeat[0]` every step."""

    def close(self) -> None:
        self.envs.close()


class LocalPlayers(Players):
    """One, in this process."""

    envs: Envs

    def start(
        self, agent: Agent, population: Generation, claims: np.ndarray, discount: float, max_length: int
    ) -> np.ndarray:
        self._player = EpisodePlayer(self.envs, agent, discount, max_length, np.zeros(1, np.int64))
        self._population = population
        return claims

    def post(self, population: Generation) -> None:
        self._population = population.numpy()

    def play(self, claims: np.ndarray, stop: Stop) -> Iterator[list[Played]]:
        yield self._player.play(self._population, claims, 0, 1, stop)

    def set_heartbeat(self, heartbeat: np.ndarray) -> None:
        self._player.progress = heartbeat


class WorkerPlayers(Players):
    """One in each worker process; the parameters and the claims are in shared memory."""

    envs: WorkerPool

    def start(
        self, agent: Agent, population: Generation, claims: np.ndarray, discount: float, max_length: int
    ) -> np.ndarray:
        self._shared, shared_claims = make_shared_parameters(population), share_zeros(claims, "claims")
        arguments = agent, self.envs.n, discount, max_length
        self.envs.assign(WorkerTask(make_play_handler, (self._shared, shared_claims), arguments))
        return shared_claims.tree

    def post(self, population: Generation) -> None:
        post_parameters(self._shared.tree, population)

    def play(self, claims: np.ndarray, stop: Stop) -> Iterator[list[Played]]:
        pending = self.envs.workers

        def look() -> None:
            claims[-1] |= stop()

        while pending and not claims[-1]:
            for worker in pending:
                claims[claims == worker.index + 1] = 0  # of a process that died
                worker.needs_reset = False  # every episode begins with a reset
                worker.child.start_command(0)
            results = self.envs.wait(pending, look)
            yield from (result.value for result in results if result.done)
            pending = [worker for worker, result in zip(pending, results, strict=True) if not result.done]

    def set_heartbeat(self, heartbeat: np.ndarray) -> None:
        self.envs.heartbeat = heartbeat


def make_players(
    env: EnvConfig, seed: int, n_workers: int, cpus: Sequence[Sequence[int]], supervision: Supervision
) -> Players:
    """One environment in each of `n_workers` processes, all with the same seed; with 0, one in this process."""
    env = replace(env, backend=fixed_backend(env, 1))
    if not n_workers:
        return LocalPlayers(make_envs(env, 1, [seed]), serial.Config())
    supervision, preload = replace(supervision, fresh_seeds=False), ("rlframe.evaluation.players",)
    pool = WorkerPool(env, n_workers, [seed] * n_workers, n_workers, cpus, supervision, preload)
    return WorkerPlayers(pool, cpu.Config(n_workers=n_workers, batch_B=n_workers))


class EpisodePlayer:
    """Plays episodes in one environment with an agent whose parameters it changes, so the agent is its own.

    An episode depends on the policy and its number alone, not on the worker or on earlier episodes. The loop is its
    own: a Collector of several environments, each with its policy, trains ES on CartPole at 0.86 of the rate with 4 of
    them, and at 0.98 with 16, since episodes differ in length and the longest one is played alone.
    """

    def __init__(self, envs: Envs, agent: Agent, discount: float, max_length: int, progress: np.ndarray) -> None:
        """`envs`: a single environment.    `progress`: incremented every step."""
        self.envs, self.progress, self._discount, self._max_length = envs, progress, discount, max_length
        self._powers = discount ** np.arange(_CHUNK)
        self._policy, self._buffers = _on_flat_memory(agent), dict(agent.named_buffers())
        self._rows = rows = empty_rows(envs.observation_space, envs.action_space, _CHUNK, 1)
        self._actions, self._steps = rows.actions(), rows.steps()
        self._write_action = [writer(action) for action in self._actions]
        inputs = AgentInputs(rows.observation, rows.action, rows.reward, rows.first)
        self._pairs = list(zip(leaves(inputs[0]), leaves(inputs[-1]), strict=True))
        self._act = CpuInference(agent, inputs[0], agent.initial_state([0]))
        self._inputs = [self._act.view(inputs[t]) for t in range(_CHUNK)]
        self._noise = self._act.view(agent.no_noise((1,)))
        self._observed = _normalised(agent, rows.observation)

    def play(self, population: Generation, claims: np.ndarray, worker: int, n_workers: int, stop: Stop) -> list[Played]:
        """Play what no other worker has claimed: this worker's own columns in order, then the others' from their end.

        Two workers may claim a column at the same moment. Both then play the same episode.
        """
        for name, buffer in self._buffers.items():
            write(buffer, population.buffers[name])
        first = 1 + int(population.generation[0]) * len(population.seeds)  # number of the first pair's episode
        found: list[Played] = []
        for column in _order(len(claims) - 1, worker, n_workers):
            if claims[column]:
                continue
            claims[column] = worker + 1
            self._perturb(population, column)
            played = self._play(first + column // 2, column, stop)
            if not played:
                claims[column] = 0
                break
            found += played
        return found

    def _perturb(self, population: Generation, column: int) -> None:
        noise_std = population.noise_std[0] * np.float32(1 - 2 * (column % 2))
        epsilon = perturbation(int(population.seeds[column // 2]), len(self._policy))
        np.multiply(epsilon, noise_std, out=epsilon)
        np.add(population.policy, epsilon, out=self._policy)

    def _play(self, number: int, column: int, stop: Stop) -> list[Played]:
        """Play an episode, whose seed `number` decides; none if `stop()` ended it."""
        self.envs.reset(self._steps[-1], number)
        rows, n, ended, factor = self._rows, 0, False, 1.0
        fitness, return_, discounted, nonzero = 0.0, 0.0, 0.0, 0
        sums = [np.zeros((3, *x.shape[1:])) for x in self._observed]  # number, sum, sum of squares
        while not ended and n < self._max_length:
            if stop():
                return []
            for to, row in self._pairs:
                to[...] = row
            k, ended = self._steps_of_chunk(min(_CHUNK, self._max_length - n))
            reward = rows.raw_reward[:k, 0].astype(np.float64)
            fitness += float(rows.reward[1 : k + 1, 0].sum(dtype=np.float64))
            return_ += float(reward.sum())
            discounted += factor * float(reward @ self._powers[:k])
            nonzero += int(np.count_nonzero(reward))
            factor, n = factor * self._discount**k, n + k
            for total, x in zip(sums, self._observed, strict=True):
                seen = x[:k].astype(np.float64)
                total[0], total[1], total[2] = n, total[1] + seen.sum(0), total[2] + np.square(seen).sum(0)
        terminated, diagnostics = ended and bool(rows.terminated[k - 1, 0]), self.envs.pop_diagnostics(0)
        episode = Trajectory(return_, n, terminated, column, diagnostics, discounted, nonzero)
        return [Played(episode, fitness, [_moments(total) for total in sums])]

    def _steps_of_chunk(self, n: int) -> tuple[int, bool]:
        """Take up to n steps; returns how many, and whether the episode ended."""
        act, envs, noise, progress, ended = self._act.step_on, self.envs, self._noise, self.progress, self._rows.ended
        for t in range(n):
            action, _ = act(self._inputs[t], noise)
            self._write_action[t](action)
            envs.step(self._actions[t], self._steps[t])
            progress[0] += 1
            if ended[t, 0]:
                return t + 1, True
        return n, False


def _on_flat_memory(agent: Agent) -> np.ndarray:
    """Move all parameters of an agent into one array [n] float32, in order."""
    flat = as_numpy(flat_parameters(agent.float())).copy()
    lo = 0
    for parameter in agent.parameters():
        hi = lo + parameter.numel()
        parameter.data = torch.from_numpy(flat[lo:hi].reshape(tuple(parameter.shape)))
        lo = hi
    return flat


def _normalised(agent: Agent, observation: Tree) -> list[np.ndarray]:
    """The rows [T+1, *shape] of the observation's vectors that the agent normalises."""
    norms = [norm for norm in agent.modules() if isinstance(norm, ObservationNorm)]
    parts = zip(norms[0].by_leaf, leaves(observation), strict=True) if norms else ()
    return [x[:, 0] for part, x in parts if isinstance(part, RunningNorm)]


def _moments(total: np.ndarray) -> np.ndarray:
    """Number, mean and variance from number, sum and sum of squares."""
    n, mean = total[0], total[1] / total[0]
    return np.stack([n, mean, np.maximum(total[2] / n - np.square(mean), 0.0)])


def _order(n: int, worker: int, n_workers: int) -> list[int]:
    """The columns in the order in which a worker looks at them: its own share, then the others' from their ends."""
    ends = [n * k // n_workers for k in range(n_workers + 1)]
    others = [range(ends[k + 1] - 1, ends[k] - 1, -1) for k in range(n_workers) if k != worker]
    return [*range(ends[worker], ends[worker + 1]), *(column for share in others for column in share)]


def make_play_handler(context: WorkerContext) -> Handler:
    """For workers of a population: the only command plays. The parameters and the claims are shared memory."""
    torch.set_num_threads(1)
    retain_freed_memory()
    shared, claims = context.memory
    agent, n_workers, discount, max_length = context.arguments
    player = EpisodePlayer(context.envs, agent, discount, max_length, context.parent.control[PROGRESS:])
    population: Generation = shared["values"].map(np.copy)
    version = -1

    def handle(command: int, argument: int) -> list[Played]:
        nonlocal version
        player.progress[0] = 0
        version = read_parameters(shared, population, version)
        return player.play(population, claims, context.lo, n_workers, lambda: bool(claims[-1]))

    return handle
