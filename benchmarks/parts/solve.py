"""The row solve_cartpole of `benchmarks.compare`: seconds from the start of a process to a solved CartPole-v1.

Both sides have the tuned settings that rl-zoo publishes for Stable-Baselines3 (8 environments x 32, batches of 256, 20
epochs, 100,000 env steps, learning rate and clip annealed), evaluate 100 episodes every 10,000 env steps without
exploring, and are done when their mean return is 475. Neither saves anything. Each has one torch thread.
"""

from __future__ import annotations

import csv
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from benchmarks.parts.turns import environment

SOLVED = 475.0  # mean return
EPISODES = 100
EVERY = 10_000  # env steps between evaluations
N_CORES = 2
KEYS = ("rlframe", "sb3")
ASKED_S = 6.0  # target for rlframe's median, at most
ASKED_RATIO = 2.0  # target for Stable-Baselines3's seconds over rlframe's, at least
_POLL_S = 0.01

Command = tuple[list[str], Callable[[], bool]]  # a command line, and a function that returns whether the task is solved


def ours(seed: int, folder: Path, words: Mapping[str, str]) -> Command:
    """The preset, by `launch`."""
    settings = {
        "seed": str(seed),
        "log_dir": str(folder),
        "snapshot_mode": "none",
        "eval.n_episodes": str(EPISODES),
        "runner.log_interval_steps": str(EVERY),
        **words,
    }
    command = [sys.executable, "-m", "rlframe.launch", "experiment=classic/ppo_cartpole"]
    progress = folder / "run_0/progress.csv"
    return [*command, *(f"{key}={value}" for key, value in settings.items())], lambda: _best(progress) >= SOLVED


def theirs(seed: int, folder: Path) -> Command:
    """A script that trains, evaluates and stops."""
    found = folder / "solved"
    command = [sys.executable, "-m", "benchmarks.parts.solve_sb3", f"seed={seed}", f"found={found}"]
    return command, found.exists


def _best(progress: Path) -> float:
    """The best mean return of the rows written so far."""
    if not progress.is_file():
        return -math.inf
    with progress.open(encoding="utf-8", newline="") as file:
        found = [row.get("eval/return_mean") or "nan" for row in csv.DictReader(file)]
    return max((value for value in map(_number, found) if not math.isnan(value)), default=-math.inf)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:  # a row that is not completely written yet
        return math.nan


def seconds(command: Command, variables: Mapping[str, str]) -> float:
    """Wall time until the task is solved, or inf if the process ends before. It ends the process."""
    words, solved = command
    cores = sorted(os.sched_getaffinity(0))[:N_CORES] if sys.platform == "linux" else []
    start = time.perf_counter()
    process = subprocess.Popen(
        words,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env=environment(variables),
        preexec_fn=(lambda: os.sched_setaffinity(0, cores)) if cores else None,
    )
    try:
        while not solved():
            if process.poll() is not None and not solved():
                return _ended(process)
            time.sleep(_POLL_S)
        return time.perf_counter() - start
    finally:
        process.terminate()
        process.communicate()


def _ended(process: subprocess.Popen[bytes]) -> float:
    """Raises:
    SystemExit: the process failed.
    """
    if process.returncode:
        assert process.stderr is not None
        raise SystemExit(process.stderr.read().decode(errors="replace"))
    return math.inf


def race(keys: Sequence[str], n_seeds: int, words: Mapping[str, str]) -> dict[str, list[float]]:
    """Seconds of every seed by framework, in turns."""
    found: dict[str, list[float]] = {key: [] for key in keys}
    for seed in range(n_seeds):
        for key in keys:
            with tempfile.TemporaryDirectory() as name:
                folder = Path(name)
                command = ours(seed, folder, words) if key == KEYS[0] else theirs(seed, folder)
                found[key].append(seconds(command, {} if key == KEYS[0] else {"OMP_NUM_THREADS": "1"}))
    return found
