"""The cost of recording: env_steps a second of a training run with `record=NAME`, over those of the same run without.

    python -m benchmarks.recording
    python -m benchmarks.recording rounds=9 only=cartpole folder=/data/scratch out=recording.json
    python -m benchmarks.recording small=true     a smoke test; its numbers mean nothing

What is compared, each on one core and one torch thread, not compiled (ratios below 1 are the cost):

  cartpole   PPO on CartPole-v1, 8 environments, SerialSampler, 128 steps a batch, as in the preset
  pendulum   SAC on Pendulum-v1, one environment, an update of 256 rows for each env_step
  pong       PPO on ALE/Pong-v5, 8 environments, 128 steps a batch, stacks of four frames of 84x84; also with
             record_compression=lz4

Method: as in sampling.py. Each contender trains in a process of its own, and they take turns of `seconds` for `rounds`
rounds; a ratio is the median of the ratios within each round. Seeds are equal, so that all play the same episodes. A
unit of work is an interval of the log; after each, the recording side waits until all whole episodes are written, as
for a snapshot. So no turn does the writing of another, and writing, which a run does beside learning, counts in full.
Nothing is evaluated, and the run itself is not recorded. Run it on an idle machine, with `folder` on the disk of the
datasets.
"""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import chz

import rlframe
from benchmarks.parts.chosen import chosen
from benchmarks.parts.turns import Comparison, Contender, Group, Unit, run_groups
from rlframe.system.machine import limit_threads

N_STEPS = 10**9  # more than any turn needs
ALONE, WITH, PACKED = "not recording", "recording", "recording, lz4"
ALL: dict[str, Any] = {"sampler": "serial", "eval.n_episodes": 0, "threads": 1, "compile": "false", "affinity": "none"}
RUNS: dict[str, dict[str, Any]] = {
    "cartpole": {
        "algo": "ppo",
        "env": "CartPole-v1",
        "experiment": "classic/ppo_cartpole",
        "sampler.batch_T": 128,
        "sampler.batch_B": 8,
        "runner.log_interval_steps": 8_192,
    },
    "pendulum": {
        "algo": "sac",
        "env": "Pendulum-v1",
        "sampler.batch_T": 1,
        "sampler.batch_B": 1,
        "algo.learning_starts": 200,
        "runner.log_interval_steps": 400,
    },
    "pong": {
        "algo": "ppo",
        "env": "ALE/Pong-v5",
        "env_kwargs.num_threads": 1,
        "sampler.batch_T": 128,
        "sampler.batch_B": 8,
        "runner.log_interval_steps": 1_024,
    },
}


def training(keys: dict[str, Any], stack: ExitStack) -> Unit:
    """A run, an interval of its log at a time."""
    run = stack.enter_context(rlframe.build(**{**ALL, **keys, "runner.n_steps": N_STEPS}))

    def unit() -> int:
        before = run.runner.env_steps
        next(run)
        run.runner.callbacks.state_dict()  # waits until all is written
        return run.runner.env_steps - before

    for _ in range(2):  # the first row comes before any step; then algorithms begin to learn
        unit()
    return unit


def group(name: str, folder: Path, small: bool) -> Group:
    """A run, and the same with recording."""
    keys = RUNS[name] | ({"runner.log_interval_steps": 256, "sampler.batch_T": 32} if small else {})
    ways: dict[str, dict[str, Any]] = {ALONE: {}, WITH: {"record": f"{folder}/{name}-v0"}}
    if name == "pong":
        ways[PACKED] = {"record": f"{folder}/{name}-lz4-v0", "record_compression": "lz4"}
    contenders = [Contender(way, partial(training, {**keys, **more})) for way, more in ways.items()]
    asked = {"cartpole": 0.95}.get(name, 0.0)
    comparisons = [Comparison(f"{way} over {ALONE}", (way,), ((ALONE,),), asked) for way in ways if way != ALONE]
    return Group(contenders, comparisons, ("ale_py", "pyarrow") if name == "pong" else ("pyarrow",))


def main(
    rounds: int = 7, seconds: float = 10.0, only: str = "", folder: str = "", small: bool = False, out: str = ""
) -> None:
    """Measure and print.

    Args:
        rounds: turns of each contender.    seconds: length of a turn, at least an interval of the log.
        only: groups, separated by commas.    folder: of the datasets; default: the system's for temporary files.
        small: one very short round.    out: JSON file for all results.
    """
    limit_threads()
    names = chosen(only, RUNS)
    rounds, seconds = (1, 0.05) if small else (rounds, seconds)
    with tempfile.TemporaryDirectory(dir=folder or None) as scratch:
        run_groups({name: group(name, Path(scratch), small) for name in names}, rounds, seconds, out)


if __name__ == "__main__":
    chz.entrypoint(main)
