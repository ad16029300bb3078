"""How often the intervals of off-policy estimates cover a truth that is known: CartPole, 2,000 episodes, many datasets.

    python -m benchmarks.estimates                     100 datasets, into results/offline/estimates.json
    python -m benchmarks.estimates n_datasets=10 out=/tmp/few.json

CartPole-v1 cut after LIMIT steps, discount 0.99. Both policies push right with probability σ(β (0.5 v + 8 θ + 3 ω)), of
the cart's speed v and the pole's angle θ and speed ω: the behaviour policy with β = 0.15, the target policy with 0.4.
The truth is the mean of TRUTH_EPISODES episodes of the target policy. Each dataset is 2,000 new episodes of the
behaviour policy, with the log-probabilities that it acted with. A dataset that is in `out` already is not estimated
again.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv

from rlframe.core.command_line import KeyValues, run_command
from rlframe.data.episodes import Episode
from rlframe.distributions import Categorical
from rlframe.evaluation.estimate import METHODS, estimate
from rlframe.evaluation.target_policy import TargetPolicy

LIMIT, DISCOUNT, N_EPISODES = 50, 0.99, 2_000
TRUTH_EPISODES, AT_ONCE = 2_000_000, 200_000
FIRST_TRUTH_SEED = 1_000_000
BEHAVIOUR, TARGET = 0.15, 0.4  # β
GAINS = np.array([0.0, 0.5, 8.0, 3.0])  # of the cart's place and speed, the pole's angle and speed
OUT = Path("results/offline/estimates.json")
OBSERVATIONS = spaces.Box(-np.inf, np.inf, (4,), np.float32)


def play(beta: float, n: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """n episodes side by side: observations [n, LIMIT+1, 4], actions, whether it acts and terminates [n, LIMIT]."""
    env, rng = CartPoleVectorEnv(num_envs=n, max_episode_steps=10**9), np.random.default_rng([seed, 1])
    observation, _ = env.reset(seed=seed)
    acts = np.ones(n, bool)
    columns: list[tuple[np.ndarray, ...]] = []
    seen = [observation]
    for _ in range(LIMIT):
        action = (rng.random(n) < 1 / (1 + np.exp(-beta * (observation @ GAINS)))).astype(np.int64)
        observation, _, terminated, _, _ = env.step(action)
        columns.append((action, acts, terminated))
        seen.append(observation)
        acts = acts & ~terminated
    action, acting, terminated = (np.stack(column, 1) for column in zip(*columns, strict=True))
    return np.stack(seen, 1), action, acting, terminated


def episodes_of(seed: int) -> list[Episode]:
    """A dataset."""
    observation, action, acting, terminated = play(BEHAVIOUR, N_EPISODES, seed)
    z = BEHAVIOUR * (observation[:, :-1] @ GAINS)
    log_prob = -np.logaddexp(0, np.where(action == 1, -z, z))
    found = []
    for i, T in enumerate(acting.sum(1)):
        ends = np.arange(T) == T - 1
        flags = terminated[i, :T], ends & ~terminated[i, :T]
        found.append(
            Episode(
                observation[i, : T + 1], action[i, :T], np.ones(T, np.float32), *flags, {"log_prob": log_prob[i, :T]}
            )
        )
    return found


def target_policy() -> TargetPolicy:
    """The policy that is estimated."""
    gains = torch.tensor(GAINS, dtype=torch.float32)

    def logits(episode: Episode) -> torch.Tensor:
        right = TARGET * (torch.as_tensor(episode.observation) @ gains)
        return torch.stack([torch.zeros_like(right), right], -1)

    return TargetPolicy(logits, Categorical(2), OBSERVATIONS, spaces.Discrete(2))


def truth() -> tuple[float, float]:
    """What the target policy is worth, and the standard error of that."""
    gamma, parts = DISCOUNT ** np.arange(LIMIT), range(TRUTH_EPISODES // AT_ONCE)
    returns = np.concatenate([play(TARGET, AT_ONCE, FIRST_TRUTH_SEED + part)[2] @ gamma for part in parts])
    return float(returns.mean()), float(returns.std() / math.sqrt(len(returns)))


def estimated(seed: int) -> dict[str, Any]:
    """The estimates of one dataset, and the CPU time that they took."""
    start, episodes = time.process_time(), episodes_of(seed)
    report = estimate(target_policy(), episodes, DISCOUNT, METHODS, seed=seed)
    rows = {each.method: [each.value, each.low, each.high] for each in report.estimates}
    facts = {"effective_episodes": report.effective_episodes, "played": report.played.value}
    return {"seed": seed, **facts, "cpu_seconds": time.process_time() - start, "estimates": rows}


def summary(found: dict[str, Any]) -> dict[str, dict[str, float]]:
    """For each method how many intervals cover the truth, and the mean, spread and width."""
    lines = {}
    for method in found["datasets"][0]["estimates"]:
        values, lows, highs = zip(*(each["estimates"][method] for each in found["datasets"]), strict=True)
        lines[method] = {
            "covered": sum(low <= found["truth"] <= high for low, high in zip(lows, highs, strict=True)),
            "datasets": len(values),
            "mean": statistics.fmean(values),
            "std": statistics.pstdev(values),
            "width": statistics.fmean(highs) - statistics.fmean(lows),
        }
    return lines


def main(argv: list[str]) -> int:
    return run_command(_main, argv)


def _main(argv: list[str]) -> int:
    words = KeyValues(argv)
    n_datasets, out = words.count("n_datasets", 100), Path(words.text("out", str(OUT)))
    words.check_unknown(("n_datasets", "out"))
    torch.set_num_threads(1)
    found = json.loads(out.read_text()) if out.exists() else {}
    if not found:
        value, error = truth()
        found = {"truth": value, "truth_error": error, "n_episodes": N_EPISODES, "limit": LIMIT, "datasets": []}
    out.parent.mkdir(parents=True, exist_ok=True)
    for seed in range(1 + len(found["datasets"]), 1 + n_datasets):
        found["datasets"].append(estimated(seed))
        found["summary"] = summary(found)
        out.write_text(json.dumps(found, indent=1) + "\n")
    for method, line in found["summary"].items():
        print(f"{method:10}  " + "  ".join(f"{name} {number:.4g}" for name, number in line.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
