"""How many gradient updates a second a GPU makes: plain, as CUDA graphs, in bf16, compiled.

    python -m benchmarks.gpu
    python -m benchmarks.gpu only=sac,xqc sides=graph,compiled seconds=1 rounds=1 out=gpu.json
    python -m benchmarks.gpu device=cpu small=true     a smoke test; its numbers mean nothing

The cases are sac, td3, dqn_cartpole, dqn_atari and crossq as in `benchmarks.updates`, and three large networks: those
of mujoco/xqc_halfcheetah (here with four layers of 512 in all networks), mujoco/flashsac_halfcheetah (here of width 256
in all networks, and batches of 512 rows) and atari/btr_pong.
The sides, in fp32 where nothing else is said (launch chooses bf16):

  plain     each kernel launched from Python
  graph     CUDA graphs
  bf16      CUDA graphs with matrix products in bfloat16
  device    CUDA graphs with replay=device: rows are drawn on the GPU
  compiled  compile=true, in bf16: torch's compiler makes the kernels that the graph has

An update begins with a batch drawn from replay and ends with the targets moved; no environment is stepped. A case is a
process with one torch thread. All are built at once, each side warmed up; then the cases take turns, one at a time, and
the sides of a case in every round. A rate is the median over the rounds. Updates on a CPU are for `benchmarks.updates`.
"""

from __future__ import annotations

import json
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import chz
import torch

from benchmarks.parts.chosen import chosen
from benchmarks.parts.updates_ours import Case, learner_of
from benchmarks.updates import cases
from rlframe.algos import Algorithm
from rlframe.kernels.device import learning_in
from rlframe.replay import InMemory, OnDevice
from rlframe.updates.compiled import CompileChoice, compiling
from rlframe.updates.graphed import Graphed, Graphs

WARM_UP = 20  # updates; graphs are captured after three
SIDES = ("plain", "graph", "bf16", "device", "compiled")
LONGEST_S = 200.0  # for an answer


def all_cases(small: bool) -> dict[str, Case]:
    """The cases by name."""
    rows, frames = (1_000, 200) if small else (100_000, 10_000)
    halfcheetah = ((17,), 6)
    return cases(small) | {
        "crossq": Case("sac", *halfcheetah, (256, 256), 256, rows, "mujoco/crossq_halfcheetah"),
        "xqc": Case("sac", *halfcheetah, (512, 512, 512, 512), 256, rows, "mujoco/xqc_halfcheetah"),
        "flashsac": Case("sac", *halfcheetah, (256,), 512, rows, "mujoco/flashsac_halfcheetah"),
        "btr": Case("dqn", (4, 84, 84), 6, (), 256, frames, "atari/btr_pong"),
    }


@contextmanager
def learning_as(side: str) -> Iterator[None]:
    """Context in which a side learns."""
    with learning_in("bf16" if side in ("bf16", "compiled") else "fp32"), compiling(CompileChoice(side == "compiled")):
        yield


def built(case: Case, side: str, device: str) -> Algorithm:
    """The algorithm of a side, warmed up."""
    algo = learner_of(case, device, OnDevice if side == "device" else InMemory)
    if side == "plain":
        for name, graph in [*vars(algo).items()]:
            if isinstance(graph, Graphs):
                graph.graph = lambda learn: learn
            elif isinstance(graph, Graphed):
                setattr(algo, name, graph.learn)
    with learning_as(side):
        for _ in range(WARM_UP):
            algo.update()
    return algo


def rate(algo: Algorithm, side: str, device: str, seconds: float) -> float:
    """Updates a second."""
    wait: Callable[[], Any] = torch.cuda.synchronize if device.startswith("cuda") else lambda: None
    with learning_as(side):
        wait()
        n, start = 0, time.perf_counter()
        while (passed := time.perf_counter() - start) < seconds or not n:
            for _ in range(10):
                algo.update()
            wait()
            n += 10
    return n / passed


def serve(case: Case, sides: Sequence[str], device: str, connection: Connection) -> None:
    """The process of a case: build all sides, then measure each on request."""
    torch.set_num_threads(1)
    made = {}
    for side in sides:
        start = time.perf_counter()
        made[side] = built(case, side, device)
        connection.send((side, time.perf_counter() - start))
    while (seconds := connection.recv()) > 0:
        connection.send({side: rate(algo, side, device, seconds) for side, algo in made.items()})


def table(rates: Mapping[str, Mapping[str, Sequence[float]]]) -> str:
    """Medians: a row a case, a column a side."""
    lines = [["updates/s", *next(iter(rates.values()))]]
    lines += [[case, *(f"{statistics.median(each):,.0f}" for each in found.values())] for case, found in rates.items()]
    return "\n".join("".join(f"{word:>14}" for word in words) for words in lines)


def answer(connection: Connection, name: str) -> Any:
    """The next answer of a case's process.

    Raises:
        SystemExit: it has ended, or does not answer in time.
    """
    try:
        if connection.poll(LONGEST_S):
            return connection.recv()
    except EOFError:
        raise SystemExit(f"{name}: its process ended, see above") from None
    raise SystemExit(f"{name}: no answer within {LONGEST_S:.0f} s; only={name} measures it alone")


def started(cases: Mapping[str, Case], sides: Sequence[str], device: str) -> dict[str, Connection]:
    """A process for each case, with all its sides built."""
    context, connections = multiprocessing.get_context("spawn"), {}
    for name, case in cases.items():
        connections[name], theirs = context.Pipe()
        context.Process(target=serve, args=(case, sides, device, theirs), daemon=True).start()
        theirs.close()
    for name, connection in connections.items():
        for _ in sides:
            side, took = answer(connection, name)
            print(f"{name}, {side}: ready after {took:.1f} s", flush=True)
    return connections


def main(
    device: str = "cuda",
    only: str = "",
    sides: str = "",
    seconds: float = 1.5,
    rounds: int = 3,
    small: bool = False,
    out: Path | None = None,
) -> None:
    """Measure and print."""
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise SystemExit(f"device={device}: there is no GPU; device=cpu small=true is a smoke test")
    known, wanted = all_cases(small), chosen(sides, SIDES, "sides")
    connections = started({name: known[name] for name in chosen(only, known)}, wanted, device)
    rates: dict[str, dict[str, list[float]]] = {name: {side: [] for side in wanted} for name in connections}
    for _ in range(1 if small else rounds):
        for name, connection in connections.items():
            connection.send(0.01 if small else seconds)
            for side, found in answer(connection, name).items():
                rates[name][side].append(found)
    for connection in connections.values():
        connection.send(0.0)
    on = torch.cuda.get_device_name(device) if device.startswith("cuda") else device
    print(f"{on}, torch {torch.__version__}\n{table(rates)}")
    if out:
        out.write_text(json.dumps({"device": on, "torch": torch.__version__, "rates": rates}), encoding="utf-8")


if __name__ == "__main__":
    chz.entrypoint(main)
