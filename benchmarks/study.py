"""The cost of the queue of a study, and the gain of two slots over one.

    python -m benchmarks.study
    python -m benchmarks.study only=queue n_runs=200 out=study.json
    python -m benchmarks.study small=true     a smoke test; its numbers mean nothing

  queue  `n_runs` runs that do nothing, on two slots: CPU time of the queue's own process for each run (target: under
         50 ms), and the longest time from the end of a run to the first line of the next on its slot (target: under
         0.5 s), which includes the start of the interpreter, about 30 ms
  sweep  a 2x2x2 grid of short PPO runs on CartPole on two slots of a core, against four of these runs one after another
         on one slot: the ratio of the wall times (target: at most 1.15)

Run it on an idle machine with two cores or more.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from statistics import median

import chz

from rlframe.study import run_study

_NOTHING = "import time; print('begin', time.monotonic()); print('end', time.monotonic())"
_SEEDS = ("sweep.seed=0,1", "sweep.algo.learning_rate=1e-3,3e-4")


def queue(directory: Path, n_runs: int) -> dict[str, float]:
    """Costs of the queue in seconds."""
    begin = time.process_time()
    status = run_study([sys.executable, "-I", "-S", "-c", _NOTHING], [{}], range(n_runs), str(directory), "2cpu_1cpr")
    cpu_s = time.process_time() - begin
    if status:
        raise RuntimeError(f"the queue ended with status {status}; see {directory}")
    stretches: dict[str, list[tuple[float, float]]] = {}
    for log in directory.glob("run_*.log"):
        slot, first, last = re.findall(r" slot (\d+)|begin (\S+)|end (\S+)", log.read_text())[:3]
        stretches.setdefault(slot[0], []).append((float(first[1]), float(last[2])))
    gaps = []
    for of_slot in stretches.values():
        of_slot.sort()
        gaps += [after[0] - before[1] for before, after in pairwise(of_slot)]
    return {"cpu_s_per_run": cpu_s / n_runs, "gap_s_max": max(gaps), "gap_s_median": median(gaps)}


def sweep(directory: Path, n_steps: int) -> dict[str, float]:
    """Wall times of eight runs on two slots and of four on one, in seconds, and their ratio."""

    def wall_s(name: str, *words: str) -> float:
        begin = time.perf_counter()
        command = [sys.executable, "-m", "rlframe.launch", f"runner.n_steps={n_steps}", f"log_dir={directory / name}"]
        subprocess.run([*command, *words], check=True)
        return time.perf_counter() - begin

    four = wall_s("four", *_SEEDS, "affinity=1cpu_1cpr")
    eight = wall_s("eight", *_SEEDS, "sweep.algo.clip=0.1,0.2", "affinity=2cpu_1cpr")
    return {"four_on_one_slot_s": four, "eight_on_two_slots_s": eight, "ratio": eight / four}


def main(
    only: str = "queue,sweep", n_runs: int = 200, n_steps: int = 50_000, small: bool = False, out: str = ""
) -> None:
    """Measure, print, and write to `out`."""
    found: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        if "queue" in only.split(","):
            found["queue"] = queue(Path(folder) / "queue", 6 if small else n_runs)
        if "sweep" in only.split(","):
            found["sweep"] = sweep(Path(folder) / "sweep", 512 if small else n_steps)
    for group, numbers in found.items():
        print(f"{group}: " + ", ".join(f"{name} {number:.4f}" for name, number in numbers.items()))
    if out:
        Path(out).write_text(json.dumps(found, indent=2), encoding="utf-8")


if __name__ == "__main__":
    chz.entrypoint(main)
