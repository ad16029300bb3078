"""The algorithm with replay of the tutorial: it learns, is resumed exactly, and mistakes in it are one line each."""

import json
import logging
from pathlib import Path
from typing import Any

import chz
import pytest
import torch
from gymnasium import spaces
from torch import nn

import rlframe
from rlframe import launch
from rlframe.algos import sac
from rlframe.algos.base import UpdateMetrics
from rlframe.algos.off_policy import FromReplay, FromReplayConfig, replay_of
from rlframe.algos.ppo import PPO
from rlframe.algos.ppo import Config as PPOConfig
from rlframe.core.errors import ConfigError, PartError
from rlframe.core.types import BatchSpec
from rlframe.replay import NStep
from rlframe.runners import Learner
from rlframe.updates.optimizer_step import make_optimizer_step
from rlframe.updates.progress import Progress
from rlframe.updates.schedules import Schedules
from tests.algos.test_learning_from_data import Scripted
from tests.blocks import saved_block
from tests.runners.resumed import assert_resumed_exactly, words
from tests.samplers.made import copied, sampler_for

RUN = (
    "env=Pendulum-v1 sampler=serial model.hidden=[8] eval.n_episodes=1 algo.learning_starts=40 algo.batch_size=8 "
    "algo.replay_ratio=2 algo.replay.size=400 runner.n_steps=120 runner.log_interval_steps=60"
)
COUNTED = "        self.progress.updates += 1\n"
MISTAKES = {  # what stands in the file, what is written for it, and what is said
    "uncounted": (COUNTED, "", "AWAC.update counted no update, so it stays due; add: self.progress.updates += 1"),
    "no metrics": (
        '        return {**metrics, "learning_rate": self.optimizer.rate}\n',
        "",
        "AWAC.update returned NoneType; return metrics by name, {} for none",
    ),
    "no agent": ("return make_policy", "make_policy", "make_agent of algo= ... gives None; return an Agent"),
    "no algorithm": ("return AWAC(", "AWAC(", "make_algorithm of algo= ... gives None; return an Algorithm"),
    "undecorated": ("@chz.chz\n", "", "is not decorated, so its fields are no keys; write @chz.chz above the class"),
    "no such key": (
        '"critic_learning_rate")',
        '"critic_rate")',
        "Config has no field critic_rate, which its algorithm reads; add critic_rate: Scheduled = scheduled(...)",
    ),
    "nan": (
        "loss = 2 * ",
        "loss = 0.0 / torch.zeros(()) + 2 * ",
        "none of the batch's values, and in algo/loss; ... smaller rewards; as it is the first update, look",
    ),
}


class Learning(nn.Module):
    def __init__(self, space: spaces.Box) -> None:
        super().__init__()
        self.linear = nn.Linear(space.shape[0], 4)
        self.out_size = 4

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        features: torch.Tensor = self.linear(x)
        return features


class Detached(Learning):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).detach()


@pytest.fixture
def awac(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of the tutorial, under a name of its own for each test."""
    return saved_block("awac", "tutorials/own_algorithm", tmp_path, monkeypatch)


def test_an_algorithm_of_your_own_is_resumed_exactly(
    awac: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = assert_resumed_exactly(f"algo={awac} {RUN}", tmp_path, monkeypatch)
    config = json.loads((run / "params.json").read_text())["config"]
    assert (config["sampler.batch_T"], config["sampler.batch_B"]) == (1, 1), "the defaults of those with replay"


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_an_own_algorithm_is_one_line(
    mistake: str, awac: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before, after, says = MISTAKES[mistake]
    assert awac.read_text().count(before) == 1
    awac.write_text(awac.read_text().replace(before, after))
    code = launch.main(words(f"algo={awac} {RUN}", tmp_path / "runs"))
    said = capsys.readouterr().err
    found = [part in said for part in says.split(" ... ")]
    assert (code != 0, all(found), "Traceback" in said) == (True, True, False), said


def test_an_own_encoder_that_learns_nothing_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logging.getLogger("rlframe"), "propagate", True)
    sizes = {
        "runner.n_steps": 128,
        "sampler.batch_T": 32,
        "sampler.batch_B": 2,
        "eval.n_episodes": 1,
        "log_dir": tmp_path,
    }
    for run_ID, encoder in enumerate((Detached, Learning)):
        rlframe.train(
            env="CartPole-v1", algo="ppo", sampler="serial", run_ID=run_ID, model={"encoder": encoder}, **sizes
        )
        told = [text for text in caplog.messages if "no gradient" in text]
        assert len(told) == 1, told
        assert "gave 4 parameters no gradient: model.actor.encoder.module.linear.weight, " in told[0]


def test_a_key_of_an_own_algorithm_is_named_as_it_is_given(
    awac: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launch.main([*words(f"algo={awac} {RUN}", tmp_path), "algo.n_critics=101"]) == 2
    assert "error: algo.n_critics=101 must be from 1 to 100" in capsys.readouterr().err


def test_a_config_without_the_keys_of_replay_is_refused() -> None:
    class Own(FromReplay):
        def update(self) -> UpdateMetrics:
            return {}

    with pytest.raises(ConfigError, match="Own needs a Config that inherits FromReplayConfig"):
        Own(nn.Linear(1, 1), None, 100, PPOConfig())


ON_AN_OWN_AGENT = """
import chz
import torch
from AGENT import EpsilonAgent
from rlframe.algos.off_policy import FromReplay, FromReplayConfig, replay_of
from rlframe.core.seeding import Role, seed_int
from rlframe.models.network import initial_weights
from rlframe.replay import NStep
from rlframe.updates.optimizer_step import make_optimizer_step

class QLearning(FromReplay):
    saved = (*FromReplay.saved, "optimizer")
    def __init__(self, agent, replay, n_steps, config):
        super().__init__(agent, replay, n_steps, config)
        self.optimizer = make_optimizer_step(agent.parameters(), self.schedules)
    def update(self):
        batch = self.replay.sample(self.config.batch_size)
        with torch.no_grad():
            value = self.agent.network(batch.next_inputs.observation).amax(-1)
        q = self.agent.network(batch.inputs.observation).gather(-1, batch.action[:, None]).squeeze(-1)
        self.optimizer.minimize((q - batch.return_ - batch.bootstrap * value).square().mean(), batch)
        self.progress.updates += 1
        return {}

@chz.chz
class Config(FromReplayConfig):
    def make_agent(self, observation_space, action_space, model, seed=0):
        with initial_weights(seed_int(seed, Role.MODEL)):
            return EpsilonAgent(observation_space, action_space, torch.nn.Linear(4, 2))
    def make_algorithm(self, agent, batch_spec, n_steps, seed=0):
        return QLearning(agent, replay_of(self, agent, batch_spec, seed, NStep(0.9, 1)), n_steps, self)
"""


def test_an_agent_of_your_own_learns_from_replay_and_is_resumed_exactly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = saved_block("epsilon_agent", "tutorials/own_algorithm", tmp_path, monkeypatch)
    (algo := tmp_path / f"own_{tmp_path.name}.py").write_text(ON_AN_OWN_AGENT.replace("AGENT", agent.stem))
    assert_resumed_exactly(f"algo={algo} {RUN.replace('Pendulum-v1', 'CartPole-v1')}", tmp_path, monkeypatch)
    with pytest.raises(ConfigError, match=r"replay needs Scripted\.observation_space; set it in __init__"):
        replay_of(FromReplayConfig(), Scripted(lambda x, noise: x), BatchSpec(1, 1), 0, NStep(0.9, 1))


def test_a_loss_through_another_network_gives_it_no_gradient() -> None:
    actor, critic, x = nn.Linear(2, 1), nn.Linear(1, 1), torch.ones(3, 2)
    schedules = Schedules(PPOConfig(), 1000, Progress())
    before, step = actor.weight.clone(), make_optimizer_step(actor.parameters(), schedules)
    make_optimizer_step(critic.parameters(), schedules)
    step.minimize(critic(actor(x)).mean())
    assert not torch.equal(actor.weight, before)
    assert critic.weight.grad is None


def test_a_file_without_its_ending_is_refused_with_what_to_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "huber.py").write_text("")
    assert launch.main(["env=Pendulum-v1", "algo=huber"]) == 2
    assert "'huber' is not in rlframe.algos" in (error := capsys.readouterr().err)
    assert error.rstrip().endswith("; for your file write ./huber.py")


class LossOfTheAlgorithm(sac.SAC):
    """A loss where nobody calls it."""

    def critic_loss(self) -> None: ...


def test_a_loss_of_sac_in_its_algorithm_is_refused() -> None:
    class Own(sac.Config):
        def make_algorithm(self, agent: Any, batch_spec: BatchSpec, n_steps: int, seed: int = 0) -> sac.SAC:
            return LossOfTheAlgorithm(*self.parts(agent, batch_spec, n_steps, seed))

    with pytest.raises(ConfigError, match=r"LossOfTheAlgorithm\.critic_loss must be of its soft value"):
        rlframe.build(chz.chz(Own)(learning_starts=100), "Pendulum-v1", n_steps=2_000, sampler="serial")


class NoPair(PPO):
    def loss(self, *arguments: Any) -> Any:
        return super().loss(*arguments)[0]


def test_an_error_in_an_update_names_the_own_algorithm_and_what_it_overrides() -> None:
    sampler, agent = sampler_for(T=6, B=4)
    learner = Learner(agent, NoPair(agent, BatchSpec(6, 4), 100, PPOConfig(epochs=1, minibatches=1)))
    learner.receive(copied(sampler.collect()))
    with pytest.raises(PartError, match="NoPair, which overrides loss, failed in update: TypeError: iter"):
        learner.update()
