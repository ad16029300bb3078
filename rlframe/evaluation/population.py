"""PopulationSampler: its batch is a generation of perturbed policies, which each play an episode; for evolution."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass, replace
from typing import Any

import numpy as np
import torch

from rlframe.agents import Agent
from rlframe.algos.evolution import EvaluationInfo, Generation, flat_parameters, population_of
from rlframe.core.struct import Tree, as_numpy, leaves, write, writer, zeros_like
from rlframe.core.types import AgentInputs, BatchSpec, Samples, Trajectory
from rlframe.envs import EnvConfig, Envs, make_envs
from rlframe.envs.make import fixed_backend
from rlframe.evaluation.evaluator import EvaluationStopped, Stop, never
from rlframe.models.normalize import ObservationNorm, RunningNorm
from rlframe.ops.evolution import perturbation
from rlframe.rollout.buffer import empty_rows
from rlframe.rollout.episodes import EpisodeStatistic
from rlframe.rollout.inference import CpuInference
from rlframe.rollout.worker_pool import WorkerContext, WorkerPool, WorkerTask
from rlframe.samplers import cpu, serial
from rlframe.samplers.base import Sampler, SamplerConfig
from rlframe.system.machine import retain_freed_memory
from rlframe.system.service import Supervision
from rlframe.system.shared import make_shared_parameters, post_parameters, read_parameters, share_zeros
from rlframe.system.worker_main import PROGRESS, Handler

_CHUNK = 64  # steps between looks at a stop request
_DONE = -1  # in `claims`, where 0 is a column that nobody plays yet, and k + 1 one of worker k


def make_single_envs(
    env: EnvConfig, seed: int, n_workers: int, cpus: Sequence[Sequence[int]], supervision: Supervision
) -> Envs | WorkerPool:
    """One environment in each of `n_workers` processes, all with the same seed; with 0, one in this process."""
    env = replace(env, backend=fixed_backend(env, 1))
    if not n_workers:
        return make_envs(env, 1, [seed])
    supervision, preload = replace(supervision, fresh_seeds=False), ("rlframe.evaluation.population",)
    return WorkerPool(env, n_workers, [seed] * n_workers, n_workers, cpus, supervision, preload)


@dataclass(frozen=True)
class Played:
    """An episode of a generation."""

    episode: Trajectory  # `env` is its column
    fitness: float  # sum of the learning rewards
    moments: list[np.ndarray]  # [3, *shape]: number, mean and variance of each normalised vector


class PopulationSampler(Sampler):
    """Plays the generation of the last `propose`; a row of its samples [1, P] is an episode, its reward the return.

    The same in this process and with any number of workers. A worker that dies is replaced, and plays the episodes that
    it was in again, from the same seeds. A worker without work takes it from the others.
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
        self._stop, self._generation, self._n_finished = never, -1, 0
        self._played: dict[int, Played] = {}  # by column
        self._population = population_of(agent, np.zeros(directions), 0.0, 0)
        self._claims = np.zeros(2 * directions + 1, np.int64)  # of each column, and a stop request for the workers
        self._players: list[EpisodePlayer] = []  # one, or with workers none
        self.config: SamplerConfig = serial.Config()
        options, own = (discount, max_length), copy.deepcopy(agent).to("cpu")
        if isinstance(envs, WorkerPool):
            self.config = cpu.Config(n_workers=envs.n, batch_B=envs.n)
            shared, claims = make_shared_parameters(self._population), share_zeros(self._claims, "claims")
            self._shared, self._claims = shared, claims.tree
            envs.assign(WorkerTask(make_play_handler, (shared, claims), (own, envs.n, *options)))
        else:
            self._players = [EpisodePlayer(envs, own, *options, np.zeros(1, np.int64))]

    def propose(self, population: Generation, stop: Stop = never) -> None:
        """The generation that `collect` plays, until `stop()` returns True."""
        self._stop, self._population, generation = stop, population.numpy(), int(population.generation[0])
        if generation != self._generation:
            self._generation, self._played = generation, {}
        if not self._players:
            post_parameters(self._shared.tree, population)

    def collect(self) -> Samples:
        """Play the episodes of the generation that are not played yet.

        Raises:
            EvaluationStopped: `stop()` returned True; the episodes that ended before are kept.
            EnvError, WorkersFailed.
        """
        self._claims[:] = 0
        self._claims[list(self._played)] = _DONE
        for player in self._players:
            self._add(player.play(self._population, self._claims, 0, 1, self._stop))
        if isinstance(self.envs, WorkerPool):
            self._play_in_workers(self.envs)
        if len(self._played) < self.batch_spec.B:
            raise EvaluationStopped
        self._n_finished = self.batch_spec.B
        return self._samples()

    def _play_in_workers(self, pool: WorkerPool) -> None:
        claims, pending = self._claims, pool.workers

        def look() -> None:
            claims[-1] |= self._stop()

        while pending and not claims[-1]:
            for worker in pending:
                claims[claims == worker.index + 1] = 0  # of a process that died
                worker.needs_reset = False  # every episode begins with a reset
                worker.child.start_command(0)
            results = pool.wait(pending, look)
            for result in results:
                self._add(result.value if result.done else [])
            pending = [worker for worker, result in zip(pending, results, strict=True) if not result.done]

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
        return self.envs.counters() if isinstance(self.envs, WorkerPool) else {}

    def follow_episodes(self, discount: float, statistics: Sequence[Callable[[], EpisodeStatistic]]) -> None:
        """Does nothing: the discount is an argument, and statistics see no steps of workers."""

    def set_heartbeat(self, heartbeat: np.ndarray) -> None:
        if isinstance(self.envs, WorkerPool):
            self.envs.heartbeat = heartbeat
        for player in self._players:
            player.progress = heartbeat

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
        self.envs.close()


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
        self._noise = self._act.view(zeros_like(agent.noise(np.random.default_rng(0), ()), (1,)))  # acts greedily
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
