"""What the same CPU time buys on MuJoCo: learning curves of rlframe, Stable-Baselines3 and SBX over CPU seconds.

    python -m benchmarks.equal_clock contender=rlframe_crossq envs=Hopper-v5 seeds=0,1,2 core=0
    python -m benchmarks.equal_clock contender=sbx_crossq python=SBX_VENV/bin/python core=1
    python -m benchmarks.equal_clock contender=sbx_sac python=SBX_VENV/bin/python seconds=1800
    python -m benchmarks.equal_clock show=true seconds=1800        the table of all that was measured for as long
    python -m benchmarks.equal_clock figure=docs/images/equal_clock.png

Each training is a process with one thread, pinned to one core, that ends after `seconds` (600) of its CPU time,
compilation included (nothing is compiled before) and evaluations not. CPU time, not the clock on the wall: other
processes disturb it less. After every 10,000 env_steps, of PPO 200,000, the policy plays EPISODES deterministic
episodes. rlframe runs its presets, the schedules of PPO over 4M env_steps in 600 s and more in a longer time; the
others run their defaults, and sbx_crossq_256 has the widths of rlframe's CrossQ. What is in `out` is not repeated, and
all of it is of one processor. Of a longer training the first `seconds` are shown too, but not of rlframe's PPO.

Other frameworks are no dependencies: pip install stable-baselines3 sbx-rl.
"""

from __future__ import annotations

import importlib
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.parts.kept_rows import add_rows, has, rows_in
from benchmarks.parts.machine import machine

EPISODES, EVERY, EVERY_OF_PPO, SECONDS = 10, 10_000, 200_000, 600
ENVS = ("HalfCheetah-v5", "Hopper-v5", "Walker2d-v5")
MOST_STEPS_SHOWN = 160_000  # in figures; PPO makes four million
COLUMNS = ("contender", "env", "seed", "limit_s", "env_steps", "cpu_seconds", "return_mean", "cpu")
OUT = Path("results/equal_clock/curves.csv")
RANDOM_AND_TD3 = {  # returns that score 0 and 1, as of Palenicek et al. 2025 (arXiv 2509.25174), on version 4
    "HalfCheetah-v5": (-289.415, 10574.0),
    "Hopper-v5": (18.791, 3226.0),
    "Walker2d-v5": (2.791, 3946.0),
}

_SCHEDULED = "rlframe_ppo"  # what it does depends on how long it may train
_PPO_STEPS_PER_S = 4_000_000 / SECONDS

Record = Callable[[int, float, float], bool]  # env_steps, CPU seconds of evaluations, return; whether to go on


def cpu_seconds() -> float:
    """Of this process, and of those of its children that have ended."""
    each = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(found.ru_utime + found.ru_stime for found in each)


def cpu() -> str:
    """The processor, and its units for bfloat16, in which rlframe multiplies where they are faster."""
    found = machine()
    return f"{found['cpu']}, {found['bf16_units']}"


def train_rlframe(
    preset: str, env: str, seed: int, record: Record, seconds: float, every: int = EVERY, steps_per_s: float = 1e4
) -> None:
    """Train a preset of rlframe; `steps_per_s`: times `seconds`, over which env_steps its schedules go."""
    import rlframe
    from rlframe.runners import Callback

    class Watch(Callback):
        """Records evaluations; their time is that since the last batch."""

        def __init__(self) -> None:
            self.before, self.evaluating = cpu_seconds(), 0.0

        def on_start(self, runner: Any) -> None:
            self.before = cpu_seconds()  # building is no evaluation

        def on_batch(self, samples: Any) -> None:
            self.before = cpu_seconds()

        def on_update(self, metrics: Mapping[str, Any]) -> None:
            self.before = cpu_seconds()

        def on_evaluation(self, row: Mapping[str, float]) -> None:
            self.evaluating += cpu_seconds() - self.before
            if not record(self.runner.env_steps, self.evaluating, row["eval/return_mean"]):
                self.stop("the time is over")

    name = f"mujoco/{preset}_{env.partition('-')[0].lower()}"
    sizes = {
        "runner.n_steps": int(steps_per_s * seconds),
        "runner.log_interval_steps": every,
        "eval.n_episodes": EPISODES,
    }
    with tempfile.TemporaryDirectory() as directory:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{directory}/compiled"
        rlframe.train(
            experiment=name, env=env, seed=seed, threads=1, affinity="none", compile="true", log_dir=f"{directory}/run",
            callbacks=[Watch()], **sizes,
        )  # fmt: skip


def train_other(package: str, algo: str, env: str, seed: int, record: Record, _: float, **settings: Any) -> None:
    """Train with the defaults of Stable-Baselines3 or SBX."""
    import gymnasium
    import torch
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.evaluation import evaluate_policy
    from stable_baselines3.common.monitor import Monitor

    torch.set_num_threads(1)
    every, judged = EVERY_OF_PPO if algo == "PPO" else EVERY, Monitor(gymnasium.make(env))
    judged.reset(seed=1_000_000 + seed)

    class Watch(BaseCallback):
        """Records evaluations."""

        evaluating = 0.0

        def _on_step(self) -> bool:
            if self.num_timesteps % every:
                return True
            before = cpu_seconds()
            score, _ = evaluate_policy(self.model, judged, EPISODES)
            self.evaluating += cpu_seconds() - before
            return record(self.num_timesteps, self.evaluating, float(score))

    getattr(importlib.import_module(package), algo)("MlpPolicy", env, seed=seed, **settings).learn(
        10**7, callback=Watch()
    )


_SMALL = {"net_arch": {"pi": [256, 256], "qf": [256, 256]}}
CONTENDERS: dict[str, Callable[[str, int, Record, float], None]] = {
    "rlframe_ppo": partial(train_rlframe, "ppo", every=EVERY_OF_PPO, steps_per_s=_PPO_STEPS_PER_S),
    "rlframe_crossq": partial(train_rlframe, "crossq"),
    "rlframe_flashsac": partial(train_rlframe, "flashsac"),
    "rlframe_sac": partial(train_rlframe, "sac"),
    "sb3_ppo": partial(train_other, "stable_baselines3", "PPO", device="cpu"),
    "sb3_sac": partial(train_other, "stable_baselines3", "SAC", device="cpu"),
    "sbx_sac": partial(train_other, "sbx", "SAC"),
    "sbx_tqc": partial(train_other, "sbx", "TQC"),
    "sbx_crossq": partial(train_other, "sbx", "CrossQ"),
    "sbx_crossq_256": partial(train_other, "sbx", "CrossQ", policy_kwargs=_SMALL),
}


def measure(contender: str, env: str, seed: int, seconds: float, out: Path) -> None:
    """Train once, in this process; append the curve to `out`."""
    curve: list[dict[str, object]] = []
    start = cpu_seconds()

    def record(env_steps: int, evaluating: float, score: float) -> bool:
        took = cpu_seconds() - start - evaluating
        if took <= seconds:
            values = contender, env, seed, f"{seconds:g}", env_steps, f"{took:.1f}", f"{score:.1f}", cpu()
            print(*values, flush=True)
            curve.append(dict(zip(COLUMNS, values, strict=True)))
        return took <= seconds

    CONTENDERS[contender](env, seed, record, seconds)
    add_rows(out, COLUMNS, curve)


_FRAMEWORKS = {"rlframe": "rlframe", "sb3": "Stable-Baselines3", "sbx": "SBX"}
_ALGOS = {
    "ppo": "PPO",
    "crossq": "CrossQ",
    "flashsac": "FlashSAC",
    "sac": "SAC",
    "tqc": "TQC",
    "crossq_256": "CrossQ, widths of 256",
}


def label(contender: str) -> str:
    """Framework and algorithm."""
    framework, _, algo = contender.partition("_")
    return f"{_FRAMEWORKS[framework]} {_ALGOS[algo]}"


def within(rows: list[dict[str, str]], seconds: float) -> list[dict[str, str]]:
    """The evaluations of the first `seconds` of all trainings that lasted as long; of PPO's not longer."""
    lasted = [row for row in rows if float(row["cpu_seconds"]) <= seconds <= float(row["limit_s"])]
    return [row for row in lasted if row["contender"] != _SCHEDULED or float(row["limit_s"]) == seconds]


def table(rows: list[dict[str, str]]) -> str:
    """The last return of each seed, as Markdown: means by environment, of n seeds, and the normalised mean of all."""
    last = {(row["contender"], row["env"], row["seed"]): float(row["return_mean"]) for row in rows}
    lines = [["contender", *ENVS, "normalised"], ["---"] * (len(ENVS) + 2)]
    for contender in CONTENDERS:
        shares, cells = [], []
        for env in ENVS:
            scores = [score for (name, where, _), score in last.items() if (name, where) == (contender, env)]
            cells.append(f"{statistics.mean(scores):,.0f} (n={len(scores)})" if scores else "-")
            low, high = RANDOM_AND_TD3[env]
            shares += [(statistics.mean(scores) - low) / (high - low)] if scores else []
        if shares:
            normalised = f"{statistics.mean(shares):.2f}" if len(shares) == len(ENVS) else "-"
            lines.append([label(contender), *cells, normalised])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def draw(rows: list[dict[str, str]], envs: list[str], out: Path) -> None:
    """For each environment the mean return of each contender's seeds, and their range: over CPU time, and env_steps.

    Needs matplotlib.
    """
    from rlframe.analysis.figures import COLORS, new_figure, save_figure  # other frameworks have not its packages

    figure = new_figure(3 + 4.5 * len(envs), 7.6)
    clocks = {"cpu_seconds": (1 / 60, "CPU time on one core (min)"), "env_steps": (1 / 1000, "env steps (thousands)")}
    for (clock, (unit, named)), axes in zip(clocks.items(), figure.subplots(2, len(envs), squeeze=False), strict=True):
        for axis, env in zip(axes, envs, strict=True):
            for contender, color in zip(CONTENDERS, [*COLORS, "#999999", "#444444"], strict=True):
                own = [row for row in rows if (row["contender"], row["env"]) == (contender, env)]
                if not own:
                    continue
                x, scores = _curves(own, clock)
                style = "-" if contender.startswith("rlframe") else "--"
                dot = {"marker": "o", "markevery": [-1], "markersize": 4}  # one evaluation alone is seen too
                axis.plot(unit * x, scores.mean(0), style, color=color, linewidth=1.8, label=label(contender), **dot)
                axis.fill_between(unit * x, scores.min(0), scores.max(0), color=color, alpha=0.18, linewidth=0)
            axis.set(title=env if clock == "cpu_seconds" else "", xlabel=named)
            axis.grid(True, color="0.9", linewidth=0.8)
            axis.spines[["top", "right"]].set_visible(False)
            if clock == "env_steps":
                axis.set_xlim(-MOST_STEPS_SHOWN / 40_000, MOST_STEPS_SHOWN / 1000)
        axes[0].set_ylabel("mean return of an evaluation")
    figure.axes[len(envs) - 1].legend(frameon=False, fontsize="small", loc="upper left", bbox_to_anchor=(1.02, 1))
    save_figure(figure, out, drawn_numbers(rows))


def drawn_numbers(rows: list[dict[str, str]]) -> list[np.ndarray]:
    """What the figure is drawn from."""
    return [np.array([float(row[name]) for row in rows]) for name in ("env_steps", "cpu_seconds", "return_mean")]


def _curves(rows: list[dict[str, str]], clock: str) -> tuple[np.ndarray, np.ndarray]:
    """Where all seeds were measured, by CPU seconds or env_steps, [n], and their returns there [seeds, n]."""
    of_seed: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        of_seed.setdefault(row["seed"], []).append((float(row[clock]), float(row["return_mean"])))
    curves = [tuple(zip(*curve, strict=True)) for curve in of_seed.values()]
    x = np.linspace(max(at[0] for at, _ in curves), min(at[-1] for at, _ in curves), 200)
    return x, np.stack([np.interp(x, at, returns) for at, returns in curves])


def main(words: dict[str, str]) -> None:
    """Measure what is asked for and is not in `out` yet, each in a process of its own."""
    out, seconds = Path(words.get("out", OUT)), float(words.get("seconds", SECONDS))
    kept = rows_in(out, COLUMNS)
    if "show" in words:
        print(table(within(kept, seconds)))
        return
    if "figure" in words:
        draw(within(kept, seconds), words.get("envs", ",".join(ENVS)).split(","), Path(words["figure"]))
        return
    contender = words["contender"]
    envs, seeds = words.get("envs", ",".join(ENVS)).split(","), words.get("seeds", "0,1,2").split(",")
    if others := {row["cpu"] for row in kept} - {cpu()}:
        raise SystemExit(f"{out} has times of {' and '.join(sorted(others))}, this is {cpu()}; use out=ANOTHER.csv")
    if "one" in words:
        measure(contender, envs[0], int(seeds[0]), seconds, out)
        return
    if "core" in words and sys.platform == "linux":
        os.sched_setaffinity(0, {int(words["core"])})
    one_thread = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    own = {**os.environ, **one_thread, "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false"}
    python = words.get("python", sys.executable)
    for seed in seeds:
        for env in envs:
            if has(within(rows_in(out, COLUMNS), seconds), contender=contender, env=env, seed=seed):
                continue
            command = [python, "-m", "benchmarks.equal_clock", f"contender={contender}", f"envs={env}", f"seeds={seed}"]
            command += [f"seconds={seconds}", f"out={out}", "one=true"]
            subprocess.run(command, env=own, check=True, timeout=20 * seconds + 600)  # of the clock on the wall


if __name__ == "__main__":
    main(dict(word.split("=", 1) for word in sys.argv[1:]))
