"""stack=true: each seed learns what it learns alone and records its own run; what cannot be stacked is refused."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import rlframe
from rlframe import launch
from rlframe.core.errors import ConfigError
from rlframe.experiment.job import read_job
from rlframe.experiment.stacked import check_stackable, read_stack, run_stack, train_stack
from rlframe.record.snapshot import load_newest
from tests.tables import read_csv

SHORT = {"sampler": "serial", "eval.n_episodes": "0", "affinity": "none", "compile": "false", "model.hidden": "[8,8]"}
PPO = {"algo": "ppo", "env": "CartPole-v1", "sampler.batch_T": "16", "sampler.batch_B": "2", "algo.epochs": "5"}
PPO |= {"algo.minibatches": "2", "runner.n_steps": "60", "runner.log_interval_steps": "30"}  # 20 updates
SAC = {"algo": "sac", "env": "Pendulum-v1", "algo.learning_starts": "20", "algo.batch_size": "16"}
SAC |= {"algo.replay_ratio": "16", "runner.n_steps": "40", "runner.log_interval_steps": "20", "algo.replay.size": "100"}
TD3 = {**SAC, "algo": "td3"}
DQN = {**SAC, "algo": "dqn", "env": "CartPole-v1", "sampler.batch_B": "2", "sampler.batch_T": "1"}
DQN |= {"algo.target_interval": "3"}
CROSSQ = {**SAC, "model.norm": "renorm", "algo.target_critics": "false", "algo.policy_interval": "3"}
A2C = {"algo": "a2c", "env": "CartPole-v1", "sampler.batch_T": "5", "sampler.batch_B": "2", "runner.n_steps": "100"}
IMPALA = {**A2C, "algo": "impala"}
MUON = {**A2C, "algo.optimizer": "muon", "algo.optimizer.smallest": "8"}


def numbers(tree: Any) -> list[np.ndarray]:
    """All numbers of a part of a snapshot."""
    if isinstance(tree, Mapping):
        return [x for value in tree.values() for x in numbers(value)]
    if isinstance(tree, list | tuple):
        return [x for value in tree for x in numbers(value)]
    if isinstance(tree, torch.Tensor):
        return [tree.double().numpy().ravel()]
    return [np.asarray(tree, np.float64).ravel()] if isinstance(tree, int | float | np.ndarray) else []


def saved(run: Path) -> tuple[np.ndarray, np.ndarray]:
    """The numbers of the agent and of its algorithm in the newest snapshot."""
    state = load_newest(run, 0)[1]
    learned = {name: part for name, part in state["algo"].items() if name not in ("rng", "generator")}
    agent, algo = (np.concatenate(numbers(part)) for part in (state["agent"], learned))
    return agent, algo


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [PPO, A2C, IMPALA, MUON, SAC, CROSSQ, TD3, DQN],
    ids=["ppo", "a2c", "impala", "muon", "sac", "crossq", "td3", "dqn"],
)
def test_each_seed_learns_what_it_learns_alone(tmp_path: Path, words: dict[str, str]) -> None:
    words = {**words, **SHORT}
    assert train_stack(read_stack({**words, "log_dir": str(tmp_path / "stack")}, ["3", "8"])) == [None, None]
    for seed in (3, 8):
        rlframe.train(**{**words, "log_dir": str(tmp_path / "alone"), "seed": seed, "run_ID": seed})
        for own, other in zip(*(saved(tmp_path / name / f"run_{seed}") for name in ("alone", "stack")), strict=True):
            np.testing.assert_allclose(own, other, rtol=1e-3, atol=2e-5)
    assert not np.allclose(*(saved(tmp_path / "stack" / f"run_{seed}")[0] for seed in (3, 8)), atol=1e-2)


@pytest.mark.slow
def test_the_runs_can_be_used_and_resumed_one_by_one_or_as_a_stack(tmp_path: Path) -> None:
    words = {**PPO, **SHORT, "log_dir": str(tmp_path)}
    run_stack(read_stack(words, ["0", "1"]))
    run = tmp_path / "run_1"
    assert rlframe.load_policy(run).act(np.zeros(4, np.float32)) in (0, 1)
    config = json.loads((run / "params.json").read_text())["config"]
    assert (config["seed"], config["sampler"]) == (1, "serial")
    rlframe.train(resume=str(run), **{"runner.n_steps": 120})
    rows = [row["env_steps"] for row in read_csv(run / "progress.csv")[1]]
    assert len(rows) == len(set(rows))
    assert float(rows[-1]) >= 120
    run_stack(read_stack(words, ["0", "1"]))  # nothing is left
    assert [row["env_steps"] for row in read_csv(run / "progress.csv")[1]] == rows


@pytest.mark.slow
def test_a_run_that_ends_early_leaves_the_others_to_end(tmp_path: Path) -> None:
    words = {**PPO, **SHORT, "log_dir": str(tmp_path)}
    run_stack(read_stack(words, ["0"]))
    run_stack(read_stack({**words, "runner.n_steps": "120"}, ["0"]))
    jobs = read_stack({**words, "runner.n_steps": "120"}, ["0", "1"])  # the first has nothing left
    assert train_stack(jobs) == [None, None]
    assert float(read_csv(tmp_path / "run_1" / "progress.csv")[1][-1]["env_steps"]) >= 120


def test_a_stack_is_trained_longer_from_where_each_run_ended(tmp_path: Path) -> None:
    short = {"runner.n_steps": "10", "runner.log_interval_steps": "10", "model.hidden": "[4]"}
    words = {**A2C, **SHORT, **short, "log_dir": str(tmp_path)}
    for seed in range(2):  # alone
        rlframe.train(**words, seed=seed, run_ID=seed)
    run_stack(read_stack({**words, "runner.n_steps": "20"}, ["0", "1"]))
    for seed in range(2):
        rows = read_csv(tmp_path / f"run_{seed}/progress.csv")[1]
        assert [row["env_steps"] for row in rows] == ["0", "10", "20"]


def test_a_run_that_goes_on_has_the_affinity_of_now(tmp_path: Path) -> None:
    words = {**A2C, **SHORT, "model.hidden": "[4]", "runner.n_steps": "10", "log_dir": str(tmp_path)}
    rlframe.train(**words, seed=0, run_ID=0)
    jobs = read_stack({**words, "affinity": "1cpu_1cpr_0slt"}, ["0", "1"])
    assert [job.experiment.affinity for job in jobs] == ["1cpu_1cpr_0slt"] * 2
    assert [bool(job.resume) for job in jobs] == [True, False]


@pytest.mark.slow
def test_messages_of_a_seed_are_in_its_own_log_alone(tmp_path: Path) -> None:
    run_stack(read_stack({**PPO, **SHORT, "log_dir": str(tmp_path)}, ["0", "1"]))
    for seed, other in ((0, 1), (1, 0)):
        text = (tmp_path / f"run_{seed}" / "debug.log").read_text()
        assert f"run: {tmp_path / f'run_{seed}'}\n" in text
        assert f"run: {tmp_path / f'run_{other}'}\n" not in text


REFUSED = [
    ("world_size=2", "world_size=2"),
    ("sampler=cpu", "sampler=cpu"),
    ("runner=async_rl", "runner=async_rl"),
    ("model.memory=lstm", "model.memory=lstm"),
    ("model.critic.dropout=0.1", "model.critic.dropout=0.1"),
    ("reward.bonus=rnd", "reward.bonus=rnd"),
    ("eval.n_workers=2", "eval.n_workers=2"),
    ("loggers=[wandb]", r"loggers=\[wandb\]"),
]


@pytest.mark.parametrize(("word", "what"), REFUSED, ids=[word for word, _ in REFUSED])
def test_what_cannot_be_stacked_is_refused_with_the_remedy(word: str, what: str) -> None:
    key, _, value = word.partition("=")
    algo = {"algo": "sac", "env": "Pendulum-v1"} if "critic" in key else {"algo": "ppo", "env": "CartPole-v1"}
    with pytest.raises(ConfigError, match=rf"stack=true is not for .*{what}.*; run them one by one: leave stack=true"):
        check_stackable(read_job({**algo, "device": "cpu", key: value}).experiment)


@pytest.mark.slow
def test_an_optimizer_that_cannot_be_mapped_over_seeds_is_refused_at_the_first_update(tmp_path: Path) -> None:
    words = {**PPO, **SHORT, "algo.optimizer": "own", "algo.optimizer.name": "torch.optim:Adagrad"}
    with pytest.raises(ConfigError, match=r"stack=true: updates cannot be made at once: .*leave stack=true out"):
        run_stack(read_stack({**words, "log_dir": str(tmp_path)}, ["0", "1"]))


def test_an_algorithm_that_makes_its_updates_itself_is_neither_stacked_nor_compiled(tmp_path: Path) -> None:
    (file := tmp_path / "still.py").write_text(STILL)
    words = {**A2C, **SHORT, "compile": "true", "algo": str(file)}
    with pytest.raises(ConfigError, match=r"stack=true is not for Still, which makes its updates without updates_of"):
        run_stack(read_stack({**words, "log_dir": str(tmp_path / "stack")}, ["0", "1"]))
    assert launch.main([f"{key}={value}" for key, value in {**words, "log_dir": tmp_path / "alone"}.items()]) == 0
    log = (tmp_path / "alone" / "run_0" / "debug.log").read_text()
    assert "compile: true, but Still makes its updates without updates_of" in log


STILL = """
import chz
from rlframe.algos import Algorithm, Progress, a2c

class Still(Algorithm):
    saved = ("progress",)
    def __init__(self, agent):
        self.agent, self.progress, self.due = agent, Progress(), 0
    def receive(self, samples):
        self.progress.count(samples)
        self.due = 1
    def updates_due(self):
        return self.due
    def update(self):
        self.due = 0
        self.progress.updates += 1
        return {}

@chz.chz
class Config(a2c.Config):
    def make_algorithm(self, agent, batch_spec, n_steps, seed):
        return Still(agent)
"""


def test_a_single_run_may_say_stack_false(tmp_path: Path) -> None:
    words = [f"{key}={value}" for key, value in {**PPO, **SHORT, "log_dir": str(tmp_path), "stack": "false"}.items()]
    assert launch.main([*words, "dry_run=true"]) == 0
