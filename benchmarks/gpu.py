"""How many gradient updates a second a GPU makes: plain, as CUDA graphs, compiled; beside one core of its CPU.

    python -m benchmarks.gpu
    python -m benchmarks.gpu only=sac,xqc seconds=1 rounds=1 out=gpu.json
    python -m benchmarks.gpu device=cpu small=true     a smoke test; its numbers mean nothing

The cases are those of `benchmarks.updates`, and three networks that are large: those of mujoco/xqc_halfcheetah and
mujoco/flashsac_halfcheetah, with the widths and batches of the presets, and that of atari/btr_pong. The sides:

  cpu             one torch thread, compiled, in the precision that launch chooses
  plain           on the GPU in fp32, each kernel launched from Python
  graph           CUDA graphs
  graph, bf16     the same with matrix products in bfloat16: what launch chooses
  graph, device   the same with replay=device: rows are drawn on the GPU
  compiled        compile=true: torch's compiler makes the kernels that the graph has

An update begins with a batch drawn from replay and ends with the targets moved; no environment is stepped. A case is a
process with one torch thread. All are built at once, each side warmed up; then the cases take turns, one at a time, and
the sides of a case in every round. A rate is the median over the rounds.
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
from rlframe.algos.compiled import CompileChoice, compiling
from rlframe.algos.cuda_graph import Graphed
from rlframe.kernels.device import choose_precision, learning_in
from rlframe.replay import InMemory, OnDevice

WARM_UP = 20  # updates; graphs are captured after three
SIDES = ("cpu", "plain", "graph", "graph, bf16", "graph, device", "compiled")
LONGEST_S = 200.0  # to build a side
_NOT = {("btr", "cpu")}  # a minute for ten updates


def all_cases(small: bool) -> dict[str, Case]:
    """The cases by name."""
    rows, frames = (1_000, 200) if small else (100_000, 10_000)
    halfcheetah = ((17,), 6)
    return cases(small) | {
        "crossq": Case("sac", *halfcheetah, (256, 256), 256, rows, "mujoco/crossq_halfcheetah"),
        "xqc": Case("sac", *halfcheetah, (), 256, rows, "mujoco/xqc_halfcheetah"),
        "flashsac": Case("sac", *halfcheetah, (), 512, rows, "mujoco/flashsac_halfcheetah"),
        "btr": Case("dqn", (4, 84, 84), 6, (), 256, frames, "atari/btr_pong"),
    }


@contextmanager
def _as(side: str, device: str) -> Iterator[None]:
    asked = {"cpu": "auto", "graph, bf16": "bf16"}.get(side, "fp32")
    precision = choose_precision(asked, torch.device("cpu" if side == "cpu" else device))
    with learning_in(precision), compiling(CompileChoice(side in ("cpu", "compiled"))):
        yield


def built(case: Case, side: str, device: str) -> Algorithm:
    """The algorithm of a side, warmed up."""
    on = "cpu" if side == "cpu" else device
    algo = learner_of(case, on, OnDevice if side.endswith("device") else InMemory)
    if side == "plain":
        for name, graph in [pair for pair in vars(algo).items() if isinstance(pair[1], Graphed)]:
            setattr(algo, name, graph.learn)
    with _as(side, device):
        for _ in range(WARM_UP):
            algo.update()
    return algo


def rate(algo: Algorithm, side: str, device: str, seconds: float) -> float:
    """Updates a second."""
    wait: Callable[[], Any] = torch.cuda.synchronize if device.startswith("cuda") else lambda: None
    with _as(side, device):
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
    sides = [side for side in SIDES if any(side in found for found in rates.values())]
    rows = []
    for case, found in rates.items():
        medians = [f"{statistics.median(found[side]):,.0f}" if side in found else "-" for side in sides]
        rows.append([case, *medians])
    lines = [["updates/s", *sides], *rows]
    return "\n".join("".join(f"{word:>15}" for word in words) for words in lines)


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
    known = all_cases(small)
    names = chosen(only, known)
    wanted = [side for side in SIDES if side in (sides.split("|") if sides else SIDES)]
    context, connections = multiprocessing.get_context("spawn"), {}
    own = {name: [side for side in wanted if (name, side) not in _NOT] for name in names}
    for name in names:
        connections[name], theirs = context.Pipe()
        context.Process(target=serve, args=(known[name], own[name], device, theirs), daemon=True).start()
        theirs.close()
    for name, connection in list(connections.items()):
        try:
            for _ in own[name]:
                if not connection.poll(LONGEST_S):
                    raise EOFError
                side, took = connection.recv()
                print(f"{name}, {side}: ready after {took:.1f} s", flush=True)
        except EOFError:
            print(f"{name}: could not be built, see above", flush=True)
            del connections[name]
    rates: dict[str, dict[str, list[float]]] = {name: {side: [] for side in own[name]} for name in connections}
    for _ in range(1 if small else rounds):
        for name, connection in connections.items():
            connection.send(0.01 if small else seconds)
            for side, found in connection.recv().items():
                rates[name][side].append(found)
    for connection in connections.values():
        connection.send(0.0)
    on = torch.cuda.get_device_name(device) if device.startswith("cuda") else device
    print(f"{on}, torch {torch.__version__}\n{table(rates)}")
    if out:
        out.write_text(json.dumps({"device": on, "torch": torch.__version__, "rates": rates}), encoding="utf-8")


if __name__ == "__main__":
    chz.entrypoint(main)
