"""WorkerPool: environments in worker processes, monitored and restarted, for samplers and evaluation; no torch."""

from __future__ import annotations

import atexit
import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from gymnasium import Space

from rlframe.core.arguments import checked
from rlframe.core.errors import ConfigError, pluralize
from rlframe.core.ranks import current_ranks
from rlframe.core.struct import Tree
from rlframe.envs.base import EnvConfig, EnvError, Envs
from rlframe.envs.make import fixed_backend, make_envs
from rlframe.system.env_vars import set_env_vars_of_worker
from rlframe.system.machine import choose_egl_device, n_cpus
from rlframe.system.process import SLICE_S, ChildDied, ChildProcess, close_all
from rlframe.system.service import RestartBudget, Service, Supervision
from rlframe.system.shared import Shared
from rlframe.system.worker_main import Handler, ParentLink

_LEAST_NAP_S, _LONGEST_NAP_S = 2e-5, 1e-3  # between looks for the first that is done


@dataclass(frozen=True)
class WorkerContext:
    """What a handler can use in its worker process."""

    parent: ParentLink
    envs: Envs
    lo: int  # its first environment's column in the whole batch
    generation: int  # 0: the first process of these environments; those that replace it have numbers of their own
    is_replacement: bool  # one of them had already reset its environments
    memory: tuple[Tree, ...]  # the task's shared memory, mapped here
    arguments: tuple[Any, ...]  # the task's arguments, copied


def worker_main(
    parent: ParentLink,
    config: EnvConfig,
    seeds: Sequence[int],
    index: int,
    columns: tuple[int, int],
    generation: int,
    is_replacement: bool,
) -> None:
    """Main function of a worker process: make environments, receive the task, handle commands until told to stop."""
    set_env_vars_of_worker()
    choose_egl_device(index, config.gpus)
    lo, first = columns  # of the first environment: in the whole batch, and over all ranks
    envs = make_envs(config, len(seeds), seeds, first)
    try:
        parent.send((envs.observation_space, envs.action_space, envs.backend))
        make_handler, n_memories, arguments = parent.receive()
        memory = tuple(parent.receive_memory().tree for _ in range(n_memories))
        handle = make_handler(WorkerContext(parent, envs, lo, generation, is_replacement, memory, arguments))
        parent.send(None)
        parent.serve(handle)
    finally:
        envs.close()


@dataclass(frozen=True)
class WorkerTask:
    """What the workers of a pool do: `make_handler` is called in each, and the handler it returns handles commands."""

    make_handler: Callable[[WorkerContext], Handler]
    memory: tuple[Shared, ...]  # mapped in every worker
    arguments: tuple[Any, ...]  # copied to every worker


def split(n: int, n_parts: int) -> list[tuple[int, int]]:
    """Split n columns into adjacent, almost equal parts [(lo, hi), ...]; the larger parts come first."""
    sizes = [n // n_parts + (part < n % n_parts) for part in range(n_parts)]
    ends = np.cumsum(sizes).tolist()
    return [(end - size, end) for size, end in zip(sizes, ends, strict=True)]


class CommandResult(NamedTuple):
    """The result of a command: its return value, or, if the process died (not done), its progress before."""

    done: bool
    value: Any


class Worker(Service):
    """A range of environments and the process that steps them; another process takes over if it dies."""

    def __init__(self, pool: WorkerPool, index: int, columns: tuple[int, int], seeds: Sequence[int]) -> None:
        self.index, (self.lo, self.hi), self.seeds = index, columns, list(seeds)
        n_envs = pluralize(self.hi - self.lo, "environment")
        super().__init__(
            f"{pool.supervision.name} {index}",
            pool.restart_budget,
            f"If making, resetting or stepping its {n_envs} may take that long, raise sampler.timeout_s",
            f", environments {self.lo} to {self.hi - 1}",
        )
        self.generation = 0
        self.envs_started = False  # its environments have been reset once
        self.needs_reset = False  # its process is a replacement whose environments have not been reset
        self._pool = pool
        self._busy_s = self._checked_at = 0.0

    def launch(self) -> ChildProcess:
        return self._pool.launch(self)

    def make_ready(self) -> None:
        self._pool.receive_spaces(self)
        self._pool.give_task(self)

    def died_early(self) -> bool:
        return bool(self.child.progress <= 0)

    def renew(self) -> str:
        self.generation += 1
        self.needs_reset = self.envs_started
        if not self._pool.supervision.fresh_seeds:
            return "restarted with the same seeds"
        sequences = [np.random.SeedSequence(seed, spawn_key=(1, self.generation)) for seed in self.seeds]
        self.seeds = [int(sequence.generate_state(1)[0] >> 1) for sequence in sequences]
        return f"restarted with fresh seeds {self.seeds}"

    def unchecked_s(self) -> float:
        """SLICE_S if it has not been checked for so long, however long that is, as a machine may sleep; else 0."""
        now = time.monotonic()
        if now - self._checked_at < SLICE_S:
            return 0.0
        self._checked_at = now
        return SLICE_S

    def busy_s(self) -> float:
        """Seconds that its process worked since the last call."""
        now = self.child.busy_s
        spent, self._busy_s = max(0.0, now - self._busy_s), now
        return spent


class WorkerPool:
    """B environments split evenly over W worker processes. Not thread-safe.

    A worker that dies or hangs is replaced by a new process with fresh seeds, which runs the same task.
    """

    observation_space: Space  # of one environment
    action_space: Space
    backend: str  # for the log

    @checked
    def __init__(
        self,
        config: EnvConfig,
        n: int,
        seeds: Sequence[int],
        n_workers: int = 2,
        cpus: Sequence[Sequence[int]] = (),
        supervision: Supervision | None = None,
        preload: Sequence[str] = (),
        first: int = 0,
    ) -> None:
        """Start the workers, pinned to `cpus` if given; forkserver imports the `preload` modules once for all.

        `first` is the first environment's index over all ranks.

        Raises:
            ConfigError: invalid arguments.    WorkersFailed: too many processes died.
            EnvError: an environment could not be made, or their spaces differ.
        """
        if not 1 <= n_workers <= n:
            raise ConfigError(
                f"sampler.n_workers={n_workers} must be from 1 to sampler.batch_B={n}: each worker needs an environment"
            )
        if len(seeds) != n:
            raise ValueError(f"n={n} environments need one seed each, got {len(seeds)} seeds")
        if cpus and len(cpus) != n_workers:
            raise ValueError(f"cpus has {len(cpus)} entries, but there are n_workers={n_workers}")
        self.n, self._first, self.supervision = n, first, supervision or Supervision()
        n_threads = config.n_threads or (0 if cpus else max(1, n_cpus() // n_workers))  # 0: one per pinned CPU
        self.env: EnvConfig | None = config
        self.config = replace(config, backend=fixed_backend(config, n), n_threads=n_threads, rank=config.own_rank())
        self.heartbeat = np.zeros(1, np.int64)  # incremented while waiting for workers
        most = self.supervision.max_restarts
        self.restart_budget = RestartBudget(most, "sampler.max_restarts", "workers", "a single step")
        self._preload = ("rlframe.rollout.worker_pool", *preload)
        self._task: WorkerTask | None = None
        self._spaces: list[Any] = []  # spaces and backend of worker 0
        self._cpus = [tuple(each) for each in cpus] or [()] * n_workers
        self.workers = [Worker(self, i, (lo, hi), seeds[lo:hi]) for i, (lo, hi) in enumerate(split(n, n_workers))]
        atexit.register(self.close)
        try:
            self._on_all_workers(Worker.start, self.receive_spaces)
        except BaseException:
            self.close()
            raise
        self.observation_space, self.action_space, backend = self._spaces
        self.backend = f"{pluralize(n_workers, 'worker')} of {backend}"

    def number_from(self, generation: int) -> None:
        """Processes that replace others are numbered from here, and draw seeds that an earlier run's have not had."""
        for worker in self.workers:
            worker.generation = generation

    @property
    def restarts(self) -> int:
        """The number of processes that replaced one that died."""
        return self.restart_budget.n

    def _on_all_workers(self, send: Callable[[Worker], None], receive: Callable[[Worker], None]) -> None:
        """Send to all workers, then receive from all; workers that die are restarted."""
        for worker in self.workers:
            with contextlib.suppress(ChildDied):  # `receive` raises it again
                send(worker)
        for worker in self.workers:
            try:
                receive(worker)
            except ChildDied as death:
                worker.replace(death)

    def launch(self, worker: Worker) -> ChildProcess:
        """Start a process for a worker."""
        columns = worker.lo, self._first + worker.lo
        place = current_ranks().rank * len(self.workers) + worker.index
        arguments = (self.config, worker.seeds, place, columns, worker.generation, worker.envs_started)
        cpus, method = self._cpus[worker.index], self.supervision.start_method
        return ChildProcess(worker.name, worker_main, arguments, cpus, method, self._preload)

    def receive_spaces(self, worker: Worker) -> None:
        """Receive the spaces of a worker's environments, and check that they equal worker 0's."""
        answer = list(self._receive(worker))
        self._spaces = self._spaces or answer
        if answer[:2] != self._spaces[:2]:
            raise EnvError(
                f"{worker.name} (environments {worker.lo} to {worker.hi - 1}) has different spaces from "
                f"{self.workers[0].name}: {answer[0]} and {answer[1]}, not {self._spaces[0]} and "
                f"{self._spaces[1]}; give every environment the same spaces"
            )

    def assign(self, task: WorkerTask) -> None:
        """Give all workers their task. Call it once. Raises the same errors as `wait`."""
        if self._task is not None:
            raise ConfigError("this WorkerPool already belongs to a sampler; make one for each sampler")
        self._task = task
        self._on_all_workers(self._send_task, self._receive)
        for worker in self.workers:
            worker.envs_started = True

    def _send_task(self, worker: Worker) -> None:
        """Send the task to a worker whose spaces have been received."""
        assert self._task is not None
        worker.child.send((self._task.make_handler, len(self._task.memory), self._task.arguments))
        for shared in self._task.memory:
            worker.child.send_memory(shared)

    def give_task(self, worker: Worker) -> None:
        """Send the task, if there is one yet, and wait until the worker has it."""
        if self._task is not None:
            self._send_task(worker)
            self._receive(worker)

    def _receive(self, worker: Worker) -> Any:
        try:
            return worker.child.receive(self.supervision.timeout_s)
        except EnvError as error:
            raise self._with_worker_name(worker, error) from error.__cause__

    def wait(self, workers: Sequence[Worker], look: Callable[[], None] = lambda: None) -> list[CommandResult]:
        """Wait for the commands that were started on some workers. Raises EnvError and WorkersFailed.

        If a process dies or hangs, its command is not done, and the process that replaced it `needs_reset`. `look` is
        called now and then.
        """
        results = self._wait(workers, look)
        for worker, result in zip(workers, results, strict=True):
            if result.done:
                worker.deaths_in_a_row = 0
        return results

    def wait_first(self, workers: Sequence[Worker], wait_s: float) -> list[tuple[Worker, CommandResult]]:
        """Wait until the command of one of some workers is done, and up to `wait_s` seconds for the others.

        Returns those that are done, or whose process has died and was replaced, as of `wait`; raises as that.
        """
        results: dict[int, CommandResult] = {}
        start, nap_s = time.monotonic(), _LEAST_NAP_S
        while True:
            self.heartbeat[0] += 1
            for worker in workers:
                if worker.index not in results:
                    self._poll(worker, 0.0, worker.unchecked_s(), results)
            if len(results) == len(workers) or (results and time.monotonic() - start >= wait_s):
                break
            time.sleep(nap_s)
            nap_s = min(1.5 * nap_s, _LONGEST_NAP_S)
        for worker in workers:
            if worker.index in results and results[worker.index].done:
                worker.deaths_in_a_row = 0
        return [(worker, results[worker.index]) for worker in workers if worker.index in results]

    def call(self, worker: Worker, command: int, argument: int = 0, values: Sequence[Any] = ()) -> Any:
        """Run a command until it is done, with the `values` that its handler receives; returns its value."""
        while True:
            worker.child.start_command(command, argument)
            with contextlib.suppress(ChildDied):  # `_wait` raises it again
                for value in values:
                    worker.child.send(value)
            (result,) = self._wait([worker])
            if result.done:
                return result.value

    def states(self, worker: Worker, command: int) -> list[Any]:
        """The list that a command returns for a worker's environments; None for each if the worker `needs_reset`."""
        found = self.call(worker, command)
        return [None] * (worker.hi - worker.lo) if worker.needs_reset else list(found)

    def _wait(self, workers: Sequence[Worker], look: Callable[[], None] = lambda: None) -> list[CommandResult]:
        """Poll all workers in turn, so that a death is noticed while another worker is slow."""
        results: dict[int, CommandResult] = {}
        while len(results) < len(workers):
            self.heartbeat[0] += 1
            look()
            slice_s = SLICE_S / (len(workers) - len(results))
            for worker in workers:
                if worker.index not in results:
                    self._poll(worker, slice_s, SLICE_S, results)
        return [results[worker.index] for worker in workers]

    def _poll(self, worker: Worker, slice_s: float, waited_s: float, results: dict[int, CommandResult]) -> None:
        """Wait up to `slice_s` for a worker, and check it if it has been waited for `waited_s`, unless that is 0."""
        timeout_s = self.supervision.timeout_s
        try:
            if worker.child.wait(slice_s) or (waited_s and worker.child.check(waited_s, timeout_s)):
                results[worker.index] = CommandResult(True, worker.child.answer(timeout_s))
        except ChildDied as death:
            progress = worker.child.progress
            worker.replace(death)
            results[worker.index] = CommandResult(False, progress)
        except EnvError as error:
            raise self._with_worker_name(worker, error) from error.__cause__

    def _with_worker_name(self, worker: Worker, error: EnvError) -> EnvError:
        return EnvError(f"in {worker.name} (process {worker.child.pid}), {error}")

    def counters(self) -> dict[str, float]:
        """Restarts since the start, and since the last call the busiest worker's working time over the mean."""
        busy = [worker.busy_s() for worker in self.workers]
        mean = sum(busy) / len(busy)
        return {"sampler/restarts": self.restarts, "time/slowest_worker": max(busy) / mean if mean else 1.0}

    def close(self) -> None:
        """Stop all workers, and kill those that do not end within 2 s. May be called twice."""
        children = [worker.child for worker in self.workers if worker.child is not None]
        for child in children:
            child.stop()
        close_all(children, 2.0)
        if self._task is not None:
            for shared in self._task.memory:
                shared.close()
        atexit.unregister(self.close)  # last, so that after an interruption here the exit still closes
