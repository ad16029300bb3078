"""What the algorithms for data learn from the play of scripted policies, good and bad."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor, nn

from rlframe.agents import Agent, PolicyInfo
from rlframe.algos import bc, cql, iql, marwil, td3_bc
from rlframe.core.objects import ObjectName
from rlframe.core.struct import Tree
from rlframe.core.types import AgentInputs, AgentStep, BatchSpec
from rlframe.envs import EnvConfig, make_envs
from rlframe.evaluation import EvalConfig, Evaluator
from rlframe.models import ModelConfig
from rlframe.replay import InMemory
from rlframe.runners import Learner, OfflineRl, RunnerConfig
from rlframe.samplers import SerialSampler

SPEC = BatchSpec(1000, 4)
Rule = Callable[[Tensor, Tensor], Tensor]  # from observations [B, n] and noise [B, 3] in [0, 1) to actions


class Scripted(Agent):
    """Acts by a rule."""

    def __init__(self, rule: Rule) -> None:
        super().__init__()
        self.rule, self.nothing = rule, nn.Parameter(torch.zeros(()))

    def step(self, inputs: AgentInputs, state: Tree, noise: Tree) -> AgentStep:
        none = torch.zeros(len(inputs.first))
        return AgentStep(self.rule(inputs.observation, noise), PolicyInfo(none, none), state)

    def noise(self, rng: np.random.Generator, lead: tuple[int, ...]) -> Tree:
        return rng.random((*lead, 3), np.float32)

    def initial_state(self, env_ids: Sequence[int]) -> Tree:
        return ()


def balancing(random: float = 0.0, wrong: bool = False) -> Scripted:
    """Keeps the pole of CartPole up, or with `wrong` does the contrary; a share of its actions is random."""

    def rule(x: Tensor, noise: Tensor) -> Tensor:
        right = (x[:, 2] + 0.5 * x[:, 3] + 0.02 * x[:, 1] > 0).long() ^ int(wrong)
        return torch.where(noise[:, 0] < random, (noise[:, 1] > 0.5).long(), right)

    return Scripted(rule)


def swinging(random: float) -> Scripted:
    """Swings Pendulum up by its energy and holds it, not very well; a share of its actions is random."""

    def rule(x: Tensor, noise: Tensor) -> Tensor:
        cosine, sine, speed = x.unbind(-1)
        missing = 10 * (1 - cosine) / 2 - speed.square() / 6
        swing = torch.sign(speed + 1e-3) * missing.clamp(-1, 1)
        hold = -(5 * torch.atan2(sine, cosine) + 1.25 * speed)
        torque = torch.where(cosine > 0.8, hold, swing) + noise[:, 2] - 0.5
        return torch.where(noise[:, 0] < random, 2 * noise[:, 1] - 1, torque.clamp(-1, 1)).unsqueeze(-1)

    return Scripted(rule)


def learned(module: Any, env: str, players: list[Scripted], updates: int, **settings: Any) -> float:
    """The return of the policy after so many updates from 4,000 rows of each player."""
    network = ModelConfig(hidden=(64, 64), activation="relu", normalize_observation=True)
    config = module.Config(replay=InMemory(size=20_000), batch_size=128, **settings)
    collected = []
    for i, player in enumerate(players):
        envs = make_envs(EnvConfig(env), SPEC.B, list(range(100 * i, 100 * i + SPEC.B)))
        samples = SerialSampler(envs, player, SPEC.T).collect()
        collected.append(replace(samples, start=10_000 * i))  # episodes end between players
    agent = config.make_agent(envs.observation_space, envs.action_space, network, 0)
    algo = config.make_algorithm(agent, SPEC, updates, 0)
    for samples in collected:
        algo.replay.append(samples)
    evaluator = Evaluator(EnvConfig(env), agent, EvalConfig(n_envs=5, n_episodes=10))
    with OfflineRl(
        Learner(agent, algo), RunnerConfig(n_steps=updates, log_interval_steps=updates), evaluator
    ) as runner:
        return float(runner.train()["eval/return_mean"])


def test_an_own_encoder_in_the_critic_that_bc_does_not_use_is_not_told(caplog: pytest.LogCaptureFixture) -> None:
    class Own(nn.Module):
        def __init__(self, space: spaces.Box) -> None:
            super().__init__()
            self.linear = nn.Linear(space.shape[0], 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x).relu()

    spaces_, config = (spaces.Box(-1, 1, (3,)), spaces.Discrete(2)), bc.Config(replay=InMemory(size=64), batch_size=4)
    agent = config.make_agent(*spaces_, ModelConfig(encoder=ObjectName("own:Own", Own, "model.encoder")), 0)
    learner = Learner(agent, config.make_algorithm(agent, BatchSpec(8, 1), 9, 0))
    own = [p for name, p in agent.named_parameters() if "module.linear" in name]
    learner.algo.progress.unreached += own[2:]
    learner._tell_unreached(learner.algo.progress.unreached)
    assert not caplog.text
    assert learner.algo.progress.unreached == []
    learner._tell_unreached([*own])
    assert caplog.text.count("gave 2 parameters no gradient: model.actor.encoder.module.linear.weight") == 1


@pytest.mark.slow
def test_bc_does_what_a_good_policy_does() -> None:
    assert learned(bc, "CartPole-v1", [balancing()], 1000) == 500


@pytest.mark.slow
def test_marwil_finds_the_good_among_the_bad_and_bc_does_not() -> None:
    players = [balancing(0.2), balancing(0.5, wrong=True), balancing(0.5, wrong=True)]
    assert learned(bc, "CartPole-v1", players, 1000) < 50
    assert learned(marwil, "CartPole-v1", players, 2000) > 300


FAST = {"learning_rate": 1e-3, "critic_learning_rate": 1e-3, "tau": 0.02, "discount": 0.95}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "settings", "least"),
    [
        (td3_bc, {"q_weight": 10.0, **FAST}, -700.0),
        (iql, {}, -700.0),
        (cql, {"n_actions": 4, "temperature": 0.1, **FAST}, -800.0),
    ],
    ids=["td3_bc", "iql", "cql"],
)
@pytest.mark.timeout(600)
def test_they_are_better_than_the_policies_that_played(module: Any, settings: dict[str, Any], least: float) -> None:
    players = [swinging(0.3), swinging(1.0), swinging(1.0)]
    if module is td3_bc:
        assert learned(bc, "Pendulum-v1", players, 1000) < -800
    assert learned(module, "Pendulum-v1", players, 3000, **settings) > least
