"""Algorithms of the user's own: one that its config never makes is named."""

import json
from pathlib import Path

import pytest

import rlframe
from rlframe import launch
from rlframe.core.errors import warn_once

FILE = """
import chz
from rlframe.algos import ppo

class Mine(ppo.PPO):
    pass

@chz.chz
class Config(ppo.Config):
    def {method}(self, agent, batch_spec, n_steps, seed=0):
        return Mine(agent, batch_spec, n_steps, self, seed)
"""


@pytest.mark.parametrize(("method", "n_warnings"), [("make_algoritm", 1), ("make_algorithm", 0)])
def test_an_algorithm_that_its_config_never_makes_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, method: str, n_warnings: int
) -> None:
    file = tmp_path / f"own_{method}.py"
    file.write_text(FILE.format(method=method))
    warn_once.cache_clear()
    words = {"sampler": "serial", "runner.n_steps": 64, "eval.n_episodes": 0, "affinity": "none"}
    rlframe.train(str(file), "CartPole-v1", log_dir=tmp_path / "runs", **words)
    says = f"the config of own_{method} makes rlframe.algos.ppo:PPO, not Mine; see its make_algorithm"
    assert caplog.text.count(says) == n_warnings


def test_a_renamed_or_undecorated_config_is_told_from_a_slip_in_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    decorated = FILE.format(method="make_algorithm").replace("    def make", "    extra: int = 3\n    def make")
    files = {name: tmp_path / f"own_config_{name}.py" for name in ("given", "undecorated")}
    files["given"].write_text(decorated)
    files["undecorated"].write_text(decorated.replace("@chz.chz\n", ""))
    run = tmp_path / "runs/run_0"
    run.mkdir(parents=True)
    config = {"env": "CartPole-v1", "algo": str(files["given"]), "algo.extras": 4, "runner.n_steps": 64, "seed": 0}
    (run / "params.json").write_text(json.dumps({"config": {**config, "sampler.batch_T": 8, "sampler.batch_B": 1}}))
    said = "run_0/params.json does not fit your code as it is now: unknown key algo.extras; did you mean algo.extra?"
    for words, says in {
        f"resume={run} trust=true": said,
        f"algo={files['given']} algo.extras=4": "error: unknown key algo.extras; did you mean algo.extra?",
        f"algo={files['undecorated']} algo.extra=4": "is not decorated, so its fields are no keys; write @chz.chz",
    }.items():
        assert launch.main(words.split()) == 2
        assert says in capsys.readouterr().err


OWN_AGENT = """
import chz
import numpy as np
import torch
from torch import nn
from rlframe.agents import Agent
from rlframe.algos import Algorithm, Progress
from rlframe.core.types import AgentStep

class Mine(Algorithm):
    saved = ("progress",)

    def __init__(self):
        self.progress, self.left = Progress(), 0

    def receive(self, samples):
        self.progress.count(samples)
        self.left = 1

    def updates_due(self):
        return self.left

    def update(self):
        self.left, self.progress.updates = 0, self.progress.updates + 1
        return {"loss": torch.zeros(())}

class Drawn(Agent):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def step(self, inputs, state, noise):
        return AgentStep(action=(noise[:, 0] > 0.5).long(), info=(), state=state)

    def noise(self, rng, lead):
        return rng.random((*lead, 1), dtype=np.float32)

    def initial_state(self, env_ids):
        return ()

@chz.chz
class Config:
    def make_agent(self, observation_space, action_space, model, seed):
        return Drawn()

    def make_algorithm(self, agent, batch_spec, n_steps, seed):
        return Mine()
"""
CALLED = "is called with (observation_space, action_space, model, seed)"
SLIPS = {  # what is written, in whose place, and what the last line says
    "action_space, model, seed):": ("action_space):", f"failed; it {CALLED}: TypeError: Config.make_agent() takes 3"),
    "return Drawn()": (
        "a, b = (1,)",
        f"failed; it {CALLED}: ValueError: not enough values to unpack (expected 2, got 1)",
    ),
    "return Mine()": ("a, b = (1,)", "(agent, batch_spec, n_steps, seed): ValueError: not enough values to unpack"),
    "state, noise)": ("state)", "Drawn failed to act on one row: TypeError: Drawn.step() takes 3 positional arguments"),
    "return AgentStep": ("return dict", "Drawn.step returned dict; return AgentStep(action=..., info=..., state=...)"),
    "0.5).long()": (
        "0.5).long()[:, None]",
        "acts on one row by an action of shape [[1, 1]]; of this space it is [[1]]",
    ),
    "(*lead, 1)": (
        "(1,)",
        "noise(rng, (2,)) has arrays [[1]], which must be [[2, 1]]: [*lead, ...], a draw for each",
    ),
    "self.left = 1": ("self.left = samples.x", "Mine failed in receive: AttributeError: 'Samples' object has no"),
    "zeros(())": ("zeros(3)", "Mine.update: metric 'algo/loss' must be a single number, got shape (3,); take its mean"),
}


@pytest.mark.parametrize("old", ["", *SLIPS])
def test_a_slip_in_an_own_algorithm_is_a_line_that_names_its_part(
    old: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    new, says = SLIPS.get(old, ("", ""))
    file = tmp_path / f"slip_{list(SLIPS).index(old) if old else 'none'}.py"
    file.write_text(OWN_AGENT.replace(old, new) if old else OWN_AGENT)
    words = f"algo={file} env=CartPole-v1 sampler=serial sampler.batch_B=2 sampler.batch_T=4 runner.n_steps=16"
    status = launch.main([*words.split(), "eval.n_episodes=0", "affinity=none", f"log_dir={tmp_path}/runs"])
    said = capsys.readouterr().err
    assert (status != 0) == bool(says), said
    assert says in said.splitlines()[-1] if says else "error" not in said


BONUS = """
from dataclasses import replace
import chz
from rlframe.rewards import BonusConfig, Rewards

class More(Rewards):
    def __init__(self, rewards):
        self.rewards = rewards

    def __call__(self, samples):
        samples = self.rewards(samples)
        return replace(samples, reward=samples.reward + 1)

    def state_dict(self):
        return {}

    def load_state_dict(self, state):
        pass

@chz.chz
class Config(BonusConfig):
    def add_to(self, rewards, algo, in_spaces, n_steps, seed=0):
        return More(rewards)
"""


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("in_spaces, n_steps, seed=0", "in_spaces", "failed; it is called with (rewards, algo, (observation_space,"),
        ("return More", "More", "gives NoneType; return Rewards"),
        ("samples.reward + 1", "samples.rewards", "More failed: AttributeError: 'Samples' object has no attribute"),
        ("return replace", "replace", "More returned NoneType; return Samples, with the new rewards"),
    ],
)
def test_a_slip_in_an_own_bonus_is_a_line_that_names_it(
    old: str, new: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / f"bonus_{abs(hash(old))}.py"
    file.write_text(BONUS.replace(old, new))
    words = f"reward.bonus={file} algo=ppo env=CartPole-v1 sampler=serial sampler.batch_B=2 sampler.batch_T=8"
    more = "runner.n_steps=16 algo.minibatches=1 eval.n_episodes=0 affinity=none"
    assert launch.main([*words.split(), *more.split(), f"log_dir={tmp_path}/runs"]) != 0
    assert says in capsys.readouterr().err.splitlines()[-1]


def test_a_file_without_its_class_is_told_how_to_name_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "shop.py").write_text("")
    assert launch.main([f"env={tmp_path}/shop.py", "dry_run=true"]) == 2
    assert f"names no class of the file; write env={tmp_path}/shop.py:NAME" in capsys.readouterr().err


def test_a_file_without_its_ending_is_told_by_its_path(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text("")
    monkeypatch.chdir(tmp_path)
    for word in ("./mine", "mine"):
        assert launch.main([f"algo={word}", "env=CartPole-v1", "dry_run=true"]) == 2
        assert capsys.readouterr().err.strip().endswith("; for your file write ./mine.py")
