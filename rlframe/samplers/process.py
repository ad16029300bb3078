"""A process for a whole sampler, its environments included: started, watched, and replaced when it dies."""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import signal
from collections.abc import Sequence
from typing import Any

from gymnasium import Space

from rlframe.agents import Agent
from rlframe.core.errors import ConfigError
from rlframe.core.seeding import Role, seed_int
from rlframe.envs import EnvConfig
from rlframe.envs.workers import Supervision, WorkersFailed
from rlframe.samplers import producing
from rlframe.samplers.workers import WorkersConfig
from rlframe.system.process import Child, ChildDied, ChildHung
from rlframe.system.restarts import Restarts
from rlframe.system.shared import Shared

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
        preload = ("rlframe.samplers.producing", *preload)
        method = self.supervision.start_method
        self.child = Child(self.supervision.name, producing.produce, arguments, self.cpus, method, preload)

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
