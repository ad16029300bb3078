"""What a run by default makes beside other processes, and alone, compared with the same run with threads=1.

    python -m benchmarks.neighbours
    python -m benchmarks.neighbours runs=ppo only=alone,busy,nice rounds=3 out=neighbours.json
    python -m benchmarks.neighbours small=true     a smoke test; its numbers mean nothing

What is measured, for PPO and DQN on Pong, whose observations are images, so that the default is a torch thread for each
free core. "1 thread" is the same with threads=1, beside the same neighbours, in the next turn:

  alone      one run by default, over two with threads=1 and sampler=serial at once (their sum; target: 0.9)
  runs_2     two runs at once (their sum; target here and below: 0.9)
  runs_4     four runs at once
  busy       one run beside a loop of normal priority that never sleeps
  nice       one run beside such a loop of low priority, nice 10
  bursts     one run beside a loop that is busy for 200 ms, then sleeps for 200 ms
  runs_nice  two runs beside a loop of low priority
  back       one run beside a loop that ends after the first half; the last quarter of the time counts, as in `alone`

Method: runs are started by hand, `python -m rlframe.launch experiment=atari/ppo_pong`, without evaluation, all at the
same time. A rate is that of the rows of progress.csv after a quarter of the time. In each round every case is measured
by default and with one thread; the table has the medians of rates and ratios. The threads are those of the last line
of debug.log that names them. Use two idle cores.
"""

from __future__ import annotations

import csv
import json
import re
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import chz

from benchmarks.parts.chosen import chosen
from benchmarks.parts.machine import machine

_COMMON = "eval.n_episodes=0 snapshot_mode=none"
RUNS = {
    "ppo": f"experiment=atari/ppo_pong runner.log_interval_steps=1000 {_COMMON}",
    "dqn": f"experiment=atari/dqn_pong algo.learning_starts=1000 runner.log_interval_steps=100 {_COMMON}",
}
_SPIN = "while True: pass"
_BURSTS = "import time\nwhile True:\n end = time.time() + 0.2\n while time.time() < end: pass\n time.sleep(0.2)"
_UNTIL_HALF = "import time\nend = time.time() + {}\nwhile time.time() < end: pass"


@dataclass(frozen=True)
class Case:
    """Runs that are started at once, and a program beside them."""

    n_runs: int = 1
    beside: str = ""  # Python
    nice: int = 0
    n_single: int = 0  # runs on a core each to compare with, without the program; 0: as many, and beside it
    from_: float = 0.0  # the part of the time from which on the rate counts


CASES = {
    "alone": Case(n_single=2),
    "runs_2": Case(2),
    "runs_4": Case(4),
    "busy": Case(beside=_SPIN),
    "nice": Case(beside=_SPIN, nice=10),
    "bursts": Case(beside=_BURSTS),
    "runs_nice": Case(2, _SPIN, 10),
    "back": Case(beside=_UNTIL_HALF, n_single=2, from_=0.75),
}


@dataclass(frozen=True)
class Rate:
    """Env steps a second of all runs of a case, and the torch threads of each at its end."""

    steps_per_s: float
    threads: list[int]


def rate(words: str, n_runs: int, case: Case, seconds: float, warm_s: float) -> Rate:
    """Train for `seconds`, and measure after `warm_s`."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        if case.beside:
            program = case.beside.format(seconds / 2)
            command = ["nice", "-n", str(case.nice), sys.executable, "-S", "-c", program]
            stack.callback(stack.enter_context(subprocess.Popen(command)).kill)
        launch = [sys.executable, "-m", "rlframe.launch", *words.split(), f"runner.max_time_s={seconds}"]
        logs = [Path(folder) / str(i) for i in range(n_runs)]
        runs = [subprocess.Popen([*launch, f"log_dir={log}"], stdout=subprocess.DEVNULL) for log in logs]
        for run in runs:
            if run.wait(seconds + 300):
                raise RuntimeError(f"{' '.join(launch)} ended with status {run.returncode}")
        begin = max(warm_s, case.from_ * seconds)
        return Rate(sum(_rate(log / "run_0", begin) for log in logs), [_threads(log / "run_0") for log in logs])


def _rate(run: Path, begin: float) -> float:
    """Env steps a second from the last row before `begin`, or the first row, to the last."""
    with (run / "progress.csv").open(encoding="utf-8") as file:
        rows = [(float(row["time/elapsed_s"]), float(row["env_steps"])) for row in csv.DictReader(file)]
    first = [row for row in rows if row[0] <= begin][-1]
    return (rows[-1][1] - first[1]) / max(rows[-1][0] - first[0], 1e-9)


def _threads(run: Path) -> int:
    return int(re.findall(r"(\d+) torch threads?", (run / "debug.log").read_text(encoding="utf-8"))[-1])


def measure(words: str, case: Case, seconds: float, warm_s: float) -> tuple[Rate, Rate]:
    """By default and with one thread."""
    alone, sampler = (Case(from_=case.from_), " sampler=serial") if case.n_single else (case, "")
    one = rate(f"{words} threads=1{sampler}", case.n_single or case.n_runs, alone, seconds, warm_s)
    return rate(words, case.n_runs, case, seconds, warm_s), one


def main(
    runs: str = "", only: str = "", rounds: int = 3, seconds: float = 40, small: bool = False, out: str = ""
) -> None:
    """Measure, print, and write to `out`.

    Args:
        runs: ppo, dqn or both, separated by commas.    only: cases, separated by commas.    rounds: of each case.
        seconds: of training in each, of which the first quarter does not count.    small: one very short round.
        out: JSON file for all results.
    """
    rounds, seconds = (1, 4) if small else (rounds, seconds)
    names, cases = chosen(runs, RUNS, "runs"), chosen(only, CASES)
    found: dict[str, dict[str, list[dict[str, object]]]] = {name: {case: [] for case in cases} for name in names}
    begin = time.monotonic()
    for _ in range(rounds):
        for name in names:
            for case in cases:
                default, one = measure(RUNS[name], CASES[case], seconds, seconds / 4)
                ratio = default.steps_per_s / one.steps_per_s if one.steps_per_s else 0.0
                numbers = {"default": default.steps_per_s, "one_thread": one.steps_per_s, "ratio": ratio}
                found[name][case].append({**numbers, "threads": default.threads})
                threads = ", ".join(map(str, default.threads))
                print(
                    f"{name} {case}: {default.steps_per_s:.0f} by default ({threads} threads at the end), "
                    f"{one.steps_per_s:.0f} with 1 thread, ratio {ratio:.2f}; {time.monotonic() - begin:.0f} s",
                    flush=True,
                )
    for name in names:
        for case, rows in found[name].items():
            middle = {key: median(float(str(row[key])) for row in rows) for key in ("default", "one_thread", "ratio")}
            print(f"| {name} {case} | {middle['default']:.0f} | {middle['one_thread']:.0f} | {middle['ratio']:.2f} |")
    if out:
        Path(out).write_text(json.dumps({"machine": machine(), "results": found}, indent=2), encoding="utf-8")


if __name__ == "__main__":
    chz.entrypoint(main)
