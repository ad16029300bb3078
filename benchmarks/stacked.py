"""How many env_steps a second of CPU time a stack of seeds makes (stack=true), compared with a run of one seed.

    python -m benchmarks.stacked
    python -m benchmarks.stacked seeds=5 rounds=5 only=sac
    python -m benchmarks.stacked small=true     a smoke test; its numbers mean nothing

What is compared (ratios above 1 mean that the stack is faster), all seeds together, on one core with one torch thread:

  ppo    experiment=classic/ppo_cartpole: two networks of 64x64, batches of 256 rows
  sac    experiment=classic/sac_pendulum with model.hidden=[64,64], batches of 256

The stack is compiled. It is compared with a run as launch makes it by default, which is too short to be compiled, and
with one that is compiled. Evaluation and what comes before the third row of the log, such as compiling, do not count.

Method. Each side is a process that runs to its end before the other starts, in turns, pinned to the same core; a ratio
is the median of those within each round.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import chz

from rlframe.runners import Callback

SETTINGS = {
    "ppo": ("experiment=classic/ppo_cartpole", "runner.n_steps=15000", "runner.log_interval_steps=5000"),
    "sac": (
        *("experiment=classic/sac_pendulum", "model.hidden=[64,64]"),
        *("runner.n_steps=2000", "runner.log_interval_steps=500"),
    ),
}
COMMON = ("sampler=serial", "affinity=none", "eval.n_episodes=0", "loggers=[]", "snapshot_mode=none", "threads=1")
SIDES = {"stack": "true", "alone": "auto", "alone, compiled": "true"}  # and their values of compile
_FILE = "RLFRAME_BENCHMARK_ROWS"


class CpuTimes(Callback):
    """Adds the env_steps and the CPU time of the process at each row of the log to a file."""

    def on_log(self, row: Mapping[str, float]) -> None:
        with open(os.environ[_FILE], "a", encoding="utf-8") as file:
            file.write(json.dumps([row["env_steps"], time.process_time()]) + "\n")


def rate(case: str, side: str, seeds: int, steps: float) -> float:
    """The env_steps that a side makes in a second of CPU time, all seeds together."""
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder) / "rows"
        words = [*SETTINGS[case], *COMMON, f"log_dir={folder}", f"compile={SIDES[side]}"]
        words += ["callbacks=[benchmarks.stacked:CpuTimes]"]
        words += [f"stack=[{','.join(map(str, range(seeds)))}]"] if side == "stack" else []
        if steps:
            words = [f"runner.n_steps={steps:g}" if word.startswith("runner.n_steps") else word for word in words]
            words = [f"{word.split('=')[0]}={steps / 3:g}" if "log_interval" in word else word for word in words]
        environment = {**os.environ, _FILE: str(rows)}
        command = [sys.executable, "-m", "rlframe.launch", *words]
        subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
        found = [json.loads(line) for line in rows.read_text().splitlines()]
    n = seeds if side == "stack" else 1
    started, ended = found[3 * n - 1], found[-1]  # the last seed's third row, and the last row of all
    return float(n * (ended[0] - started[0]) / (ended[1] - started[1]))


def main(seeds: int = 10, rounds: int = 3, only: str = "", small: bool = False) -> None:
    """Print a line for each round, and the medians."""
    if sys.platform == "linux":
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # and so those that it starts
    for case in [name for name in SETTINGS if name in (only or name).split(",")]:
        found = []
        for _ in range(1 if small else rounds):
            rates = {side: rate(case, side, 2 if small else seeds, 600 if small else 0) for side in SIDES}
            found.append(rates)
            print(case, " ".join(f"{side} {each:,.0f}" for side, each in rates.items()), flush=True)
        for side in SIDES:
            if side != "stack":
                ratio = statistics.median(rates["stack"] / rates[side] for rates in found)
                print(f"{case}: the stack makes {ratio:.2f} times the env_steps of a run {side}", flush=True)


if __name__ == "__main__":
    chz.entrypoint(main)
