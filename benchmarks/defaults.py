"""What the defaults alone learn, beside Stable-Baselines3's defaults: returns and seconds by algorithm, env and seed.

    python -m benchmarks.defaults framework=rlframe
    python -m benchmarks.defaults framework=sb3 rows=sac_pendulum,ppo_cartpole seeds=0,1
    python -m benchmarks.defaults show=true                                           the table of all that was measured

A row is an algorithm, an environment and env steps, nothing else: `rlframe.train("sac", "Pendulum-v1", n_steps=20_000)`
beside `SAC("MlpPolicy", "Pendulum-v1").learn(20_000)`. The trained policy then plays EPISODES deterministic episodes,
from the same first states in both. Each training is a separate process with one torch thread, pinned to the core
`core=N` where the OS can; `seconds` is its wall time from building the agent to the last update, `cpu_seconds` the CPU
time of that process, which other processes disturb less. A training that is in `out` already is not repeated.
"""

from __future__ import annotations

import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.parts.kept_rows import add_rows, has, rows_in
from rlframe.core.errors import pluralize

EPISODES, SEEDS = 20, 5
FIRST_SEED = 1_000_000  # of the episodes that judge a policy
COLUMNS = ("framework", "row", "seed", "return_mean", "return_std", "seconds", "cpu_seconds")
OUT = Path("results/defaults/returns.csv")

Act = Callable[[Any], Any]  # the deterministic action for one observation


@dataclass(frozen=True)
class Row:
    """One training: an algorithm on an environment."""

    algo: str
    env: str
    n_steps: int


ROWS = {
    "dqn_cartpole": Row("dqn", "CartPole-v1", 100_000),
    "ppo_cartpole": Row("ppo", "CartPole-v1", 100_000),
    "a2c_cartpole": Row("a2c", "CartPole-v1", 100_000),
    "ppo_lunarlander": Row("ppo", "LunarLander-v3", 200_000),
    "ppo_pendulum": Row("ppo", "Pendulum-v1", 200_000),
    "ppo_halfcheetah": Row("ppo", "HalfCheetah-v5", 300_000),
    "dqn_lunarlander": Row("dqn", "LunarLander-v3", 200_000),
    "sac_pendulum": Row("sac", "Pendulum-v1", 20_000),
    "td3_pendulum": Row("td3", "Pendulum-v1", 20_000),
    "ddpg_pendulum": Row("ddpg", "Pendulum-v1", 20_000),
    "sac_halfcheetah": Row("sac", "HalfCheetah-v5", 50_000),
    "td3_halfcheetah": Row("td3", "HalfCheetah-v5", 50_000),
}


def evaluate(env_id: str, act: Act) -> list[float]:
    """The returns of EPISODES episodes."""
    import gymnasium

    env, returns = gymnasium.make(env_id), []
    for episode in range(EPISODES):
        observation, _ = env.reset(seed=FIRST_SEED + episode)
        total, ended = 0.0, False
        while not ended:
            observation, reward, terminated, truncated, _ = env.step(act(observation))
            total, ended = total + float(reward), terminated or truncated
        returns.append(total)
    env.close()
    return returns


def train_rlframe(row: Row, seed: int) -> Callable[[], Act]:
    """Train with rlframe's defaults; returns what loads the policy."""
    import rlframe

    directory = tempfile.mkdtemp()
    result = rlframe.train(row.algo, row.env, n_steps=row.n_steps, seed=seed, threads=1, log_dir=directory)
    return lambda: rlframe.load_policy(result.directory).act


def train_sb3(row: Row, seed: int) -> Callable[[], Act]:
    """Train with Stable-Baselines3's defaults; returns what loads the policy."""
    import stable_baselines3
    import torch

    torch.set_num_threads(1)
    model = getattr(stable_baselines3, row.algo.upper())("MlpPolicy", row.env, device="cpu", seed=seed)
    model.learn(row.n_steps)
    return lambda: lambda observation: model.predict(observation, deterministic=True)[0]


FRAMEWORKS = {"rlframe": train_rlframe, "sb3": train_sb3}


def measure(framework: str, name: str, seed: int, out: Path) -> None:
    """Train and evaluate once, in this process; append the result to `out`."""
    row = ROWS[name]
    __import__("rlframe" if framework == "rlframe" else "stable_baselines3")
    __import__("torch")
    started, cpu = time.perf_counter(), time.process_time()
    load = FRAMEWORKS[framework](row, seed)
    seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu
    returns = evaluate(row.env, load())
    values = [framework, name, seed, *(f"{x:.1f}" for x in (np.mean(returns), np.std(returns), seconds, cpu_seconds))]
    line = dict(zip(COLUMNS, values, strict=True))
    print(line, flush=True)
    add_rows(out, COLUMNS, [line])


def table(lines: list[dict[str, str]]) -> str:
    """Both frameworks by row, as Markdown: mean return and its standard error over seeds, median CPU seconds."""
    head = ["defaults alone", "env_steps", "rlframe", "Stable-Baselines3", "CPU seconds", "theirs"]
    rows = [head, ["---"] * len(head)]
    for name, row in ROWS.items():
        scores, times = [], []
        for framework in FRAMEWORKS:
            of_row = [line for line in lines if line["row"] == name and line["framework"] == framework]
            scores.append(_score([float(line["return_mean"]) for line in of_row]))
            times.append(f"{statistics.median(float(line['cpu_seconds']) for line in of_row):.0f}" if of_row else "-")
        rows.append([f"{row.algo.upper()}, {row.env}", f"{row.n_steps:,}", *scores, *times])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _score(returns: list[float]) -> str:
    """The mean and its standard error; the number of seeds where it is not SEEDS."""
    if not returns:
        return "-"
    error = statistics.stdev(returns) / math.sqrt(len(returns)) if len(returns) > 1 else math.nan
    seeds = "" if len(returns) == SEEDS else f" ({pluralize(len(returns), 'seed')})"
    return f"{statistics.mean(returns):,.0f} ± {error:,.0f}{seeds}"


def main(words: dict[str, str]) -> None:
    """Measure what is asked for and is not in `out` yet, each in a process of its own."""
    out = Path(words.get("out", OUT))
    kept = rows_in(out, COLUMNS)
    if "show" in words:
        print(table(kept))
        return
    framework = words["framework"]
    names, seeds = (
        words.get("rows", ",".join(ROWS)).split(","),
        words.get("seeds", ",".join(map(str, range(SEEDS)))).split(","),
    )
    if "one" in words:
        measure(framework, names[0], int(seeds[0]), out)
        return
    if "core" in words and sys.platform == "linux":
        os.sched_setaffinity(0, {int(words["core"])})
    threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1") if framework == "sb3" else {}
    for name in names:
        for seed in seeds:
            if has(rows_in(out, COLUMNS), framework=framework, row=name, seed=seed):
                continue
            command = [sys.executable, "-m", "benchmarks.defaults", f"framework={framework}", f"rows={name}"]
            subprocess.run(
                [*command, f"seeds={seed}", f"out={out}", "one=true"], env={**os.environ, **threads}, check=True
            )


if __name__ == "__main__":
    main(dict(word.split("=", 1) for word in sys.argv[1:]))
