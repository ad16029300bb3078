"""Environments in worker processes: started, split, watched, restarted when they die, and never left behind."""

from __future__ import annotations

import atexit
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from gymnasium import Space

from rlframe.core.errors import ConfigError, ReadableError, counted
from rlframe.core.struct import Tree
from rlframe.envs.base import EnvConfig, EnvError, Envs
from rlframe.envs.make import fixed_backend, make_envs
from rlframe.system.machine import n_cpus
from rlframe.system.process import SLICE_S, Child, ChildDied, ChildHung
from rlframe.system.restarts import Restarts
from rlframe.system.shared import Shared
from rlframe.system.worker_main import Handler, Parent

Program = Callable[["Site"], Handler]


@dataclass(frozen=True)
class Site:
    """What a program finds in its worker."""

    parent: Parent
    envs: Envs
    lo: int  # index of its first environment among all
    incarnation: int  # how many processes have had this place before
    takes_over: bool  # whether the environments of one of them had begun
    memory: tuple[Tree, ...]  # what the program was handed, mapped
    arguments: tuple[Any, ...]  # likewise, copied


def work(parent: Parent, config: EnvConfig, seeds: Sequence[int], lo: int, incarnation: int, takes_over: bool) -> None:
    """The worker's life. Torch is loaded only by programs that need it."""
    envs = make_envs(config, len(seeds), seeds, first=lo)
    try:
        parent.send((envs.observation_space, envs.action_space, envs.backend))
        program, n_memories, arguments = parent.receive()
        memory = tuple(parent.take().tree for _ in range(n_memories))
        handle = program(Site(parent, envs, lo, incarnation, takes_over, memory, arguments))
        parent.send(None)
        parent.serve(handle)
    finally:
        envs.close()


_log = logging.getLogger("rlframe")


class WorkersFailed(ReadableError):
    """Worker processes died more often than is bearable."""


@dataclass(frozen=True)
class Supervision:
    """What happens to workers that die or hang, and what the log calls them."""

    timeout_s: float = 60.0  # without a finished step, or a start, after which a worker is taken for hung
    max_restarts: int = 100  # of all workers together, within an hour
    start_method: str = "forkserver"  # or spawn
    name: str = "worker"  # of each, before its number

    def __post_init__(self) -> None:
        if not self.timeout_s > 0 or self.max_restarts < 0:
            raise ConfigError(
                f"sampler.timeout_s={self.timeout_s} must be above 0, and "
                f"sampler.max_restarts={self.max_restarts} at least 0"
            )


@dataclass(frozen=True)
class Job:
    """The program that workers run, and what it is handed."""

    program: Program
    memory: tuple[Shared, ...]
    arguments: tuple[Any, ...]


def split(n: int, n_parts: int) -> list[tuple[int, int]]:
    """n columns dealt evenly to parts that lie side by side: [(lo, hi), ...], the longer ones first."""
    sizes = [n // n_parts + (part < n % n_parts) for part in range(n_parts)]
    ends = np.cumsum(sizes).tolist()
    return [(end - size, end) for size, end in zip(sizes, ends, strict=True)]


class Answer(NamedTuple):
    """How a command ended: with its value, or (not done) with its process, after so much progress."""

    done: bool
    value: Any


class Worker:
    """One place: a range of environments, and the process that has it now."""

    def __init__(
        self, name: str, index: int, columns: tuple[int, int], seeds: Sequence[int], cpus: Sequence[int]
    ) -> None:
        self.name, self.index, (self.lo, self.hi) = f"{name} {index}", index, columns
        self.seeds, self.cpus = list(seeds), tuple(cpus)
        self.incarnation = 0
        self.fruitless = 0  # deaths since it last finished a step or a command
        self.begun = False  # whether its environments have been reset
        self.took_over = False  # whether its process is new and waits to begin episodes in place of those that were cut
        self.child: Any = None  # Child, from the first start on
        self._busy_s = 0.0

    def busy_s(self) -> float:
        """Seconds that its process has worked since this was last asked."""
        now = self.child.busy_s
        spent, self._busy_s = max(0.0, now - self._busy_s), now
        return spent

    def next_seeds(self) -> None:
        """Fresh seeds, derived from those before."""
        self.incarnation += 1
        self.seeds = [
            int(np.random.SeedSequence([seed, self.incarnation]).generate_state(1)[0] >> 1) for seed in self.seeds
        ]


class EnvPool:
    """B environments in W processes, columns dealt evenly. Samplers give them their program by `run`.

    Owned by one thread.
    """

    observation_space: Space  # of one environment
    action_space: Space
    backend: str  # for the log

    def __init__(
        self,
        config: EnvConfig,
        n: int,
        seeds: Sequence[int],
        n_workers: int = 2,
        cpus: Sequence[Sequence[int]] = (),
        supervision: Supervision | None = None,
        preload: Sequence[str] = (),
    ) -> None:
        """Start the workers and wait for their environments.

        Args:
            cpus: for each worker, the CPUs it is pinned to; empty: none.
            preload: modules that all will need, loaded once for all where the start method allows it.
        Raises:
            ConfigError: it cannot be done so.    EnvError: an environment could not be made, or they differ.
            WorkersFailed: the processes die.
        """
        if not 1 <= n_workers <= n:
            raise ConfigError(
                f"sampler.n_workers={n_workers} must be from 1 to sampler.batch_B={n}: each worker has an environment"
            )
        if len(seeds) != n:
            raise ValueError(f"n={n} environments need as many seeds, got {len(seeds)}")
        if cpus and len(cpus) != n_workers:
            raise ValueError(f"cpus for {len(cpus)} workers were given, and there are {n_workers}")
        self.n, self.supervision = n, supervision or Supervision()
        n_threads = config.n_threads or (0 if cpus else max(1, n_cpus() // n_workers))  # 0: one per CPU it is pinned to
        self.config = replace(config, backend=fixed_backend(config, n), n_threads=n_threads)
        self.life = np.zeros(1, np.int64)  # its number changes as long as workers are waited for, and watched
        self._restarts = Restarts(self.supervision.max_restarts, "sampler.max_restarts", "workers", "a single step")
        self._preload = ("rlframe.rollout.env_pool", *preload)
        self._job: Job | None = None
        self._introduction: list[Any] = []  # spaces and backend, as worker 0 gave them
        self.workers = [
            Worker(self.supervision.name, i, (lo, hi), seeds[lo:hi], cpus[i] if cpus else ())
            for i, (lo, hi) in enumerate(split(n, n_workers))
        ]
        atexit.register(self.close)
        try:
            self._begin_all(self._start, self._introduce)
        except BaseException:
            self.close()
            raise
        backend: str
        self.observation_space, self.action_space, backend = self._introduction
        self.backend = f"{counted(n_workers, 'worker')} of {backend}"

    @property
    def restarts(self) -> int:
        """Processes that replaced one that died."""
        return self._restarts.n

    def _begin_all(self, begin: Callable[[Worker], None], finish: Callable[[Worker], None]) -> None:
        """Side by side; who dies over it is revived."""
        for place in self.workers:
            with contextlib.suppress(ChildDied):  # which `finish` will find again
                begin(place)
        for place in self.workers:
            try:
                finish(place)
            except ChildDied as death:
                self._revive(place, death)

    def _start(self, place: Worker) -> None:
        arguments = (self.config, place.seeds, place.lo, place.incarnation, place.begun)
        method = self.supervision.start_method
        place.child = Child(place.name, work, arguments, place.cpus, method, self._preload)

    def _introduce(self, place: Worker) -> None:
        """Take in what a worker that has been started says of its environments."""
        answer = list(self._receive(place))
        self._introduction = self._introduction or answer
        if answer[:2] != self._introduction[:2]:
            raise EnvError(
                f"{place.name} (environments {place.lo} to {place.hi - 1}) has other spaces than "
                f"{self.workers[0].name}: {answer[0]} and {answer[1]}, not {self._introduction[0]} and "
                f"{self._introduction[1]}; give all the same spaces"
            )

    def run(self, job: Job) -> None:
        """Give every worker its program, once.

        Raises:
            As `finish`.
        """
        if self._job is not None:
            raise ConfigError("these workers have a sampler already; make EnvPool for each sampler")
        self._job = job
        self._begin_all(self._brief, self._receive)
        for place in self.workers:
            place.begun = True

    def _brief(self, place: Worker) -> None:
        """Hand a worker that has introduced itself its program, which it acknowledges."""
        if self._job is not None:
            place.child.send((self._job.program, len(self._job.memory), self._job.arguments))
            for shared in self._job.memory:
                place.child.hand_over(shared)

    def _receive(self, place: Worker) -> Any:
        try:
            return place.child.receive(self.supervision.timeout_s)
        except EnvError as error:
            raise self._named(place, error) from error.__cause__

    def finish(self, places: Sequence[Worker]) -> list[Answer]:
        """Wait for the commands that were begun on some workers.

        Where a process died or hung over it, another with fresh seeds runs the program in its place afterwards: it
        `took_over`, and its environments have not been reset.

        Raises:
            EnvError: an environment failed.    WorkersFailed: deaths are too many.
        """
        answers = self._finish(places)
        for place, answer in zip(places, answers, strict=True):
            if answer.done:
                place.fruitless = 0
        return answers

    def call(self, place: Worker, command: int, argument: int = 0, values: Sequence[Any] = ()) -> Any:
        """Carry out a command, again if need be in another process; its answer. The work receives the `values`."""
        while True:
            place.child.begin(command, argument)
            with contextlib.suppress(ChildDied):  # which `_finish` will find again
                for value in values:
                    place.child.send(value)
            (answer,) = self._finish([place])
            if answer.done:
                return answer.value

    def states(self, place: Worker, command: int) -> list[Any]:
        """What a command answers of each environment of a worker; None of those that have not begun since a death."""
        found = self.call(place, command)
        return [None] * (place.hi - place.lo) if place.took_over else list(found)

    def _finish(self, places: Sequence[Worker]) -> list[Answer]:
        """All are looked at in turn, so that a death is noticed at once also while another works on."""
        answers: dict[int, Answer] = {}
        while len(answers) < len(places):
            self.life[0] += 1
            slice_s = SLICE_S / (len(places) - len(answers))
            for place in places:
                if place.index not in answers:
                    try:
                        if place.child.wait(slice_s) or place.child.check(SLICE_S, self.supervision.timeout_s):
                            answers[place.index] = Answer(True, place.child.answer(self.supervision.timeout_s))
                    except ChildDied as death:
                        progress = place.child.progress
                        self._revive(place, death)
                        answers[place.index] = Answer(False, progress)
                    except EnvError as error:
                        raise self._named(place, error) from error.__cause__
        return [answers[place.index] for place in places]

    def _revive(self, place: Worker, death: ChildDied) -> None:
        """Start processes until one has come as far as the one that is gone."""
        while True:
            self._replace(place, death)
            try:
                self._introduce(place)
                if self._job is not None:
                    self._brief(place)
                    self._receive(place)
            except ChildDied as another:
                death = another
            else:
                return

    def _named(self, place: Worker, error: EnvError) -> EnvError:
        return EnvError(f"in {place.name} (process {place.child.pid}), {error}")

    def _replace(self, place: Worker, death: ChildDied) -> None:
        """Start a process in the place of one that is gone, if that is still bearable."""
        place.fruitless = place.fruitless + 1 if place.child.progress <= 0 else 0
        what = f"{place.name} (process {place.child.pid}, environments {place.lo} to {place.hi - 1}) {death}"
        if isinstance(death, ChildHung):
            n_envs = counted(place.hi - place.lo, "environment")
            what += f"\nIf making, resetting or stepping its {n_envs} may take that long, raise sampler.timeout_s"
        place.child.close(0.0)
        if objection := self._restarts.objection(place.fruitless):
            raise WorkersFailed(f"{what}; {objection}")
        self._restarts.back_off(place.fruitless)
        place.next_seeds()
        place.took_over = place.begun
        _log.warning(f"{what}; restarted with fresh seeds {place.seeds} (restart {self.restarts})")
        self._start(place)

    def counters(self) -> dict[str, float]:
        """Processes replaced since the start; the busiest worker's time over the mean, since the last call."""
        busy = [place.busy_s() for place in self.workers]
        mean = sum(busy) / len(busy)
        return {"sampler/restarts": self.restarts, "sampler/slowest_worker": max(busy) / mean if mean else 1.0}

    def close(self) -> None:
        """End all workers, in order if they can, by force if not. May be called twice."""
        children = [place.child for place in self.workers if place.child is not None]
        for child in children:
            child.stop()
        deadline = time.monotonic() + 2.0
        for child in children:
            child.close(max(0.0, deadline - time.monotonic()))
        if self._job is not None:
            for shared in self._job.memory:
                shared.close()
        atexit.unregister(self.close)  # last: who interrupts us here leaves the rest to the exit
