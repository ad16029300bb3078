"""How a master should hand a time step over to W worker processes and wait for them: the hot spot of parallel sampling.

    python -m benchmarks.handover
    python -m benchmarks.handover rounds=9 workers=2,8 only=semaphore,yield10-rest out=handover.json
    python -m benchmarks.handover small=true     a smoke run; its numbers mean nothing

The ways differ in what carries a wake-up, `go` to each worker and `done` back, and in how the master waits for all:

  semaphore            multiprocessing.Semaphore, one per worker and direction; the master waits for them in order
  semaphore-backwards  the same, but it waits for the last worker first, the one that it also woke last
  semaphore-shared     one `done` for all, which it takes W times
  semaphore-last       the last to finish alone wakes it: the others find one of W - 1 tokens in a counting semaphore
  pipe                 multiprocessing.Pipe, send_bytes and recv_bytes: what everybody uses; no timeout
  spin20, spin50, ...  semaphore-backwards, but whoever waits tries for so many us before it sleeps; or only the master
  yield10, yield30     semaphore-backwards, but whoever waits tries so many times before it sleeps, with os.sched_yield
                       in between: about 0.6 us on an idle core; on a busy one, until the others have had their turn
  yield10-rest, ...    the same, but whoever finds that a yield took YIELD_S only sleeps, for the next REST waits

A token posted before its waiter sleeps is still there: no wake-up is lost. Who spins tries to take the very token that
it would sleep for: no flag, no fence, and faster from Python than reading a flag in shared memory. All are memory
barriers: data written before a post are seen after the wait. Every sleep but a pipe's ends after SLICE_S, as it must if
deaths are to be noticed. Left out, as they gained nothing for few workers and lost for many: os.eventfd, unnamed
semaphores in a memfd (sem_init) and futexes (FUTEX_WAKE_OP counts those done), the latter two through ctypes.

How. Workers are spawned for each W and pinned to the cores in turn; the master may run on all. A turn is some hundred
steps of one way; the ways take turns, for `rounds` rounds, in each scenario: in a step each worker computes for `work`
us of its CPU time, and between steps the master does so for `acting` us while they wait. A neighbour is a process that
is no part of this and computes on the last core all the time. Printed are medians over the rounds, per step: the time
over the ideal (acting + work * ceil(W / cores)), its lowest and highest, and the CPU time that workers, together, and
the master burnt beside their work. Virtual machines wake an idle core far slower than real ones. Linux only.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import platform
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import chz

from benchmarks.parts.chosen import chosen

SLICE_S = 0.2  # longest sleep
YIELD_S, REST = 1e-3, 1000  # a neighbour keeps a core for 3 to 4 ms; so one such yield in REST waits costs 4 us a wait
WARM_UP = 5  # steps of a turn that are not timed, without work
COLUMNS = ("steps/s", "over", "lowest", "highest", "workers", "master")
SPAWN = multiprocessing.get_context("spawn")


class Signal(Protocol):
    """Tokens that one process posts and another takes, asleep until there is one."""

    def post(self) -> None: ...
    def wait(self) -> None: ...


def patiently(take: Callable[[], bool]) -> None:
    """Call `take`, which sleeps for SLICE_S at most, until it is true; between the calls one would look for deaths."""
    for _ in range(150):
        if take():
            return
    raise TimeoutError(f"nothing within {150 * SLICE_S} s")


class Semaphore:
    """Its name in /dev/shm goes when the master ends, or with the resource tracker's help when that is killed."""

    def __init__(self) -> None:
        self.semaphore = SPAWN.Semaphore(0)

    def post(self) -> None:
        self.semaphore.release()

    def wait(self) -> None:
        patiently(partial(self.semaphore.acquire, True, SLICE_S))


class Spinning(Semaphore):
    """Tries for `spin_us`, then sleeps."""

    def __init__(self, spin_us: float) -> None:
        super().__init__()
        self.spin_s = spin_us * 1e-6

    def wait(self) -> None:
        end = time.perf_counter() + self.spin_s
        while not self.semaphore.acquire(False):
            if time.perf_counter() > end:
                super().wait()
                break


class Yielding(Semaphore):
    """Tries `tries` times with a yield in between, then sleeps; rests from that for `rest` waits after a long yield."""

    def __init__(self, tries: int, rest: int = 0) -> None:
        super().__init__()
        self.tries, self.rest, self.resting = tries, rest, 0

    def wait(self) -> None:
        self.resting = max(self.resting - 1, 0)
        for _ in range(0 if self.resting else self.tries):
            if self.semaphore.acquire(False):
                return
            start = time.perf_counter()
            os.sched_yield()
            if time.perf_counter() - start > YIELD_S and self.rest:
                self.resting = self.rest
                break
        super().wait()


class Pipe:
    """A byte through a pair of sockets."""

    def __init__(self) -> None:
        self.here, self.there = SPAWN.Pipe()

    def post(self) -> None:
        self.here.send_bytes(b"1")

    def wait(self) -> None:
        self.there.recv_bytes()


class Way:
    """`start` and `wait` are the master's, `await_start` and `finish` those of worker i."""

    def __init__(self, W: int, go: Callable[[], Signal], done: Callable[[], Signal], backwards: bool = False) -> None:
        self.go, self.done = [go() for _ in range(W)], [done() for _ in range(W)]
        self.order = range(W)[::-1] if backwards else range(W)

    def start(self) -> None:
        for signal in self.go:
            signal.post()

    def wait(self) -> None:
        for i in self.order:
            self.done[i].wait()

    def await_start(self, i: int) -> None:
        self.go[i].wait()

    def finish(self, i: int) -> None:
        self.done[i].post()


class Shared(Way):
    def wait(self) -> None:
        for _ in self.done:
            self.done[0].wait()

    def finish(self, i: int) -> None:
        self.done[0].post()


class LastWakes(Way):
    def __init__(self, W: int, go: Callable[[], Signal], done: Callable[[], Signal]) -> None:
        super().__init__(W, go, done)
        self.others = SPAWN.Semaphore(W - 1)

    def wait(self) -> None:
        self.done[0].wait()
        for _ in self.done[1:]:
            self.others.release()  # all are waiting for their next start: nobody takes one now

    def finish(self, i: int) -> None:
        if not self.others.acquire(False):
            self.done[0].post()


def make_ways(W: int) -> dict[str, Way]:
    """All ways, by name."""
    backwards = partial(Way, W, backwards=True)
    tries = {f"yield{n}{'-rest' * bool(rest)}": partial(Yielding, n, rest) for rest in (0, REST) for n in (10, 30)}
    return {
        "semaphore": Way(W, Semaphore, Semaphore),
        "semaphore-backwards": backwards(Semaphore, Semaphore),
        "semaphore-shared": Shared(W, Semaphore, Semaphore),
        "semaphore-last": LastWakes(W, Semaphore, Semaphore),
        "pipe": Way(W, Pipe, Pipe),
        **{f"spin{us}": backwards(partial(Spinning, us), partial(Spinning, us)) for us in (20, 50, 100)},
        "spin50-master": backwards(Semaphore, partial(Spinning, 50)),
        **{name: backwards(make, make) for name, make in tries.items()},
    }


def compute(us: float) -> None:
    """For so long of this process's CPU time, which stands still while others have the core."""
    clock, end = time.process_time_ns, time.process_time_ns() + us * 1e3
    while us and clock() < end:
        pass


def serve(ways: dict[str, Way], i: int, connection: Connection) -> None:
    """Worker i: takes part in a turn whenever told to, and answers with the CPU time it took [us]."""
    while True:
        name, steps, work = connection.recv()
        way, begin = ways[name], time.process_time()
        for step in range(-WARM_UP, steps):
            way.await_start(i)
            compute(work if step >= 0 else 0)
            way.finish(i)
        connection.send((time.process_time() - begin) * 1e6)


@dataclass(frozen=True)
class Scenario:
    W: int
    work: int  # us of each worker in a step
    acting: int  # us of the master between steps
    neighbour: bool = False

    def ideal(self) -> int:
        return self.acting + self.work * math.ceil(self.W / len(os.sched_getaffinity(0)))


def turn(way: Way, name: str, scenario: Scenario, steps: int, connections: list[Connection]) -> list[float]:
    """Time over the ideal, and CPU time that the workers and the master burnt, in us a step."""
    for connection in connections:
        connection.send((name, steps, scenario.work))
    begin = cpu = 0.0
    for step in range(-WARM_UP, steps):
        if step == 0:
            begin, cpu = time.perf_counter(), time.process_time()
        compute(scenario.acting if step >= 0 else 0)
        way.start()
        way.wait()
    passed, cpu = time.perf_counter() - begin, time.process_time() - cpu
    workers = sum(connection.recv() for connection in connections) / steps - scenario.W * scenario.work
    return [passed / steps * 1e6 - scenario.ideal(), workers, cpu / steps * 1e6 - scenario.acting]


def spawn(stack: ExitStack, core: int, target: Callable[..., None], *args: Any) -> None:
    """Start a process on a core; it is killed when the stack unwinds."""
    process = SPAWN.Process(target=target, args=args, daemon=True)
    process.start()
    stack.callback(process.kill)
    os.sched_setaffinity(process.pid or 0, [core])


def measure(scenarios: list[Scenario], only: list[str], rounds: int, seconds: float) -> list[dict[str, Any]]:
    """The ways of these names in scenarios of the same W and neighbour, printed as they come."""
    W, cores, lines = scenarios[0].W, sorted(os.sched_getaffinity(0)), []
    ways = {name: way for name, way in make_ways(W).items() if name in only}
    pipes = [SPAWN.Pipe() for _ in range(W)]
    with ExitStack() as stack:
        for i, (_, theirs) in enumerate(pipes):
            spawn(stack, cores[i % len(cores)], serve, ways, i, theirs)
        if scenarios[0].neighbour:
            spawn(stack, cores[-1], compute, math.inf)
        for scenario in scenarios:
            print(f"\n{scenario}, ideal {scenario.ideal()} us\n{'':<20}" + (" {:>9}" * len(COLUMNS)).format(*COLUMNS))
            run = partial(turn, scenario=scenario, connections=[ours for ours, _ in pipes])
            steps = math.ceil(seconds * 1e6 / (scenario.ideal() + 25 * W))
            found = [{name: run(way, name, steps=steps) for name, way in ways.items()} for _ in range(rounds)]
            for name in ways:
                over, workers, master = (list(column) for column in zip(*(row[name] for row in found), strict=True))
                lines.append({"way": name, **asdict(scenario), "over": over, "workers": workers, "master": master})
                median, *burnt = (statistics.median(column) for column in (over, workers, master))
                row = (1e6 / (scenario.ideal() + median), median, min(over), max(over), *burnt)
                print(f"{name:<20}" + (" {:>9,.0f}" + " {:>9,.1f}" * 5).format(*row), flush=True)
    return lines


def main(
    rounds: int = 5, seconds: float = 0.03, workers: str = "1,2,4,8", only: str = "", small: bool = False, out: str = ""
) -> None:
    """Measure and print.

    Args:
        rounds: turns of each way.    seconds: about the length of a turn.    workers: W, separated by commas.
        only: ways, separated by commas.    small: one very short round.    out: JSON file for all that was measured."""
    known = list(make_ways(1))
    groups = chosen(only, known)
    rounds, seconds, workers = (1, 0.001, "1,2") if small else (rounds, seconds, workers)
    print(f"{platform.platform()}, {len(os.sched_getaffinity(0))} cores, Python {platform.python_version()}")
    lines = []
    for W in map(int, workers.split(",")):
        alone = [Scenario(W, work, acting) for acting, work in product((0, 100), (0, 50, 200))]
        for scenarios in alone, [Scenario(W, 50, 0, neighbour=True)]:
            lines += measure(scenarios, groups, rounds, seconds)
    if out:
        Path(out).write_text(json.dumps(lines, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    chz.entrypoint(main)
