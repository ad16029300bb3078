"""Play episodes with perturbed copies of a policy: the population of evolution strategies, here or in a worker."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rlframe.agents import Agent
from rlframe.core.errors import warn_once
from rlframe.core.spaces import mask_parts
from rlframe.core.struct import Struct, Tree, as_numpy, leaves, write, writer, zeros_like
from rlframe.core.types import AgentInputs, Array, Trajectory
from rlframe.envs.base import Envs
from rlframe.models.masks import split_mask
from rlframe.models.normalize import ObservationNorm, RunningNorm
from rlframe.ops.evolution import perturbation
from rlframe.rollout.buffer import empty_rows
from rlframe.rollout.inference import CpuInference
from rlframe.rollout.worker_pool import WorkerContext
from rlframe.system.machine import retain_freed_memory
from rlframe.system.shared import read_parameters
from rlframe.system.worker_main import PROGRESS

_CHUNK = 32  # steps between looks at a stop request
_INFO_BYTES = 4096  # of an episode's diagnostics

Stop = Callable[[], bool]


@dataclass(frozen=True, eq=False)
class Population(Struct):
    """A generation: the policies θ + σ ε and θ - σ ε of every seed, so that a worker needs θ and a few numbers.

    Column 2 d of the batch is seed d's first policy, column 2 d + 1 its mirror image. Both play the same episode.
    """

    policy: Array  # [n] float32: θ, all parameters in the order of `agent.parameters()`
    buffers: Tree  # of the agent by name, as running statistics of observations
    seeds: Array  # [D] int64, of ε
    noise_std: Array  # [1] float32: σ
    generation: Array  # [1] int64, from 0


@dataclass(frozen=True, eq=False)
class Generation(Struct):
    """The episodes of a generation, each written by the worker that played it: [P], P = 2 D."""

    claimed: np.ndarray  # int64: 1 + the worker that plays it, or has; 0: none yet
    done: np.ndarray  # bool
    fitness: np.ndarray  # float64: sum of the learning rewards
    return_: np.ndarray  # float64: sum of the environment's own rewards
    discounted: np.ndarray  # float64
    length: np.ndarray  # int64
    nonzero: np.ndarray  # int64: rewards that are not 0
    terminated: np.ndarray  # bool
    moments: Tree  # tuple of float64 [P, 3, *shape]: number, mean and variance of each normalised vector
    infos: np.ndarray  # uint8 [P, _INFO_BYTES]: diagnostics as JSON, then zeros
    stop: np.ndarray  # bool [1]: workers leave their episodes

    def trajectory(self, column: int) -> Trajectory:
        text = bytes(self.infos[column]).rstrip(b"\0")
        return Trajectory(
            return_=float(self.return_[column]),
            length=int(self.length[column]),
            terminated=bool(self.terminated[column]),
            env=column,
            diagnostics=json.loads(text) if text else {},
            discounted_return=float(self.discounted[column]),
            nonzero_rewards=int(self.nonzero[column]),
        )


@dataclass(frozen=True, eq=False)
class EvaluationInfo(Struct):
    """`Samples.info` of a population's batch."""

    length: Array  # [1, P] int64, env_steps of each episode
    moments: Tree  # of its observations, tuple of [1, P, 3, *shape]


def flat_parameters(agent: Agent) -> Tensor:
    """All parameters [n] in one copy."""
    return torch.cat([parameter.detach().reshape(-1) for parameter in agent.parameters()])


def norms_of(agent: Agent) -> list[RunningNorm]:
    """Its running statistics, each of one vector of the observation."""
    return [module for module in agent.modules() if isinstance(module, RunningNorm)]


def population_of(agent: Agent, seeds: np.ndarray, noise_std: float, generation: int) -> Population:
    buffers = {name: buffer.detach() for name, buffer in agent.named_buffers()}
    numbers = np.array([noise_std], np.float32), np.array([generation], np.int64)
    return Population(flat_parameters(agent), buffers, np.asarray(seeds, np.int64), *numbers)


def empty_evaluations(agent: Agent, n: int) -> Generation:
    """Zeros for n episodes."""
    sums = {name: np.zeros(n) for name in ("fitness", "return_", "discounted")}
    counts = {name: np.zeros(n, np.int64) for name in ("claimed", "length", "nonzero")}
    claims = {name: np.zeros(n, bool) for name in ("done", "terminated")}
    moments = tuple(np.zeros((n, 3, *norm.mean.shape)) for norm in norms_of(agent))
    infos = np.zeros((n, _INFO_BYTES), np.uint8)
    return Generation(**sums, **counts, **claims, moments=moments, infos=infos, stop=np.zeros(1, bool))


class Player:
    """Plays episodes in one environment with an agent whose parameters it changes, so the agent is its own.

    An episode depends on the policy and its number alone, not on the worker or on earlier episodes.
    """

    def __init__(self, envs: Envs, agent: Agent, discount: float, max_length: int, progress: np.ndarray) -> None:
        """Args:
        envs: a single environment.    max_length: env_steps after which an episode is cut.
        progress: incremented every step.
        """
        self.envs, self.agent, self.max_length, self.progress = envs, agent, max_length, progress
        self._policy = _on_flat_memory(agent)
        self._buffers = dict(agent.named_buffers())
        self._powers = discount ** np.arange(_CHUNK)
        self._discount = discount
        self._rows = rows = empty_rows(envs.observation_space, envs.action_space, _CHUNK, 1)
        self._actions, self._steps = rows.actions(), rows.steps()
        self._write_action = [writer(action) for action in self._actions]
        inputs = AgentInputs(rows.observation, rows.action, rows.reward, rows.first)
        self._pairs = list(zip(leaves(inputs[0]), leaves(inputs[-1]), strict=True))
        self._act = CpuInference(agent, inputs[0], agent.initial_state([0]))
        self._inputs = [self._act.view(inputs[t]) for t in range(_CHUNK)]
        self._noise = self._act.view(zeros_like(agent.noise(np.random.default_rng(0), ()), (1,)))  # acts greedily
        masked = mask_parts(envs.observation_space, envs.action_space)
        self._observed = _normalised(agent, split_mask(rows.observation)[0] if masked else rows.observation)

    def evaluate(self, population: Population, found: Generation, worker: int, n_workers: int, stop: Stop) -> None:
        """Play what no other worker has claimed: this worker's own columns in order, then the others' from their end.

        Two workers may claim a column at the same moment. Both then write the same numbers.
        """
        claimed, done = found.claimed, found.done
        claimed[(claimed == worker + 1) & ~done] = 0  # of a process that died
        for name, buffer in self._buffers.items():
            write(buffer, population.buffers[name])
        first = 1 + int(population.generation[0]) * len(population.seeds)  # number of the first pair's episode
        for column in _order(len(done), worker, n_workers):
            if claimed[column] or done[column]:
                continue
            claimed[column] = worker + 1
            self._perturb(population, column)
            if not self._play(first + column // 2, found, column, stop):
                claimed[column] = 0
                return
            done[column] = True

    def _perturb(self, population: Population, column: int) -> None:
        noise_std = population.noise_std[0] * np.float32(1 - 2 * (column % 2))
        epsilon = perturbation(int(population.seeds[column // 2]), len(self._policy))
        np.multiply(epsilon, noise_std, out=epsilon)
        np.add(population.policy, epsilon, out=self._policy)

    def _play(self, number: int, found: Generation, column: int, stop: Stop) -> bool:
        """Play an episode, and write it; False if `stop()` ended it. `number` decides its seed."""
        self.envs.reset(self._steps[-1], number)
        sums, moments = np.zeros(4), [np.zeros((3, *x.shape[1:])) for x in self._observed]  # see _add
        n, ended, factor = 0, False, 1.0
        while not ended and n < self.max_length:
            if stop():
                return False
            for to, row in self._pairs:
                to[...] = row
            k, ended = self._steps_of_chunk(min(_CHUNK, self.max_length - n))
            self._add(k, factor, sums, moments)
            factor, n = factor * self._discount**k, n + k
        terminated = bool(self._rows.terminated[k - 1, 0]) and ended
        found.fitness[column], found.return_[column], found.discounted[column], found.nonzero[column] = sums
        found.length[column], found.terminated[column] = n, terminated
        for to, total in zip(found.moments, moments, strict=True):
            to[column] = _moments(total)
        _write_info(found.infos[column], self.envs.pop_diagnostics(0))
        return True

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

    def _add(self, k: int, factor: float, sums: np.ndarray, moments: list[np.ndarray]) -> None:
        """Add k steps to the sums of rewards, and of observations and their squares, in float64."""
        score = self._rows.score[:k, 0].astype(np.float64)
        sums[0] += self._rows.reward[1 : k + 1, 0].sum(dtype=np.float64)
        sums[1] += score.sum()
        sums[2] += factor * (score @ self._powers[:k])
        sums[3] += np.count_nonzero(score)
        for total, x in zip(moments, self._observed, strict=True):
            seen = x[:k].astype(np.float64)
            total[0] += k
            total[1] += seen.sum(0)
            total[2] += np.square(seen).sum(0)


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
    """The rows [T, *shape] of the observation's vectors that the agent normalises."""
    norms = [norm for norm in agent.modules() if isinstance(norm, ObservationNorm)]
    parts = zip(norms[0].parts, leaves(observation), strict=True) if norms else ()
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


def _write_info(place: np.ndarray, numbers: dict[str, float]) -> None:
    text = json.dumps(numbers).encode() if numbers else b""
    if len(text) > len(place):
        warn_once(f"an episode's numbers in info take {len(text):,} bytes, and {len(place):,} fit: they are not logged")
        text = b""
    place[: len(text)] = np.frombuffer(text, np.uint8)
    place[len(text) :] = 0


EVALUATE = 0  # command


class EvaluateHandler:
    """For workers of a population: the parameters and the evaluations are shared memory."""

    def __init__(self, context: WorkerContext) -> None:
        torch.set_num_threads(1)
        retain_freed_memory()
        self._shared, self._found = context.memory
        agent, self._n_workers, discount, max_length = context.arguments
        self._worker, self._version = context.lo, -1
        self._population: Population = self._shared["values"].map(np.copy)
        self._player = Player(context.envs, agent, discount, max_length, context.parent.control[PROGRESS:])

    def __call__(self, command: int, argument: int) -> None:
        self._player.progress[0] = 0
        self._version = read_parameters(self._shared, self._population, self._version)
        stop = self._found.stop
        self._player.evaluate(self._population, self._found, self._worker, self._n_workers, lambda: bool(stop[0]))
