"""RaySampler and RayCollectors: samplers in actors of Ray, on this machine or on others; `sampler=ray`.

Each actor has an ordinary sampler of its part of the environments, and whole batches come back. With a runner that
takes turns with its sampler all are waited for, as with one sampler; async_rl learns from the first to arrive.
"""

from __future__ import annotations

import copy
import os
import pickle
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import chz
import numpy as np
import torch
from gymnasium import Space

from rlframe.agents import Agent
from rlframe.core.config import count, number, positive
from rlframe.core.parts import ROOTS, part
from rlframe.core.ranks import SamplerRank, current_ranks, first_env_of_rank, use_ranks
from rlframe.core.reduction import over_samplers
from rlframe.core.seeding import Role, generators, new_round, seed_int, spawned
from rlframe.core.struct import as_numpy, write
from rlframe.core.types import BatchSpec, Samples, Trajectory
from rlframe.envs import EnvConfig
from rlframe.rollout.buffer import BatchBuffer
from rlframe.rollout.cpu_worker import parameters
from rlframe.rollout.inference import empty_batch, load_noise, noise_state
from rlframe.samplers.base import Sampler, SamplerConfig, SourceAhead
from rlframe.system.actors import CALL_S, Actors
from rlframe.system.cluster import check_room
from rlframe.system.env_vars import env_vars_of_worker
from rlframe.system.process import SLICE_S
from rlframe.system.service import RestartBudget


@dataclass(frozen=True)
class Result:
    """What an actor sends back: arrays, which may be read-only."""

    samples: Samples
    version: int
    trajectories: bytes  # pickled, since Ray takes longer for many objects
    counters: dict[str, float]


class SamplerActor:
    """Lives in an actor's process: a sampler of a part of the environments."""

    def __init__(self, place: tuple[int, int], config: Any, env: EnvConfig, seed: int, env_vars: Any) -> None:
        os.environ.update(env_vars)
        torch.set_num_threads(1)
        self.ranks, self.config, self.seed, self.version = SamplerRank(*place), config, seed, -1
        self._env = env

    @cached_property
    def envs(self) -> Any:
        """Made in a call: of an error in a constructor, Ray would tell no more than that an actor died."""
        with use_ranks(self.ranks):
            return self.config.make_envs(self._env, self.seed, [()] * max(0, self.config.worker_count()))

    @cached_property
    def sampler(self) -> Sampler:
        envs = self.envs
        with use_ranks(self.ranks):
            sampler: Sampler = self.config.make_sampler(envs, self.agent, self.seed)
            self.config.follow_episodes(sampler)
        return sampler

    def spaces(self) -> tuple[Space, Space, str]:
        return self.envs.observation_space, self.envs.action_space, self.envs.backend

    def start(self, agent: Agent) -> str:
        """Make the sampler; returns its backend."""
        self.agent = agent
        return str(self.sampler.backend)

    def collect(self, version: int, values: Mapping[str, np.ndarray]) -> Result:
        """A batch with these parameters."""
        with use_ranks(self.ranks):
            if version != self.version:
                write(parameters(self.agent), values)
                self.version = version
                self.sampler.refresh(self.agent)
            samples = self.sampler.collect().map(as_numpy)
            finished = pickle.dumps(self.sampler.trajectories())
            return Result(samples, version, finished, self.sampler.counters())

    def noise(self) -> Any:
        return self.sampler.state_dict()["noise"]

    def load_noise(self, noise: list[Any]) -> None:
        self.sampler.load_state_dict({"noise": noise})


@chz.chz
class Config(SamplerConfig):
    """Samplers in actors of Ray, on this machine or on others (extra: rlframe[ray]; keys ray.*)."""

    collects_ahead = True
    on_ray = True

    n_samplers: int = count(2, "actors, each with an equal part of the environments")
    inner: Any = part(ROOTS["sampler"], "serial", "the sampler in each actor", SamplerConfig, fitting=("serial", "cpu"))
    cpus: float = number(1.0, "CPUs of the cluster for each actor", low=0)
    timeout_s: float = positive(120.0, "seconds for a batch after which an actor is killed and replaced")
    max_restarts: int = count(100, "actors that may be replaced within an hour before the run fails", low=0)

    def part_of(self) -> Any:
        """The sampler in each actor."""
        mine = self.divided(self.n_samplers, "sampler.n_samplers")
        inner = self.inner if self.inner.worker_count() >= 0 else self.inner.with_workers(1)
        return chz.replace(inner, **{name: getattr(mine, name) for name in chz.chz_fields(SamplerConfig)})

    def make_envs(self, env: EnvConfig, seed: int, cpus: Sequence[Sequence[int]]) -> RayActors:
        return RayActors(self, self.adapted(env), seed)

    def make_sampler(self, envs: RayActors, agent: Agent, seed: int) -> RaySampler:
        return RaySampler(envs, agent)

    def make_ahead(self, envs: RayActors, agent: Agent, seed: int, n_slots: int) -> RayCollectors:
        return RayCollectors(envs, agent, n_slots)


class RayActors(Actors):
    """Actors with samplers, their parameters, one object for each version, and what came with their batches."""

    def __init__(self, config: Config, env: EnvConfig, seed: int) -> None:
        """Start them and wait for their environments.

        Raises:
            ConfigError: Ray is missing or not connected, or the cluster is too small.    EnvError: as `make_envs`.
        """
        budget = RestartBudget(config.max_restarts, "sampler.max_restarts", "actors", "a single batch")
        super().__init__("sampler=ray", budget, "restarted with fresh seeds")
        self._ranks, self._part_of_each = current_ranks(), config.part_of()
        self.config, self.env, self.seed = config, replace(env, rank=self._ranks.rank), seed
        check_room(config.n_samplers, config.cpus, f"sampler.n_samplers={config.n_samplers}")
        self._made = self.ray.remote(num_cpus=config.cpus, max_restarts=0)(SamplerActor)
        self._agent: list[Any] = []  # a reference to it, once there is one
        self._parameters: Any = None  # a reference to the newest
        self._finished: list[Trajectory] = []
        self._counters: dict[int, dict[str, float]] = {}
        self.version = 0
        self.start(config.n_samplers)
        try:
            found = self.of_all(lambda i: self.actors[i].spaces.remote())
        except BaseException:
            self.close()
            raise
        self.observation_space, self.action_space, self.backend = found[0]

    def launch(self, i: int) -> Any:
        ranks, n = self._ranks, self.config.n_samplers
        place = n * ranks.rank + i, n * ranks.n_samplers
        seed = seed_int(self.seed, Role.RESTART, self.restarts.n) if self.restarts.n else self.seed
        actor = self._made.remote(place, self._part_of_each, self.env, seed, env_vars_of_worker())
        for agent in self._agent:
            actor.start.remote(agent)
        return actor

    def give(self, agent: Agent) -> str:
        """Give all the agent; returns their backend."""
        given = self.ray.put(copy.deepcopy(agent).to("cpu"))
        self.push(agent)
        backends: list[str] = self.of_all(lambda i: self.actors[i].start.remote(given))
        self._agent = [given]
        return backends[0]

    def push(self, agent: Agent) -> None:
        """Batches that are asked for from now on have these parameters."""
        self.version += 1
        self._parameters = self.ray.put({name: as_numpy(x).copy() for name, x in parameters(agent).items()})

    def ask(self, i: int) -> Any:
        """A reference to the next batch of an actor."""
        return self.actors[i].collect.remote(self.version, self._parameters)

    def sure(self, i: int, reference: Any, again: Callable[[], Any], timeout_s: float = CALL_S) -> Any:
        """The value of a call of actor i; that of `again()` if the actor dies or takes too long, and is replaced."""
        while True:
            try:
                return self.get(reference, timeout_s)
            except self.deaths as error:
                self.replace(i, error)
                reference = again()

    def of_all(self, ask: Callable[[int], Any]) -> list[Any]:
        """The values of the calls of all actors that `ask` begins, again for one that is replaced."""
        references = [ask(i) for i in range(len(self.actors))]
        return [self.sure(i, reference, partial(ask, i)) for i, reference in enumerate(references)]

    def take(self, i: int, result: Result, into: BatchBuffer) -> None:
        """Copy the batch of an actor into memory of its size, and keep what else came with it."""
        into.copy(result.samples)
        first = i * result.samples.valid.shape[1]
        self._finished += [replace(each, env=first + each.env) for each in pickle.loads(result.trajectories)]
        self._counters[i], self.early[i] = result.counters, 0

    def trajectories(self) -> list[Trajectory]:
        finished, self._finished = self._finished, []
        return finished

    def counters(self) -> dict[str, float]:
        """Those of the actors as one, and the restarts of actors."""
        return over_samplers([*self._counters.values(), {"sampler/restarts": float(self.restarts.n)}])

    def noise(self) -> list[Any]:
        """The states of all noise generators, in the order of environments."""
        return [state for own in self.of_all(lambda i: self.actors[i].noise.remote()) for state in own]

    def load_noise(self, noise: list[Any]) -> None:
        load_noise(rngs := generators(0, Role.NOISE, len(noise)), noise)
        self.seed = new_round(spawned(rngs))  # of actors that replace others; the earlier run's had others
        n = len(noise) // len(self.actors)
        self.of_all(lambda i: self.actors[i].load_noise.remote(noise[i * n : (i + 1) * n]))


class RaySampler(Sampler):
    """Waits for all actors: the samples of one sampler of all environments.

    After the death of an actor its batch is collected again by another, with new episodes.
    """

    def __init__(self, envs: RayActors, agent: Agent) -> None:
        config, n = envs.config, envs.config.n_samplers
        self.actors, self.config, self.env, self.seed = envs, config, envs.env, envs.seed
        self.batch_spec = BatchSpec(config.batch_T, config.batch_B)
        batch = empty_batch(envs.observation_space, envs.action_space, agent, *self.batch_spec[:2])
        b = config.batch_B // n
        self._samples, self._columns = batch.samples(), [batch.columns(i * b, i * b + b) for i in range(n)]
        self.backend = f"{envs.give(agent)}, in {n} actors of Ray"
        self._end, self._n_restarts = 0, envs.restarts.n

    def collect(self) -> Samples:
        references = [self.actors.ask(i) for i in range(len(self._columns))]
        n_env_steps, limit_s = 0, self.config.timeout_s
        for i, (reference, columns) in enumerate(zip(references, self._columns, strict=True)):
            result = self.actors.sure(i, reference, partial(self.actors.ask, i), limit_s)
            self.actors.take(i, result, columns)
            n_env_steps += result.samples.n_env_steps
        n_restarts, self._n_restarts = self._n_restarts, self.actors.restarts.n
        start = self._end + (self._n_restarts > n_restarts)  # a gap, where open episodes are cut
        self._end = start + self.batch_spec.T
        return replace(self._samples, n_env_steps=n_env_steps, start=start)

    def trajectories(self) -> list[Trajectory]:
        return self.actors.trajectories()

    def refresh(self, agent: Agent) -> None:
        self.actors.push(agent)

    def counters(self) -> dict[str, float]:
        return self.actors.counters()

    def state_dict(self) -> dict[str, Any]:
        return {"noise": self.actors.noise()}

    def load_state_dict(self, state: Mapping[str, Any]) -> list[str]:
        self.actors.load_noise(state["noise"])
        return super().load_state_dict(state)

    def close(self) -> None:
        self.actors.close()


class RayCollectors(SourceAhead):
    """Returns the batches of actors as they arrive; each is at most `n_slots` batches ahead, in a stream of its own."""

    def __init__(self, envs: RayActors, agent: Agent, n_slots: int = 2) -> None:
        config, n = envs.config, envs.config.n_samplers
        self.actors, self.config, self.env, self.seed = envs, config, envs.env, envs.seed
        self.batch_spec = BatchSpec(config.batch_T, config.batch_B // n, n)
        self._batch = empty_batch(envs.observation_space, envs.action_space, agent, *self.batch_spec[:2])
        self._samples, self.n_slots = self._batch.samples(), n_slots
        self.backend = f"{envs.give(agent)}, in {n} actors of Ray"
        n_envs = self.batch_spec.n_envs
        self._noise = spawned(generators(self.seed, Role.NOISE, n_envs, first_env_of_rank(n_envs)))
        self.version = self.posted_version = envs.version
        self._last = -1
        self._pending: list[list[Any]] = []  # references of each actor, oldest first
        self._heard_at = [0.0] * n  # when each was last heard of

    @property
    def n_ready(self) -> int:
        waiting = [each for own in self._pending for each in own]
        return len(self.actors.ray.wait(waiting, num_returns=len(waiting), timeout=0.0)[0]) if waiting else 0

    def _arrived(self, timeout_s: float) -> list[int]:
        """The actors whose oldest batch is there, or that have died; the next in turn comes first."""
        n = len(self._pending)
        order = [(self._last + k) % n for k in range(1, n + 1)]
        if not order:
            return []
        oldest = {self._pending[i][0]: i for i in order}
        found, _ = self.actors.ray.wait(list(oldest), num_returns=1, timeout=timeout_s)
        return [oldest[each] for each in found]

    def wait(self) -> bool:
        if not self._pending:
            self._pending = [[] for _ in self.actors.actors]
            for i in range(len(self._pending)):
                self._ask(i)
        if self._arrived(SLICE_S):
            return True
        self.check()
        return False

    def collect(self) -> Samples:
        while True:
            for i in self._arrived(0.0) if self.wait() else ():
                try:
                    result: Result = self.actors.get(self._pending[i][0])
                except self.actors.deaths as error:
                    self._replace(i, error)
                    continue
                return self._taken(i, result)

    def _taken(self, i: int, result: Result) -> Samples:
        self._pending[i].pop(0)
        self._ask(i)
        self.actors.take(i, result, self._batch)
        self._last, self.version = i, result.version
        samples = result.samples
        return replace(self._samples, n_env_steps=samples.n_env_steps, start=samples.start, stream=i)

    def _ask(self, i: int) -> None:
        self._heard_at[i] = time.monotonic()
        while len(self._pending[i]) < self.n_slots:
            self._pending[i].append(self.actors.ask(i))

    def _replace(self, i: int, error: Exception) -> None:
        self.actors.replace(i, error)
        self._pending[i] = []
        self._ask(i)

    def check(self) -> None:
        """Replace an actor that has not sent a batch for sampler.timeout_s."""
        late = time.monotonic() - self.config.timeout_s
        for i, heard_at in enumerate(self._heard_at if self._pending else ()):
            if heard_at < late and not self.actors.ray.wait([self._pending[i][0]], timeout=0.0)[0]:
                self._replace(i, TimeoutError(f"no batch for {self.config.timeout_s:g} s"))

    def trajectories(self) -> list[Trajectory]:
        return self.actors.trajectories()

    def refresh(self, agent: Agent) -> None:
        self.actors.push(agent)
        self.posted_version = self.actors.version

    def made_with(self) -> dict[str, Any]:
        return {"n_slots": self.n_slots}

    def counters(self) -> dict[str, float]:
        return self.actors.counters()

    def state_dict(self) -> dict[str, Any]:
        """Fresh noise generators: those of the actors are ahead of the learner."""
        return {"noise": noise_state(self._noise)}

    def load_state_dict(self, state: Mapping[str, Any]) -> list[str]:
        rngs = generators(0, Role.NOISE, self.batch_spec.n_envs)
        load_noise(rngs, state["noise"])
        self._noise = spawned(rngs)
        self.actors.load_noise(noise_state(rngs))
        return ["its samplers collect ahead, so a seed does not determine the samples"] * self.batch_spec.n_envs

    def close(self) -> None:
        self.actors.close()
