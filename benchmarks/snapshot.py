"""The cost of a snapshot: how long training waits and how much is written, for the first one and the following ones.

    python -m benchmarks.snapshot
    python -m benchmarks.snapshot following=9 only=cheetah,atari folder=/data/scratch out=snapshot.json
    python -m benchmarks.snapshot small=true     a smoke test; its numbers mean nothing

What is measured, on one torch thread:

  cheetah       SAC, 256x256, with 1,000,000 transitions of HalfCheetah's sizes (17 and 6 float32)
  atari         DQN, the paper's network, with 100,000 frames of noise in stacks of four: nothing to compress
  lz4           the same, of Pong played at random, compressed

Method. Replay is filled by its own `append`. Then a snapshot is written as a run writes it, with snapshot_mode=last,
of the complete state of algorithm and agent: a first one, then `following` ones, each after 10,000 new env_steps
(which change the parameters too, so that all of those are written again). Seconds are wall time, from `state_dict` to
the removal of old snapshots; bytes are those of new files, without links. Run it on an idle machine, with `folder` on
the disk of the runs.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import chz
import numpy as np
import torch
from gymnasium import Space
from gymnasium.spaces import Box, Discrete

from benchmarks.parts.chosen import chosen
from benchmarks.parts.replay_ours import B, T, noise_batches, play_batches
from rlframe.agents import Agent
from rlframe.algos import Algorithm, dqn, sac
from rlframe.core.spaces import FrameStack
from rlframe.core.types import BatchSpec, Samples
from rlframe.envs import EnvConfig, make_envs
from rlframe.models import ModelConfig
from rlframe.record.retention import Retention, SnapshotPolicy
from rlframe.replay import InMemory, ReplayConfig
from rlframe.system.machine import limit_threads, retain_freed_memory

NEW = 10_000  # env_steps between snapshots
CHEETAH = (Box(-np.inf, np.inf, (17,), np.float32), Box(-1, 1, (6,), np.float32))
PONG = (FrameStack(Box(0, 255, (4, 84, 84), np.uint8), 4), Discrete(6))
GROUPS = ("cheetah", "atari", "lz4")


class Learner(NamedTuple):
    """The state that is saved, and a source of new rows for it."""

    agent: Agent
    algo: Algorithm
    batches: Iterator[Samples]


def learner(
    module: Any, observation: Space, action: Space, replay: ReplayConfig, batches: Iterator[Samples]
) -> Learner:
    """A learner with a full replay, after one update."""
    config = module.Config(replay=replay, learning_starts=NEW // 10)
    agent = config.make_agent(observation, action, ModelConfig(hidden=(256, 256)), 0)
    algo = config.make_algorithm(agent, BatchSpec(T, B), 10**7, 0)
    for batch in islice(batches, replay.size // (T * B) + 1):
        algo.receive(batch.torch())
    algo.update()
    return Learner(agent, algo, batches)


def measure(made: Learner, folder: Path, following: int, new: int) -> list[dict[str, float]]:
    """Seconds and bytes of the first snapshot and of the others."""
    retention, found, known = Retention(folder, SnapshotPolicy()), [], set[int]()
    for number in range(1 + following):
        if number:
            for batch in islice(made.batches, -(-new // (T * B))):
                made.algo.receive(batch.torch())
            made.algo.update()
        start = time.perf_counter()
        retention.save_if_due(
            lambda: {"agent": made.agent.state_dict(), "algo": made.algo.state_dict()}, number, 0.0, 0, False
        )
        seconds = time.perf_counter() - start
        files = {file.stat().st_ino: file.stat().st_size for file in folder.glob("step_*/**/*") if file.is_file()}
        written = sum(n_bytes for inode, n_bytes in files.items() if inode not in known)
        known |= files.keys()
        found.append({"seconds": seconds, "bytes": written})
    return found


def run(group: str, folder: Path, following: int, small: bool) -> list[dict[str, float]]:
    """Measure one group, and print it in a line."""
    new = 800 if small else NEW
    if group == "cheetah":
        made = learner(sac, *CHEETAH, InMemory(size=4_000 if small else 1_000_000), noise_batches(*CHEETAH))
        found = measure(made, folder, following, new)
    elif group == "atari":
        made = learner(dqn, *PONG, InMemory(size=4_000 if small else 100_000), noise_batches(*PONG))
        found = measure(made, folder, following, new)
    else:
        replay = InMemory(size=4_000 if small else 100_000, compress=True)
        with closing(make_envs(EnvConfig("ALE/Pong-v5", n_threads=1), B, list(range(B)))) as envs:
            made = learner(dqn, envs.observation_space, envs.action_space, replay, play_batches(envs))
            found = measure(made, folder, following, new)
    first, *others = found
    seconds, n_bytes = ([each[key] for each in others] for key in ("seconds", "bytes"))
    print(
        f"{group:8s} first {first['seconds']:6.2f} s, {first['bytes'] / 1e6:6.0f} MB    following "
        f"{statistics.median(seconds):6.3f} s ({min(seconds):.3f} to {max(seconds):.3f}), "
        f"{statistics.median(n_bytes) / 1e6:5.1f} MB",
        flush=True,
    )
    return found


def main(following: int = 7, only: str = "", folder: str = "", small: bool = False, out: str = "") -> None:
    """Measure and print.

    Args:
        following: snapshots after the first.    only: groups, separated by commas.
        folder: on the disk to measure; default: the system's folder for temporary files.
        small: small replays.    out: JSON file for all results.
    """
    limit_threads()
    torch.set_num_threads(1)
    retain_freed_memory()
    groups = chosen(only, GROUPS)
    found: dict[str, list[dict[str, float]]] = {}
    for group in groups:
        with tempfile.TemporaryDirectory(dir=folder or None) as scratch:
            found[group] = run(group, Path(scratch), 2 if small else following, small)
    if out:
        Path(out).write_text(json.dumps({"groups": found}, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    chz.entrypoint(main)
