"""BackgroundSampler: a sampler in a background process, which collects batches ahead of the learner."""

from __future__ import annotations

import contextlib
import copy
import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any

import numpy as np
import torch
from gymnasium import Space

from rlframe.agents import Agent
from rlframe.core.errors import ConfigError, Stopped
from rlframe.core.ranks import SamplerRank, current_ranks, use_ranks
from rlframe.core.seeding import Role, generators, new_round, seed_int, spawned
from rlframe.core.struct import Struct
from rlframe.core.types import Array, BatchSpec, Samples, Trajectory
from rlframe.envs import EnvConfig
from rlframe.models.encoders import has_images
from rlframe.rollout.buffer import BatchBuffer
from rlframe.rollout.cpu_worker import ParameterCopies, parameters
from rlframe.rollout.inference import PinnedMemory, empty_batch, load_noise, noise_state
from rlframe.samplers.base import Sampler, SourceAhead, WorkersConfig
from rlframe.system.machine import retain_freed_memory
from rlframe.system.process import SLICE_S, ChildDied, ChildProcess
from rlframe.system.ring import FILL, BatchRing, fill_handler
from rlframe.system.service import RestartBudget, Service, Supervision
from rlframe.system.shared import Shared, make_shared_parameters, post_parameters
from rlframe.system.worker_main import PROGRESS, ParentLink

SUPERVISION = Supervision(120.0, 10, name="sampler")  # where none is given
_LOAD_NOISE = 1  # command besides FILL; only before the first FILL
_MESSAGE_INTERVAL_S = 1.0  # between messages with the sampler's counters
CLOSE_S = 5.0  # for the process and its workers to end by themselves


@dataclass(frozen=True, eq=False)
class BatchSlot(Struct):
    """One batch in the ring; its `raw_reward` and `ended` are not used."""

    batch: BatchBuffer
    version: Array  # [1] int64: of the parameters that sampled the batch
    numbers: Array  # [3] int64: n_env_steps, start and stream of the samples
    has_message: Array  # [1] bool: the process sent a message with the batch


class BackgroundProcess(Service):
    """Makes the environments in a background process, which waits for a BackgroundSampler to send its agent.

    If the process dies, it is replaced by one with fresh seeds, which starts new episodes.
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
        part: tuple[int, int] = (0, 1),
    ) -> None:
        """Start the process and wait for its environments.

        Args:
            config: of the sampler; its `make_envs` and `make_sampler` are called in the process.
            cpus, worker_cpus: for the process, and for each of its workers; empty: not pinned.
            n_threads: torch threads for acting on images; otherwise one is used.
            part: its number among the processes that sample for this one, and how many there are.
        Raises:
            ConfigError: invalid arguments.    EnvError: an environment could not be made.
            WorkersFailed: too many processes died.
        """
        self.supervision = supervision or SUPERVISION
        workers_s = config.timeout_s if isinstance(config, WorkersConfig) else 0.0
        if self.supervision.timeout_s <= workers_s:
            raise ConfigError(
                f"runner.sampler_timeout_s={self.supervision.timeout_s} must be above sampler.timeout_s={workers_s}; "
                f"otherwise the sampler's process is killed as hung while it waits for one of its workers"
            )
        self.config, self.seed, self.cpus = config, seed, tuple(cpus)
        ranks, (i, n) = current_ranks(), part
        self.env, self.place = replace(env, rank=ranks.rank), (n * ranks.rank + i, n * ranks.n_samplers)
        self.worker_cpus, self.n_threads = [tuple(each) for each in worker_cpus], n_threads
        most = self.supervision.max_restarts
        super().__init__(
            self.supervision.name,
            RestartBudget(most, "runner.max_restarts", "the sampler's process", "a single batch"),
            "If making, resetting or stepping its environments may take that long, raise runner.sampler_timeout_s",
        )
        self._task: tuple[Agent, str, tuple[Shared, ...]] | None = None
        try:
            self.start()
            with self._replacing():
                self.make_ready()
        except BaseException:
            self.close()
            raise

    def assign(self, agent: Agent, device: str, memory: tuple[Shared, ...]) -> None:
        """Send the agent, its device and the shared memory. Call it once. Raises the same errors as the constructor."""
        if self._task is not None:
            raise ConfigError("this process already belongs to a sampler; make one BackgroundProcess for each")
        self._task = (agent, device, memory)
        with self._replacing():
            self.child.send(self._acts_with())
            self._send_memory()
            self.backend = self.child.receive(self.supervision.timeout_s)

    @contextlib.contextmanager
    def _replacing(self) -> Iterator[None]:
        """Replace the process if it dies inside."""
        try:
            yield
        except ChildDied as death:
            self.replace(death)

    def launch(self) -> ChildProcess:
        seed = seed_int(self.seed, Role.RESTART, n) if (n := self.restarts.n) else self.seed
        arguments = (self.place, self.config, self.env, seed, self.worker_cpus, self.n_threads, self._acts_with())
        preload = self.config.preload() if isinstance(self.config, WorkersConfig) else ()
        preload = ("rlframe.samplers.background", *preload)
        return ChildProcess(self.name, background_main, arguments, self.cpus, self.supervision.start_method, preload)

    def make_ready(self) -> None:
        """Wait for the environments of a process that has no task yet."""
        if self._task is None:
            self.observation_space, self.action_space, self.backend = self.child.receive(self.supervision.timeout_s)
        else:
            self._send_memory()

    def renew(self) -> str:
        return "restarted with fresh seeds"

    def _acts_with(self) -> tuple[Agent, str] | None:
        """The agent as it is now, and its device; None before there is a task."""
        return None if self._task is None else (copy.deepcopy(self._task[0]).to("cpu"), self._task[1])

    def _send_memory(self) -> None:
        for shared in self._task[2] if self._task is not None else ():
            self.child.send_memory(shared)

    def stop(self) -> None:
        """Ask the process to end, without waiting for it."""
        if self.child is None:
            return
        self.child.stop()
        with contextlib.suppress(ProcessLookupError):
            if self.child.alive:
                os.kill(self.child.pid, signal.SIGUSR2)  # interrupts the current batch

    def close(self, grace_s: float = CLOSE_S) -> None:
        """Stop the process and its workers, and kill them if they do not end within `grace_s`. May be called twice."""
        if self.child is None:
            return
        self.stop()
        self.child.close(grace_s)
        for shared in self._task[2] if self._task is not None else ():
            shared.close()


class BackgroundSampler(SourceAhead):
    """Returns the batches of a BackgroundProcess in order, each sampled with one version of the parameters.

    That is the newest version at the start of the batch, which may be older than the last `refresh`, so a seed does not
    determine the samples. The process is at most `n_slots` batches ahead, including the one that the learner uses.
    """

    def __init__(
        self,
        process: BackgroundProcess,
        agent: Agent,
        n_slots: int = 2,
        device: str = "cpu",
        shared_parameters: Shared | None = None,
    ) -> None:
        """The ring has `n_slots` batches, and the process acts on `device`.

        `shared_parameters`: those of `make_shared_parameters`, if several samplers read the same.
        """
        self.process, self._timeout_s = process, process.supervision.timeout_s
        self.config, self.env, self.seed = process.config, process.env, process.seed
        self.batch_spec = spec = BatchSpec(process.config.batch_T, process.config.batch_B)
        self.shared_parameters = shared_parameters or make_shared_parameters(parameters(agent))
        batch = empty_batch(process.observation_space, process.action_space, agent, spec.T, spec.B)
        slot = BatchSlot(batch, np.zeros(1, np.int64), np.zeros(3, np.int64), np.zeros(1, np.bool_))
        self.ring = BatchRing(slot, n_slots, "ring")
        self._samples = [slot.batch.samples() for slot in self.ring.slots]
        self._pinned = PinnedMemory(self.ring.memory, next(agent.parameters()).device)
        self.posted_version = int(self.shared_parameters.tree["version"][0])  # of the last `refresh`
        self.version = self.posted_version  # of the last batch
        self._finished: list[Trajectory] = []
        self._counters: dict[str, float] = {}  # of the sampler in the process
        self._previous_restarts = 0.0  # of workers of earlier processes
        self._busy_s, self._counted_at, self._started = 0.0, time.monotonic(), False
        rngs = generators(process.seed, Role.NOISE, spec.B, process.place[0] * spec.B)
        self._noise = spawned(rngs)  # never drawn from
        process.assign(agent, device, (self.ring.memory, self.shared_parameters))
        self.backend = f"{process.backend}, in a background process"

    @property
    def n_ready(self) -> int:
        return self.ring.n_ready

    def wait(self) -> bool:
        self.start()
        try:
            return self.ring.wait(self._timeout_s)
        except ChildDied as death:
            self._replace(death)
            return False

    def collect(self) -> Samples:
        """The next batch, valid until the next `wait` or `collect`."""
        self.start()
        while True:
            try:
                index = self.ring.get(self._timeout_s)
                slot: BatchSlot = self.ring.slots[index]
                if slot.has_message[0]:
                    trajectories, counters = self.process.child.receive(self._timeout_s)
                    self._finished += trajectories
                    self._counters.update(counters)
                break
            except ChildDied as death:
                self._replace(death)
        self.process.deaths_in_a_row = 0
        self.version = int(slot.version[0])
        n_env_steps, start, stream = slot.numbers.tolist()
        return replace(self._samples[index], n_env_steps=n_env_steps, start=start, stream=stream)

    def made_with(self) -> dict[str, Any]:
        return {"n_slots": len(self.ring.slots)}

    def check(self, waited_s: float = 0.0) -> None:
        """Replace the process if it has died, or hangs, which so many more seconds count for; raises as `collect`."""
        if self._started and not self.ring.n_ready:
            try:
                self.process.child.check(0.0 if self.ring.is_full else waited_s, self._timeout_s)
            except ChildDied as death:
                self._replace(death)

    def start(self) -> None:
        """Let the process collect, and go on if it has a single slot; the first `collect` does it."""
        self._pinned.synchronize()
        if not self._started:
            self._started = True
            self.ring.start(self.process.child)
        self.ring.free_if_single()

    def _replace(self, death: ChildDied) -> None:
        self._previous_restarts += self._counters.pop("sampler/restarts", 0.0)
        self.process.replace(death)
        self._started = False
        self.start()

    def trajectories(self) -> list[Trajectory]:
        finished, self._finished = self._finished, []
        return finished

    def refresh(self, agent: Agent) -> None:
        """Act with these parameters from the next batch that starts; `posted_version` is their version."""
        self.posted_version = post_parameters(self.shared_parameters.tree, parameters(agent))

    def counters(self) -> dict[str, float]:
        """The sampler's counters, at most a second or a batch old, and the share of time that the process waited."""
        restarts = self._previous_restarts + self._counters.get("sampler/restarts", 0.0) + self.process.restarts.n
        return {**self._counters, "sampler/restarts": restarts, "time/fraction_sampler_waiting": self._waiting()}

    def _waiting(self) -> float:
        """The fraction of the time since the last call that the process waited for a free slot."""
        now, busy_s = time.monotonic(), self.process.child.busy_s
        worked = busy_s - self._busy_s if busy_s >= self._busy_s else busy_s  # less: the process is a new one
        passed = max(now - self._counted_at, 1e-9)
        self._busy_s, self._counted_at = busy_s, now
        return min(1.0, max(0.0, 1.0 - worked / passed))

    def state_dict(self) -> dict[str, Any]:
        """Fresh noise generators: those of the process are ahead of the learner."""
        return {"noise": noise_state(self._noise)}

    def load_state_dict(self, state: Mapping[str, Any]) -> list[str]:
        """Continue from noise generators only, before the first `collect`; all episodes restart."""
        if self._started:
            raise RuntimeError("load_state_dict must come before the first collect; make a new BackgroundSampler")
        child, rngs = self.process.child, generators(0, Role.NOISE, self.batch_spec.B)
        load_noise(rngs, state["noise"])
        self._noise = spawned(rngs)
        self.process.seed = new_round(spawned(self._noise))  # of the next processes; the earlier run's had others
        child.start_command(_LOAD_NOISE)
        try:
            child.send(noise_state(rngs))
            while not (child.wait(SLICE_S) or child.check(SLICE_S, self._timeout_s)):
                pass
        except ChildDied as death:  # the next process uses fresh generators anyway
            self.process.replace(death)
        return ["its sampler collects ahead, so a seed does not determine the samples"] * self.batch_spec.B

    def release(self) -> None:
        """Let go of memory on the device's side, before the process is closed. May be called twice."""
        self._pinned.close()

    def close(self) -> None:
        self.release()
        self.process.close()


def background_main(parent: ParentLink, place: tuple[int, int], *work: Any) -> None:
    """Main function of the process: make environments, receive the task, fill slots until told to stop."""
    with use_ranks(SamplerRank(*place)):
        _serve(parent, *work)


def _serve(
    parent: ParentLink,
    config: Any,
    env: EnvConfig,
    seed: int,
    worker_cpus: Sequence[Sequence[int]],
    n_threads: int,
    acts_with: tuple[Agent, str] | None,
) -> None:
    retain_freed_memory()
    signal.signal(signal.SIGUSR2, _exit)
    envs = config.make_envs(env, seed, worker_cpus)
    try:
        torch.set_num_threads(n_threads if has_images(envs.observation_space) else 1)
        if acts_with is None:  # else it replaces another, and nobody waits for it
            parent.send((envs.observation_space, envs.action_space, envs.backend))
        agent, device = acts_with or parent.receive()
        slots, shared_parameters = parent.receive_memory().tree, parent.receive_memory().tree
        agent.to(torch.device(device))
        sampler: Sampler = config.make_sampler(envs, agent, seed)
        config.follow_episodes(sampler)
        filler = _SlotFiller(parent, sampler, agent, shared_parameters)
        if acts_with is None:
            parent.send(sampler.backend)
        fill = fill_handler(slots, filler.fill)

        def handle(command: int, argument: int) -> None:
            if command == FILL:
                fill(command, argument)
            else:
                sampler.load_state_dict({"noise": parent.receive()})

        parent.serve(handle)
    finally:
        signal.signal(signal.SIGUSR2, _ignore)
        envs.close()


def _exit(signum: int, frame: FrameType | None) -> None:
    """Interrupt the current batch, and exit with clean-up."""
    signal.signal(signum, _ignore)
    raise Stopped(0)


def _ignore(signum: int, frame: FrameType | None) -> None:
    """Does nothing. With SIG_IGN, Python would print an error for a signal that arrived just before."""


class _SlotFiller:
    """Fills slots with batches, each sampled with the newest parameters at its start."""

    def __init__(self, parent: ParentLink, sampler: Sampler, agent: Agent, shared_parameters: Any) -> None:
        self.parent, self.sampler, self.agent = parent, sampler, agent
        self.copies = ParameterCopies(agent, shared_parameters)
        self.heartbeat = parent.control[PROGRESS:]
        self.sent_at = time.monotonic()
        sampler.set_heartbeat(self.heartbeat)

    def fill(self, slot: BatchSlot) -> None:
        self.heartbeat[0] += 1
        if self.copies.refresh():
            self.sampler.refresh(self.agent)
        samples = self.sampler.collect()
        slot.batch.copy(samples)
        slot.version[0] = self.copies.version
        slot.numbers[...] = samples.n_env_steps, samples.start, samples.stream
        slot.has_message[0] = self._send_message()

    def _send_message(self) -> bool:
        """Send the episodes that ended, and once a second the counters; returns whether anything was sent."""
        trajectories, counters = self.sampler.trajectories(), {}
        if time.monotonic() - self.sent_at > _MESSAGE_INTERVAL_S:
            counters, self.sent_at = self.sampler.counters(), time.monotonic()
        if trajectories or counters:
            self.parent.send((trajectories, counters))
        return bool(trajectories or counters)
