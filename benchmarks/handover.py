"""Ways of handing a time step to W worker processes and waiting for them, the hot spot of parallel sampling.

    python -m benchmarks.handover
    python -m benchmarks.handover rounds=9 workers=2,8 only=semaphore,yield10-rest out=handover.json
    python -m benchmarks.handover small=true     a smoke test; its numbers mean nothing

The ways differ in how a wake-up is sent, `go` to each worker and `done` back, and in how the master waits for all:

  semaphore            multiprocessing.Semaphore, one per worker and direction; the master waits for them in order
  semaphore-backwards  the same, but it waits for the last worker first, which it also woke last
  semaphore-shared     one `done` for all, which it takes W times
  semaphore-last       only the last to finish wakes it: the others take one of W - 1 tokens of a counting semaphore
  pipe                 multiprocessing.Pipe, send_bytes and recv_bytes, the usual way; no timeout
  spin20, spin50, ...  semaphore-backwards, but a waiter, or only the master, tries for that many us before it sleeps
  yield10, yield30     semaphore-backwards, but a waiter tries that many times before it sleeps, with os.sched_yield in
                       between: about 0.6 us on an idle core; on a busy one, until the other processes have run
  yield10-rest, ...    the same, but after a yield that took YIELD_S a waiter only sleeps, for the next REST waits

A token posted before its waiter sleeps is still there, so no wake-up is lost. A spinning waiter tries to take the same
token that it would sleep for: no flag, no fence, and faster from Python than reading a flag in shared memory. All are
memory barriers: data written before a post are visible after the wait. Every sleep except a pipe's ends after SLICE_S,
so that deaths are noticed. Left out, since they gained nothing for few workers and lost for many: os.eventfd, unnamed
semaphores in a memfd (sem_init) and futexes (FUTEX_WAKE_OP counts those done), the latter two through ctypes.

Method. Workers are spawned for each W and pinned to the cores in turn; the master may run on all. A turn is some
hundred steps of one way; the ways take turns, for `rounds` rounds, in each scenario: in a step each worker computes
for `work` us of its CPU time, and between steps the master does so for `acting` us while they wait. A neighbour is
another process that computes on the last core all the time. The output has medians over the rounds, per step: the time
over the ideal (acting + work * ceil(W / cores)), its lowest and highest, and the CPU time that all workers together,
and the master, used besides their work. Virtual machines wake an idle core far slower than real ones. Linux only.
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
YIELD_S, REST = 1e-3, 1000  # others keep a core for 3 to 4 ms, so one such yield in REST waits costs 4 us a wait
WARM_UP = 5  # untimed steps of a turn, without work
COLUMNS = ("steps/s", "over", "lowest", "highest", "workers", "master")
SPAWN = multiprocessing.get_context("spawn")


class Signal(Protocol):
    """Tokens that one process posts and another takes; the taker sleeps until there is one."""

    def post(self) -> None: ...
    def wait(self) -> None: ...


def patiently(take: Callable[[], bool]) -> None:
    """Call `take`, which sleeps for at most SLICE_S, until it is true; real code would check for deaths in between."""
    for _ in range(150):
        if take():
            return
    raise TimeoutError(f"nothing within {150 * SLICE_S} s")


class Semaphore:
    """A multiprocessing semaphore. The master, or the resource tracker after a kill, removes it from /dev/shm."""

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
            self.others.release()  # all workers wait for their next start and take none now

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
    """Worker i: takes part in a turn on request, and answers with its CPU time [us]."""
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
        only: ways, separated by commas.    small: one very short round.    out: JSON file for all results."""
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
