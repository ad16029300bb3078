"""A run that takes over the snapshot of another one continues bit for bit as that one, or with changed settings."""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium
import pytest
import torch

from rlframe import launch
from rlframe.agents import make_policy_agent
from rlframe.algos.a2c import A2C, Config
from rlframe.core.errors import ConfigError, SnapshotError
from rlframe.core.types import BatchSpec
from rlframe.experiment.weights import keeping
from rlframe.exploration import EpsilonConfig, GaussianConfig
from rlframe.models import ModelConfig
from rlframe.record.branch import branch, change_settings, changes_of, copy_newest_snapshot
from rlframe.record.directory import DirectoryLock
from rlframe.record.snapshot import list_snapshots, load_snapshot, save_snapshot
from rlframe.runners import Learner
from tests.runners.resumed import assert_runs_equal, count_equal, last_state, log, words

PPO = "algo=ppo env=CartPole-v1 model.hidden=[8] sampler=serial sampler.batch_T=16 sampler.batch_B=2 algo.minibatches=2"
PPO += " algo.epochs=2 runner.n_steps=512 runner.log_interval_steps=128 eval.n_episodes=1"
DQN = "algo=dqn env=CartPole-v1 model.hidden=[8] sampler=serial sampler.batch_T=4 sampler.batch_B=2 replay.size=400"
DQN += (
    " algo.learning_starts=64 algo.prioritized=true runner.n_steps=512 runner.log_interval_steps=128 eval.n_episodes=1"
)
SAC = DQN.replace("dqn", "sac").replace("CartPole", "Pendulum").replace("algo.prioritized=true", "")
SLOW = [pytest.param(case, marks=pytest.mark.slow) for case in (DQN, SAC)]
CASES = [PPO, *SLOW]


def started(case: str, directory: Path, *more: str) -> Path:
    """A run in `directory` that stopped at the end of an interval."""
    assert launch.main([*words(case, directory), *more, "stop=env_steps >= 256"]) == 0
    return directory / "run_0"


def with_values(rows: Iterable[dict[str, str]]) -> list[dict[str, str]]:
    """Without the empty cells of metrics that came later."""
    return [{name: cell for name, cell in row.items() if cell} for row in rows]


def finished(run: Path) -> Path:
    assert launch.main([f"resume={run}", "stop="]) == 0
    return run


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.split()[0])
def test_a_member_that_goes_on_and_one_that_copies_it_are_equal_to_a_run_without_intervals(
    case: str, tmp_path: Path
) -> None:
    assert launch.main(words(case, tmp_path / "whole")) == 0
    whole, donor = tmp_path / "whole/run_0", started(case, tmp_path / "donor")
    member = started(case, tmp_path / "member", "seed=5", "algo.discount=0.9")
    before = with_values(log(member)[:2])
    branch(member, donor, {}, {"changed": []})
    assert_runs_equal(whole, finished(donor))
    finished(member)
    assert count_equal(last_state(whole), last_state(member), "state") > 5
    own = log(member)
    assert with_values(own[:2]) == before, "the log is that of the member before it copied"
    later = with_values(row for row in log(whole) if int(row["env_steps"]) > 300)
    assert with_values(own[-len(later) :]) == later
    config = json.loads((member / "params.json").read_text())["config"]
    assert (config["algo.discount"] == 0.9, config["seed"]) == (False, 0)
    assert config["log_dir"] == str(tmp_path / "member")


def test_changed_numbers_hold_from_the_copied_snapshot_on(tmp_path: Path) -> None:
    donor, member = started(PPO, tmp_path / "donor"), started(PPO, tmp_path / "member", "seed=5")
    note = {"changed": ["algo.learning_rate"]}
    branch(member, donor, {"algo.learning_rate": 7e-6}, note)
    finished(member)
    rates = [float(row["algo/learning_rate"]) for row in log(member) if row["algo/learning_rate"]]
    assert rates[-1] == 7e-6
    assert rates[0] > 1e-4
    assert changes_of(member) == [{"env_steps": load_snapshot(donor)[1]["env_steps"], **note}]


def test_a_copy_replaces_later_snapshots_and_links_its_files(tmp_path: Path) -> None:
    state = {"x": torch.arange(600_000)}
    for env_steps in (100, 200):
        save_snapshot(tmp_path / "donor/snapshot", {**state, "at": env_steps}, {"env_steps": env_steps})
    for env_steps in (150, 200, 300):
        save_snapshot(tmp_path / "run/snapshot", {"at": "own"}, {"env_steps": env_steps})
    (tmp_path / "run/snapshot/best").symlink_to("step_000000000300")
    target = copy_newest_snapshot(tmp_path / "donor", tmp_path / "run")
    assert [each.name for each in list_snapshots(tmp_path / "run/snapshot")] == ["step_000000000150", target.name]
    assert load_snapshot(tmp_path / "run")[0]["at"] == 200
    assert os.readlink(tmp_path / "run/snapshot/last") == target.name
    assert not (tmp_path / "run/snapshot/best").is_symlink()
    (chunk,) = list((target / "chunks").iterdir())[:1]
    assert chunk.stat().st_nlink > 1
    with pytest.raises(SnapshotError, match="has no snapshot that can be copied"):
        copy_newest_snapshot(tmp_path / "nothing", tmp_path / "run")


def test_a_run_that_a_process_has_is_not_changed(tmp_path: Path) -> None:
    lock = DirectoryLock(tmp_path, "a run", "log_dir")
    with pytest.raises(ConfigError, match="is in use by a run"):
        change_settings(tmp_path, {"stop": ""})
    lock.close()


def test_a_rate_that_was_set_in_the_run_ends_where_the_setting_changes() -> None:
    def made(rate: float) -> A2C:
        space = gymnasium.spaces.Box(-1.0, 1.0, (2,)), gymnasium.spaces.Discrete(2)
        agent = make_policy_agent(*space, ModelConfig(hidden=(4,)))
        return A2C(agent, 100, Config(learning_rate=rate))

    donor, member = made(1e-3), made(1e-5)
    donor.learning_rate = 5e-4
    with keeping({"agent": member}, {"algo.discount"}):
        member.load_state_dict(donor.state_dict())
    assert member.learning_rate == 5e-4
    member = made(1e-5)
    with keeping({"agent": member}, {"algo.learning_rate"}):
        member.load_state_dict(donor.state_dict())
    assert member.learning_rate == 1e-5
    assert "kept_rate" not in member.state_dict()["optimizer"]


@pytest.mark.parametrize(("kind", "key"), [("dqn", "epsilon"), ("pqn", "epsilon"), ("td3", "std")])
def test_a_changed_exploration_holds_from_the_first_action_on(kind: str, key: str) -> None:
    module = importlib.import_module(f"rlframe.algos.{kind}")
    actions = gymnasium.spaces.Box(-1.0, 1.0, (2,)) if kind == "td3" else gymnasium.spaces.Discrete(2)

    def made(level: float) -> Learner:
        kind_of_noise = EpsilonConfig(epsilon=level) if key == "epsilon" else GaussianConfig(std=level)
        config = module.Config(explore=kind_of_noise)
        agent = config.make_agent(gymnasium.spaces.Box(-1.0, 1.0, (2,)), actions, ModelConfig(hidden=(4,)))
        return Learner(agent, config.make_algorithm(agent, BatchSpec(32, 1), 1_000))

    donor, member = made(0.5), made(0.1)
    donor.algo.progress.env_steps = 32  # a batch was received
    member.agent.load_state_dict(donor.agent.state_dict())
    member.algo.load_state_dict(donor.algo.state_dict())
    level: Any = member.agent.exploration
    assert level.level[0] == pytest.approx(0.1)


def test_only_what_changed_of_an_optimizer_of_torch_is_kept_while_its_state_is_loaded(
    caplog: pytest.LogCaptureFixture,
) -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    saved = torch.optim.SGD([parameter], lr=1e-3, weight_decay=0.1).state_dict()

    def loaded(*changed: str) -> dict[str, Any]:
        optimizer = torch.optim.SGD([parameter], lr=2e-3, weight_decay=0.2)
        algo: Any = SimpleNamespace(optimizer=optimizer)
        with keeping({"agent": algo}, changed):
            optimizer.load_state_dict(saved)
        group: dict[str, Any] = optimizer.param_groups[0]
        return {name: group[name] for name in ("lr", "weight_decay")}

    assert loaded() == {"lr": 1e-3, "weight_decay": 0.1}
    assert loaded("algo.learning_rate", "algo.weight_decay") == {"lr": 2e-3, "weight_decay": 0.2}
    assert not caplog.text
    assert loaded("algo.policy_rate") == {"lr": 1e-3, "weight_decay": 0.1}
    assert "SGD goes on with lr=0.001, as it was saved, not 0.002: a key that changes it ends with" in caplog.text
    assert loaded("algo.learning_rate") == {"lr": 2e-3, "weight_decay": 0.1}
    assert loaded("algo.weight_decay", "algo.clip") == {"lr": 1e-3, "weight_decay": 0.2}
