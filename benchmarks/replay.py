"""How fast replay is sampled compared with other packages, and how much memory it takes.

    python -m benchmarks.replay
    python -m benchmarks.replay rounds=9 only=cheetah,lz4 out=replay.json
    python -m benchmarks.replay small=true     a smoke test; its numbers mean nothing

What is measured, all in one process on one torch thread:

  cheetah       256 transitions of HalfCheetah (17 and 6 float32), uniform, from 1,000,000
  atari         32 transitions of stacked Atari frames (4 x 84 x 84), uniform, from 50,000
  prioritized   32 transitions of CartPole from 1,000,000, sampled by priority, and their priorities set
  lz4           32 transitions of Pong and of Breakout played at random, compressed and not, from 20,000, and the
                bytes of a transition

against Stable-Baselines3 (which has no prioritized replay), Tianshou and TorchRL, those that are installed.

Method. Contenders take turns for `seconds` each, for `rounds` rounds, with malloc set as launch sets it for all. A
time is the median over the rounds; a ratio is the median of the ratios within each round, so that a drifting speed
affects all alike: theirs over ours, so above 1 rlframe is faster. Run it on an idle machine.
"""

from __future__ import annotations

import importlib.util
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import chz
import numpy as np
import torch
from gymnasium import Space
from gymnasium.spaces import Box, Discrete

from benchmarks.parts import replay_others
from benchmarks.parts.chosen import chosen
from benchmarks.parts.replay_ours import Filled, of_noise, of_play, transition_bytes
from rlframe.core.spaces import FrameStack
from rlframe.replay import InMemory, ReplayBuffer
from rlframe.system.machine import limit_threads, retain_freed_memory

Unit = Callable[[], object]
OURS = "rlframe"
CHEETAH = (Box(-np.inf, np.inf, (17,), np.float32), Box(-1, 1, (6,), np.float32))
CARTPOLE = (Box(-np.inf, np.inf, (4,), np.float32), Discrete(2))
STACK = FrameStack(Box(0, 255, (4, 84, 84), np.uint8), 4)
GROUPS = ("cheetah", "atari", "prioritized", "lz4")


def cheetah(small: bool) -> dict[str, Unit]:
    """Uniform sampling of vectors."""
    return uniform(*CHEETAH, 256, 2_000 if small else 1_000_000)


def atari(small: bool) -> dict[str, Unit]:
    """Uniform sampling of frames."""
    return uniform(STACK, Discrete(6), 32, 2_000 if small else 50_000)


def uniform(observation: Space, action: Space, n: int, size: int) -> dict[str, Unit]:
    """Ours and theirs."""
    ours = of_noise(observation, action, InMemory(size=size))
    return {OURS: lambda: ours.sample(n), **replay_others.uniform(observation, action, n, size)}


def prioritized(small: bool) -> dict[str, Unit]:
    """Sampling and setting priorities."""
    size, n, rng = 2_000 if small else 1_000_000, 32, np.random.default_rng(0)
    ours = of_noise(*CARTPOLE, InMemory(size=size), alpha=0.6)
    priorities = rng.random((64, n))

    def unit() -> None:
        drawn = ours.sample(n, beta=0.4)
        ours.update_priorities(drawn.index, priorities[rng.integers(64)])

    for _ in range(1 if small else 2_000):
        unit()
    return {OURS: unit, **replay_others.prioritized(*CARTPOLE, n, size)}


def lz4(small: bool) -> tuple[dict[str, Unit], dict[str, float]]:
    """The cost of compression in time, and its gain in bytes a transition."""
    units: dict[str, Unit] = {}
    n_bytes: dict[str, float] = {}
    for game in ("Pong", "Breakout"):
        for compress in (False, True):
            name = f"{game}, {'compressed' if compress else 'plain'}"
            filled: Filled = of_play(f"ALE/{game}-v5", 1_000 if small else 20_000, compress)
            n_bytes[name] = transition_bytes(filled)
            units[name] = sampling(filled.replay, 32)
    return units, n_bytes


def sampling(replay: ReplayBuffer[Any], n: int) -> Unit:
    """Uniform."""
    return lambda: replay.sample(n)


def in_turns(units: dict[str, Unit], rounds: int, seconds: float) -> dict[str, list[float]]:
    """Microseconds of each, by round."""
    times: dict[str, list[float]] = {name: [] for name in units}
    for unit in units.values():
        unit()
    for _ in range(rounds):
        for name, unit in units.items():
            calls, start = 0, time.perf_counter()
            while (passed := time.perf_counter() - start) < seconds or not calls:
                unit()
                calls += 1
            times[name].append(passed / calls * 1e6)
    return times


def compare(times: dict[str, list[float]], over: dict[str, str]) -> dict[str, float]:
    """Median ratios, by `name / name`: of each key of `over` to its value, round by round."""
    return {
        f"{one} / {other}": statistics.median(a / b for a, b in zip(times[one], times[other], strict=True))
        for one, other in over.items()
    }


def measure(group: str, rounds: int, seconds: float, small: bool) -> dict[str, Any]:
    """One group: its times, ratios and bytes."""
    n_bytes: dict[str, float] = {}
    if group == "lz4":
        units, n_bytes = lz4(small)
        over = {f"{game}, compressed": f"{game}, plain" for game in ("Pong", "Breakout")}
    else:
        units = {"cheetah": cheetah, "atari": atari, "prioritized": prioritized}[group](small)
        over = {name: OURS for name in units if name != OURS}
    times = in_turns(units, rounds, seconds)
    ratios = compare(times, over)
    for name, each in times.items():
        print(f"{group:12s} {name:24s} {statistics.median(each):8.0f} us  ({min(each):.0f} to {max(each):.0f})")
    for name, ratio in ratios.items():
        print(f"{group:12s} {name:40s} {ratio:6.2f}")
    for name, count in n_bytes.items():
        print(f"{group:12s} {name:24s} {count:8.0f} bytes a transition")
    return {"us": times, "ratios": ratios, "bytes": n_bytes}


def main(rounds: int = 7, seconds: float = 0.5, only: str = "", small: bool = False, out: str = "") -> None:
    """Measure and print.

    Args:
        rounds: turns of each contender.    seconds: length of a turn.    only: groups, separated by commas.
        small: one very short round.    out: JSON file for all results."""
    limit_threads()
    torch.set_num_threads(1)
    retain_freed_memory()
    groups = chosen(only, GROUPS)
    for package, name in replay_others.PACKAGES.items():
        if importlib.util.find_spec(package) is None:
            print(f"without {name}, which is not installed")
    rounds, seconds = (1, 0.01) if small else (rounds, seconds)
    print(f"one torch thread, {rounds} rounds, {seconds} s a turn", flush=True)
    found = {group: measure(group, rounds, seconds, small) for group in groups}
    if out:
        content = {"torch_threads": torch.get_num_threads(), "seconds": seconds, "groups": found}
        Path(out).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    chz.entrypoint(main)
