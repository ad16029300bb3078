"""Measure contenders in turns: each in separate processes, built and warmed up before anything is timed."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

from benchmarks.parts.machine import machine
from rlframe.core.errors import pluralize
from rlframe.system.machine import retain_freed_memory

DEADLINE_S = 300  # for one answer of a contender
CLOSE_S = 30  # for its end

Unit = Callable[[], int]  # does some work; returns the env steps in it
Make = Callable[[ExitStack], Unit]  # the stack closes what it opens
Made = TypeVar("Made", bound=Callable[..., Any])


@dataclass(frozen=True)
class Contender(Generic[Made]):
    """What is measured, and where. Several processes do the same in parallel, and the slowest counts for all."""

    name: str
    make: Made  # Make, or the argument of another `serve`
    n_threads: int = 1  # torch threads of a process
    n_cores: int = 1  # that a process is pinned to, with those that it starts
    n_processes: int = 1  # on cores of their own
    variables: Mapping[str, str] = field(default_factory=dict)  # environment variables of the process
    warm_up: int = 0  # env steps before the first turn, if it trains


@dataclass(frozen=True)
class Ready:
    """The answer of a process that is built and warmed up."""

    n_threads: int  # torch threads
    facts: str = ""  # what it chose itself


@dataclass(frozen=True)
class Comparison:
    """The rate of the fastest of ours over that of the fastest of theirs.

    Each of theirs consists of parts that are measured one by one; their times for a step are added.
    """

    name: str
    ours: tuple[str, ...]  # contenders
    theirs: tuple[tuple[str, ...], ...]
    asked: float = 0.0  # at least; 0: nothing

    def ratios(self, rounds: Sequence[Mapping[str, float]]) -> list[float]:
        """One ratio for each round; the fastest contender is that over all rounds."""
        ours = [[row[name] for row in rounds] for name in self.ours]
        theirs = [[1 / sum(1 / row[part] for part in parts) for row in rounds] for parts in self.theirs]
        best = (max(each, key=statistics.median) for each in (ours, theirs))
        return [mine / other for mine, other in zip(*best, strict=True)]


@dataclass(frozen=True)
class Group:
    """Contenders that are measured together, and their comparisons."""

    contenders: list[Contender]
    comparisons: list[Comparison]
    needs: tuple[str, ...] = ()  # packages


@dataclass(frozen=True)
class Line:
    """One line of the result: a rate in steps/s, a ratio, or a fact."""

    group: str
    name: str
    median: float
    rounds: list[float]
    where: str = ""  # cores and threads of a rate; the unit of a fact
    asked: float = 0.0  # at least, of a ratio; at most, of a fact; 0: nothing


def line(group: str, name: str, rounds: list[float], where: str = "", asked: float = 0.0) -> Line:
    """A line with its median."""
    return Line(group, name, statistics.median(rounds), rounds, where, asked)


def serve(contender: Contender[Make], cores: list[int], connection: Connection) -> None:
    """A contender's process: build, warm up, then measure on each request; ends when the connection closes."""
    if sys.platform == "linux":
        os.sched_setaffinity(0, cores)
    torch.set_num_threads(contender.n_threads)
    retain_freed_memory()
    with ExitStack() as stack:
        unit = contender.make(stack)
        unit()
        connection.send(Ready(torch.get_num_threads()))
        while (seconds := connection.recv()) > 0:
            steps, start = 0, time.perf_counter()
            while (passed := time.perf_counter() - start) < seconds or not steps:
                steps += unit()
            connection.send(steps / passed)


_OF_LIBRARIES = ("OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "ONEDNN_", "DNNL_", "XLA_")


def environment(variables: Mapping[str, str]) -> dict[str, str]:
    """The environment variables of this process, and `variables`, without others that tune numerical libraries: users
    have the kernels and threads that these choose by themselves."""
    return {name: value for name, value in os.environ.items() if not name.startswith(_OF_LIBRARIES)} | dict(variables)


@contextlib.contextmanager
def _variables(variables: Mapping[str, str]) -> Iterator[None]:
    """Set that environment for the processes started within."""
    before, inside = dict(os.environ), environment(variables)
    os.environ.clear()
    os.environ.update(inside)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


class Remote:
    """The processes of one contender."""

    def __init__(self, contender: Contender, target: Callable[..., None] = serve) -> None:
        """target: function that a process runs, with the contender, its cores and its end of a connection."""
        self.name, self._target = contender.name, target
        allowed = sorted(os.sched_getaffinity(0)) if sys.platform == "linux" else []
        self.cores: list[list[int]] = []
        self._processes: list[multiprocessing.process.BaseProcess] = []
        self._connections: list[Connection] = []
        try:
            for index in range(contender.n_processes):
                wanted = range(index * contender.n_cores, (index + 1) * contender.n_cores)
                self._start(contender, sorted({allowed[i % len(allowed)] for i in wanted}) if allowed else [])
            self.ready: Ready = self._answers()[0]
        except BaseException:
            self.close()
            raise

    def _start(self, contender: Contender, cores: list[int]) -> None:
        context = multiprocessing.get_context("spawn")
        connection, theirs = context.Pipe()
        process = context.Process(target=self._target, args=(contender, cores, theirs))
        with _variables(contender.variables):
            process.start()
        theirs.close()
        self.cores.append(cores)
        self._processes.append(process)
        self._connections.append(connection)

    def _answers(self) -> list[Any]:
        return [self._answer(connection) for connection in self._connections]

    def _answer(self, connection: Connection) -> Any:
        if not connection.poll(DEADLINE_S):
            raise TimeoutError(f"{self.name}: no answer within {DEADLINE_S} s")
        try:
            return connection.recv()
        except EOFError:
            raise SystemExit(f"{self.name}: its process ended, see above") from None

    def measure(self, seconds: float) -> float:
        """Steps per second over at least `seconds`, of all processes, each counted as slow as the slowest."""
        for connection in self._connections:
            connection.send(seconds)
        return len(self._connections) * min(self._answers())

    def where(self) -> str:
        """Cores and threads, in words."""
        cores = " | ".join(",".join(map(str, each)) for each in self.cores)
        facts = [
            f"cores {cores}" if cores.strip(" |") else "not pinned",
            pluralize(self.ready.n_threads, "torch thread"),
        ]
        return "; ".join([*facts, self.ready.facts] if self.ready.facts else facts)

    def close(self) -> None:
        """End the processes."""
        for connection in self._connections:
            with contextlib.suppress(OSError):  # the process has ended
                connection.send(0.0)
        for process in self._processes:
            process.join(CLOSE_S)
            process.kill()


def run_groups(
    groups: Mapping[str, Group], n_rounds: int, seconds: float, out: str, facts: Callable[[], list[Line]] = list
) -> None:
    """Measure groups one after another and then what gives facts; print all, and write it to `out` unless empty."""
    about = machine()
    print(", ".join(f"{name} {fact}" for name, fact in about.items()))
    print(f"{n_rounds} rounds, {seconds} s a turn", flush=True)
    found: dict[str, list[Line]] = {"rates": [], "ratios": []}
    for name, group in groups.items():
        rates, ratios = run_group(group, name, n_rounds, seconds)
        found["rates"] += rates
        found["ratios"] += ratios
    found["facts"] = facts()
    show(**found)
    if out:
        content = {"machine": about, "seconds": seconds, **found}
        Path(out).write_text(json.dumps(content, default=asdict, indent=2) + "\n", encoding="utf-8")


def run_group(group: Group, name: str, n_rounds: int, seconds: float) -> tuple[list[Line], list[Line]]:
    """Rates and ratios of one group, measured in turns."""
    with ExitStack() as stack:
        remotes = [stack.enter_context(closing(Remote(contender))) for contender in group.contenders]
        rounds = [{remote.name: measured(remote, seconds) for remote in remotes} for _ in range(n_rounds)]
        rates = [line(name, r.name, [row[r.name] for row in rounds], r.where()) for r in remotes]
    return rates, [line(name, c.name, c.ratios(rounds), asked=c.asked) for c in group.comparisons]


def measured(remote: Remote, seconds: float) -> float:
    """One turn, after a pause in which the threads of the last turn fall asleep."""
    time.sleep(min(0.3, seconds))
    return remote.measure(seconds)


def show(rates: list[Line], ratios: list[Line], facts: list[Line]) -> None:
    """Print the tables of rates, ratios and facts that are not empty."""
    if rates:
        _head("contender", "steps/s", "where")
    for x in rates:
        print(f"{x.group:<14} {x.name:<44} {x.median:>9,.0f} {min(x.rounds):>9,.0f} {max(x.rounds):>9,.0f}  {x.where}")
    if ratios:
        _head("ratio", "median", "asked")
    for x in ratios:
        print(f"{_row(x)}  {_verdict(f'{x.asked:.2f}', x.median >= x.asked) if x.asked else '-'}")
    if facts:
        _head("fact", "median", "unit, asked")
    for x in facts:
        print(f"{_row(x)}  {x.where}{', ' + _verdict(f'below {x.asked:g}', x.median < x.asked) if x.asked else ''}")


def _head(what: str, median: str, last: str) -> None:
    print(f"\n{'group':<14} {what:<44} {median:>9} {'lowest':>9} {'highest':>9}  {last}")


def _row(x: Line) -> str:
    return f"{x.group:<14} {x.name:<44} {x.median:>9.2f} {min(x.rounds):>9.2f} {max(x.rounds):>9.2f}"


def _verdict(asked: str, met: bool) -> str:
    return f"{asked}, {'met' if met else 'not met'}"
