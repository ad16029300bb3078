"""Runs of several policies: each learns from its own rows, frozen ones stay, and resumed ones are exactly the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("pettingzoo")

import rlframe
from rlframe.record.snapshot import load_snapshot
from rlframe.runners import Callback

SIZES = "sampler=serial sampler.batch_T=16 sampler.batch_B=2 model.hidden=[8] eval.n_episodes=1 eval.n_envs=1"
TWO = (
    f"env=tests.agents_envs:Crowd env_kwargs.kinds=2 algo=ppo algo.epochs=2 algo.minibatches=1 {SIZES} "
    f"agents.policies.even.algo.learning_rate=1e-2 agents.policies.odd.algo=dqn "
    f"agents.policies.odd.algo.learning_starts=50 agents.policies.odd.algo.batch_size=16"
)


class StopAt(Callback):
    """Asks to stop at an update of the policy that learns from replay."""

    update = -1

    def on_update(self, metrics: Any) -> None:
        if self.learner == "blue" and self.runner.learners["blue"].algo.progress.updates == StopAt.update:
            self.stop("enough")


def test_a_stop_amid_updates_loses_the_batch_of_no_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    game = "env=rlframe.envs.debug_agents:TwoStepGame agents.map.agent_0=red agents.map.agent_1=blue algo=ppo"
    blue = ["algo=dqn", "algo.batch_size=4", "algo.replay_ratio=16", "algo.learning_starts=8", "algo.replay.size=100"]
    words = [*game.split(), "algo.epochs=1", "algo.minibatches=1", *(f"agents.policies.blue.{word}" for word in blue)]
    words += ["runner=minibatch_rl", "runner.n_steps=32", *SIZES.replace("batch_B=2", "batch_B=1").split()[:-2]]
    settings = dict(word.split("=", 1) for word in words)

    def updates_of(run: Any) -> dict[str, int]:
        run.train()
        return {name: each.algo.progress.updates for name, each in run.runner.learners.items()}

    with rlframe.build(**settings, callbacks=[StopAt]) as run:
        whole = updates_of(run)
    monkeypatch.setattr(StopAt, "update", 40)
    with rlframe.build(**settings, callbacks=[StopAt]) as run:
        assert updates_of(run)["blue"] < whole["blue"]
        run.save(tmp_path / "stopped")
    with rlframe.restore(tmp_path / "stopped", trust=True) as run:
        assert updates_of(run) == whole


def test_two_algorithms_learn_side_by_side_and_count_steps_and_rows(tmp_path: Path) -> None:
    settings = dict(word.split("=", 1) for word in f"{TWO} runner.n_steps=256".split())
    result = rlframe.train(**settings, log_dir=str(tmp_path))
    row = result.metrics
    assert {"algo/even/policy_loss", "algo/odd/loss", "episode/even/return_mean", "replay/odd/rows"} <= set(row)
    assert row["agent_steps"] > 1.2 * row["env_steps"] > 256
    state = load_snapshot(result.directory)[0]
    assert {"agent/even", "agent/odd", "algo/even", "algo/odd"} <= set(state)
    assert 0 < row["replay/odd/rows"] < row["agent_steps"]


def rounds(policy: Any, make_env: Any) -> dict[str, float]:
    env, n = make_env(), 0
    observations, _ = env.reset(seed=3)
    while env.agents:
        observations, _, terminated, truncated, _ = env.step(policy.act(observations))
        n += 1
    assert all(terminated[agent] != truncated[agent] for agent in truncated)
    return {"return_mean": n}


def test_a_function_that_evaluates_has_environments_with_the_runs_time_limit(tmp_path: Path) -> None:
    settings = dict(word.split("=", 1) for word in f"{TWO} runner.n_steps=128 env.max_episode_steps=3".split())
    settings |= {"env_kwargs.death": "0", "eval.function": "tests.runners.test_multi_agent:rounds"}
    assert rlframe.train(**settings, log_dir=str(tmp_path)).metrics["eval/return_mean"] == 3


def test_a_frozen_policy_keeps_the_weights_of_another_run(tmp_path: Path) -> None:
    settings = dict(word.split("=", 1) for word in f"{TWO} runner.n_steps=128".split())
    first = rlframe.train(**settings, log_dir=str(tmp_path / "first"))
    other = {"agents.train": "[even]", "agents.policies.odd.init": str(first.directory), "seed": 1}
    second = rlframe.train(**settings, **other, log_dir=str(tmp_path / "second"))
    before, after = load_snapshot(first.directory)[0], load_snapshot(second.directory)[0]
    for policy, stays in {"odd": True, "even": False}.items():
        weights = {name: x for name, x in before[f"agent/{policy}"].items() if name.startswith("model.")}
        assert all(torch.equal(x, after[f"agent/{policy}"][name]) for name, x in weights.items()) == stays
    assert "algo/odd/loss" not in second.metrics


@pytest.mark.parametrize("algo", ["ppo", "pqn"])
def test_rows_in_which_agents_wait_are_left_out_of_minibatches(algo: str) -> None:
    """Of three agents that take turns, and one of whom leaves, fewer than half of all rows are valid."""
    seen: list[torch.Tensor] = []
    sizes = {"sampler": "serial", "sampler.batch_T": 32, "sampler.batch_B": 4, "algo.epochs": 1, "algo.minibatches": 4}
    with rlframe.build(algo, "tests.agents_envs:Turns", n_steps=999, runner="minibatch_rl", **sizes) as run:
        learner = run.runner.learners.only
        learn = learner.algo.learn
        learner.algo.learn = lambda inputs: (seen.append(inputs[0].valid), learn(inputs))[1]
        run.runner.iterate()
        n_valid = learner.algo.progress.agent_steps
    valid = torch.stack(seen)
    assert 0 < int(valid.sum()) == n_valid, "each valid row is learned from once"
    assert n_valid <= valid.numel() <= n_valid + 48 <= 384 / 2, "an eighth of all rows fills up"
