"""A sampler in a process of its own, and what the learner sees of it: batches that were collected ahead."""

from __future__ import annotations

import contextlib
import copy
import logging
import math
import os
import signal
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium import Space

from rlframe.agents import Agent
from rlframe.core.errors import ConfigError
from rlframe.core.seeding import Role, generators, pack_state, seed_int
from rlframe.core.types import BatchSpec, Samples, Trajectory
from rlframe.envs import EnvConfig
from rlframe.rollout.cpu_worker import parameters
from rlframe.rollout.env_pool import Supervision, WorkersFailed
from rlframe.rollout.inference import Pinned, load_noise, noise_state
from rlframe.samplers import background_worker
from rlframe.samplers.background_worker import LOAD_NOISE, Slot, empty_slot
from rlframe.samplers.base import Sampler, WorkersConfig
from rlframe.system.process import SLICE_S, Child, ChildDied, ChildHung
from rlframe.system.restarts import Restarts
from rlframe.system.ring import Ring
from rlframe.system.shared import Shared, make_shared_parameters, post_parameters

_CLOSE_S = 5.0  # for the process and its workers to end in order

_log = logging.getLogger("rlframe")


class SamplerProcess:
    """Has made the environments, and waits for a RemoteSampler to give it its agent.

    A process that dies is replaced by one with fresh seeds, whose environments begin anew.
    """

    observation_space: Space  # of one environment
    action_space: Space

    def __init__(
        self,
        config: Any,
        env: EnvConfig,
        seed: int = 0,
        cpus: Sequence[int] = (),
        worker_cpus: Sequence[Sequence[int]] = (),
        n_threads: int = 1,
        supervision: Supervision | None = None,
    ) -> None:
        """Start the process and wait for its environments.

        Args:
            config: of the sampler, whose `make_envs` and `make_sampler` are called there.
            cpus: that the process is pinned to; none: not pinned.    worker_cpus: the same, of each of its workers.
            n_threads: torch threads that it acts with, where observations are images; else one.
        Raises:
            ConfigError: it cannot be done so.    EnvError: an environment could not be made.
            WorkersFailed: the processes die.
        """
        self.supervision = supervision or Supervision(120.0, 10, name="sampler")
        workers_s = config.timeout_s if isinstance(config, WorkersConfig) else 0.0
        if self.supervision.timeout_s <= workers_s:
            raise ConfigError(
                f"runner.timeout_s={self.supervision.timeout_s} must be above sampler.timeout_s={workers_s}, "
                f"or the sampler's process is taken for hung while it waits for one of its workers"
            )
        self.config, self.env, self.seed, self.cpus = config, env, seed, tuple(cpus)
        self.worker_cpus, self.n_threads = [tuple(each) for each in worker_cpus], n_threads
        most = self.supervision.max_restarts
        self.restarts = Restarts(most, "runner.max_restarts", "the sampler's process", "a single batch")
        self.fruitless = 0  # deaths since it last finished a batch
        self.child: Any = None  # Child, from the first start on
        self._job: tuple[Agent, str, tuple[Shared, ...]] | None = None
        self._begin()

    def run(self, agent: Agent, device: str, memory: tuple[Shared, ...]) -> None:
        """Give the process its agent, to act with on `device`, and the memory to work in, once.

        Raises:
            As the constructor.
        """
        if self._job is not None:
            raise ConfigError("this process has a sampler already; make a SamplerProcess for each")
        self._job = (agent, device, memory)
        try:
            self._brief()
        except ChildDied as death:
            self.replace(death)

    def replace(self, death: ChildDied) -> None:
        """Put another process in the place of one that is gone.

        Raises:
            WorkersFailed: that is no longer bearable.
        """
        self._bury(death)
        self._begin()

    def _begin(self) -> None:
        """Start processes until one has come as far as the one that is gone."""
        while True:
            try:
                self._start()
                self._introduce()
                self._brief()
            except ChildDied as death:
                self._bury(death)
            except BaseException:
                self.close()
                raise
            else:
                return

    def _start(self) -> None:
        n = self.restarts.n
        seed = seed_int(self.seed, Role.RESTART, n) if n else self.seed
        arguments = (self.config, self.env, seed, self.worker_cpus, self.n_threads)
        preload = self.config.preload() if isinstance(self.config, WorkersConfig) else ()
        preload = ("rlframe.samplers.background_worker", *preload)
        method = self.supervision.start_method
        self.child = Child(self.supervision.name, background_worker.produce, arguments, self.cpus, method, preload)

    def _introduce(self) -> None:
        answer = self.child.receive(self.supervision.timeout_s)
        self.observation_space, self.action_space, self.backend = answer

    def _brief(self) -> None:
        """Tell a process that has introduced itself what to do, which it acknowledges."""
        if self._job is not None:
            agent, device, memory = self._job
            self.child.send((copy.deepcopy(agent).to("cpu"), device))
            for shared in memory:
                self.child.hand_over(shared)
            self.backend = self.child.receive(self.supervision.timeout_s)

    def _bury(self, death: ChildDied) -> None:
        """Put away a process that is gone, if that is still bearable."""
        self.fruitless += 1
        what = f"{self.supervision.name} (process {self.child.pid}) {death}"
        if isinstance(death, ChildHung):
            what += "\nIf making, resetting or stepping its environments may take that long, raise runner.timeout_s"
        self.child.close(0.0)
        if objection := self.restarts.objection(self.fruitless):
            raise WorkersFailed(f"{what}; {objection}")
        self.restarts.back_off(self.fruitless)
        _log.warning(f"{what}; restarted with fresh seeds (restart {self.restarts.n})")

    def close(self) -> None:
        """End the process and its workers, in order if they can, by force if not. May be called twice."""
        if self.child is None:
            return
        self.child.stop()
        with contextlib.suppress(ProcessLookupError):  # which breaks off the batch under way
            if self.child.alive:
                os.kill(self.child.pid, signal.SIGUSR2)
        self.child.close(_CLOSE_S)
        for shared in self._job[2] if self._job is not None else ():
            shared.close()


class RemoteSampler(Sampler):
    """Its batches come in the order they were sampled in, each wholly with one version of the parameters.

    That version is the newest there was when the batch began, so not that of the last `refresh`; and one seed does not
    give one history. The process is at most `n_slots` batches ahead, the one that the learner has included.
    """

    def __init__(self, process: SamplerProcess, agent: Agent, n_slots: int = 2, device: str = "cpu") -> None:
        """Args:
        n_slots: batches there is room for.    device: where the process acts.
        """
        self.process = process
        self.batch_spec = spec = BatchSpec(process.config.batch_T, process.config.batch_B)
        self.board = make_shared_parameters(parameters(agent))
        self.ring = Ring(empty_slot(process.observation_space, process.action_space, agent, spec), n_slots, "ring")
        self._samples = [slot.samples() for slot in self.ring.slots]
        self._pinned = Pinned(self.ring.memory, next(agent.parameters()).device)
        self.posted = self.version = int(self.board.tree["version"][0])  # of the newest posting; of the newest batch
        self.waiting = 0  # batches that waited when the newest was taken
        self._finished: list[Trajectory] = []
        self._told: dict[str, float] = {}  # counters of the sampler
        self._restarts_before = 0.0  # of workers of processes that are gone
        self._busy_s, self._asked_at = 0.0, time.monotonic()
        self._noise = _fresh(generators(process.seed, Role.NOISE, spec.B))  # that nobody has drawn from
        self._started = False
        process.run(agent, device, (self.ring.memory, self.board))
        self.backend = f"{process.backend}, in a process of its own"

    @property
    def ready(self) -> bool:
        """Whether `collect` would not wait."""
        return self.ring.n_ready > 0

    def collect(self) -> Samples:
        """The next batch, in memory that stays as it is until the next `collect`."""
        self._pinned.settle()
        if not self._started:
            self._start()
        while True:
            try:
                waiting, index = self.ring.n_ready, self.ring.take(self._timeout_s)
                slot: Slot = self.ring.slots[index]
                if slot.news[0]:
                    self._hear(*self.process.child.receive(self._timeout_s))
                break
            except ChildDied as death:
                self._replace(death)
        self.process.fruitless = 0
        self.version, self.waiting = int(slot.version[0]), waiting
        return self._samples[index]

    def watch(self) -> None:
        """See to it that there is a process, at any time between batches; cheap enough for every update.

        Raises:
            As `collect`.
        """
        if self._started and not self.ready:
            try:
                self.process.child.check(0.0, math.inf)
            except ChildDied as death:
                self._replace(death)

    def _start(self) -> None:
        self._started = True
        self.ring.start(self.process.child)

    def _replace(self, death: ChildDied) -> None:
        self._restarts_before += self._told.pop("sampler/restarts", 0.0)
        self.process.replace(death)
        self._start()

    @property
    def _timeout_s(self) -> float:
        return self.process.supervision.timeout_s

    def _hear(self, trajectories: Sequence[Trajectory], counters: Mapping[str, float]) -> None:
        self._finished += trajectories
        self._told.update(counters)

    def trajectories(self) -> list[Trajectory]:
        """The episodes that ended in the batches collected so far, once."""
        finished, self._finished = self._finished, []
        return finished

    def refresh(self, agent: Agent) -> None:
        """Act with these parameters from the next batch on that has not begun; `posted` is their version."""
        self.posted = post_parameters(self.board.tree, parameters(agent))

    def tell_life(self, life: np.ndarray) -> None:
        """Nothing: the life of the process is in its parent, which `collect` sees to."""

    def counters(self) -> dict[str, float]:
        """Those of the sampler, as of the last second or batch, its own restarts among them; and how much it waits."""
        restarts = self._restarts_before + self._told.get("sampler/restarts", 0.0) + self.process.restarts.n
        return {**self._told, "sampler/restarts": restarts, "time/fraction_sampler_waiting": self._waited()}

    def _waited(self) -> float:
        """The share of the time since the last call that the process waited for a slot."""
        now, busy_s = time.monotonic(), self.process.child.busy_s
        spent = busy_s - self._busy_s if busy_s >= self._busy_s else busy_s  # less: it is another process
        passed = max(now - self._asked_at, 1e-9)
        self._busy_s, self._asked_at = busy_s, now
        return min(1.0, max(0.0, 1.0 - spent / passed))

    def state_dict(self) -> dict[str, Any]:
        """Noise generators that nobody has drawn from: those of the process are ahead of what was learned."""
        return {"noise": noise_state(self._noise)}

    def load_state_dict(self, state: Mapping[str, Any]) -> list[str]:
        """Take on noise generators only, before the first `collect`: environments would not repeat what they did."""
        if self._started:
            raise RuntimeError("a sampler that has begun to collect ahead cannot go back to a saved state")
        child, rngs = self.process.child, generators(0, Role.NOISE, self.batch_spec.B)
        load_noise(rngs, state["noise"])
        self._noise = _fresh(rngs)
        child.begin(LOAD_NOISE)
        try:
            child.send(noise_state(rngs))
            while not (child.wait(SLICE_S) or child.check(SLICE_S, self._timeout_s)):
                pass
        except ChildDied as death:  # the next one draws from fresh ones anyway
            self.process.replace(death)
        return ["its sampler collects ahead, so that one seed does not give one history"] * self.batch_spec.B

    def close(self) -> None:
        self._pinned.close()
        self.process.close()


def _fresh(rngs: Sequence[np.random.Generator]) -> list[np.random.Generator]:
    """As many generators of their own streams, which follow from the states of these."""
    return [np.random.default_rng(pack_state(rng)) for rng in rngs]
