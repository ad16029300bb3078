"""DDPG: its losses and targets against numbers worked out by hand."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from rlframe.algos import ddpg, sac
from rlframe.core.errors import ConfigError
from rlframe.envs import debug_envs
from rlframe.replay.select import PRIORITY_EPSILON
from tests.algos.learners import (
    OneBatch,
    collected,
    learner,
    target_q,
    transitions,
    updated,
    write_critic,
    write_linear,
)

TANH_HALF = math.tanh(0.5)


def by_hand(**settings: Any) -> ddpg.DDPG:
    """μ(s) = tanh(s / 2);  Q = s + 2a + 0.5;  targets Q' = 10 + a, μ' = -μ."""
    algo = learner(ddpg, **{"discount": 0.9, "tau": 0.25, "critic_learning_rate": 0.0} | settings)
    write_linear(algo.agent.model.mlp, [[0.5]], [0.0])
    write_linear(algo.target_actor.mlp, [[-0.5]], [0.0])
    write_critic(algo.critic.networks, 0, [[1.0, 2.0]], [0.5])
    write_critic(algo.critic.target, 0, [[0.0, 1.0]], [10.0])
    return algo


def two_rows() -> Any:
    """One goes on to state 1, one terminated."""
    return transitions([1.0, 2.0], [0.5, -1.0], [0.25, 3.0], [0.9, 0.0], [1.0, 7.0])


STATE_AND_ACTION = torch.ones(1, 1), torch.ones(1, 1)
TARGETS = [0.25 + 0.9 * (10 - TANH_HALF), 3.0]


def test_targets_come_from_the_target_actor_and_termination_does_not_bootstrap() -> None:
    with torch.no_grad():
        assert target_q(by_hand(), two_rows()).tolist() == pytest.approx(TARGETS, rel=1e-6)


def test_the_critic_descends_the_squared_error() -> None:
    algo = by_hand()
    metrics = updated(algo, two_rows())
    one, two = 2.5 - TARGETS[0], 0.5 - TARGETS[1]
    assert metrics["loss"] == pytest.approx((one**2 + two**2) / 2, rel=1e-5)
    assert metrics["q"] == pytest.approx(1.5, rel=1e-5)
    weight, bias = algo.critic.networks.network.layers.parameters[0]
    assert weight.grad[0].tolist()[0] == pytest.approx([one + 2 * two, 0.5 * one - two], rel=1e-5)
    assert bias.grad.item() == pytest.approx(one + two, rel=1e-5)


def test_importance_weights_scale_a_rows_part_of_the_critics_gradient() -> None:
    algo = by_hand()
    updated(algo, replace(two_rows(), weight=torch.tensor([0.5, 0.0])))
    one = 2.5 - TARGETS[0]
    bias = algo.critic.networks.network.layers.flat[1]
    assert bias.grad.item() == pytest.approx(0.5 * one, rel=1e-5)


def test_priorities_are_the_critics_errors() -> None:
    algo = by_hand(prioritized=True)
    updated(algo, two_rows())
    assert algo.replay.told.tolist() == pytest.approx([abs(2.5 - TARGETS[0]), abs(0.5 - TARGETS[1])], rel=1e-4)


def test_new_rows_have_the_error_that_an_update_would_find() -> None:
    env, settings = debug_envs.identity("box"), {"prioritized": True, "initial_priority": "td", "alpha": 1.0}
    spaces = {"observation_space": env.observation_space, "action_space": env.action_space}
    algo = by_hand(**spaces, **settings, learning_starts=10_000)
    for samples in collected(debug_envs.identity, algo.agent, 3, (4, 2), action="box", length=3):
        algo.receive(samples)
        now, after = samples.inputs.observation[:-1, :, 0], samples.inputs.observation[1:, :, 0]
        target = samples.reward + 0.9 * ~samples.terminated * (10 - torch.tanh(after / 2))
        expected = (target - (now + 2 * samples.action[..., 0] + 0.5)).abs()[samples.valid] + PRIORITY_EPSILON
        index = algo.replay.newest()
        found = algo.replay.selector._tree.leaves[index % algo.replay._readers[0].candidates.n_slots]
        assert found.tolist() == pytest.approx(expected.tolist(), rel=1e-5)
        assert len(set(found.tolist())) > 2


def test_the_methods_of_a_subclass_decide_losses_priorities_and_when_targets_move() -> None:
    algo, before = by_hand(prioritized=True), by_hand().critic.target_q(*STATE_AND_ACTION)

    class Own(ddpg.DDPG):
        def critic_loss(self, values: Any, target: Any, batch: Any) -> torch.Tensor:
            return super().critic_loss(values, target, batch) + 100

        def priority(self, values: Any, target: Any, batch: Any) -> torch.Tensor:
            return super().priority(values, target, batch).clamp(min=10)

        def learn_from(self, batch: Any) -> Any:
            metrics, *others = super().learn_from(batch)
            return {**metrics, "rows": torch.tensor(float(len(batch.return_)))}, *others

        def move_targets(self) -> None:
            """They stay."""

    algo.__class__ = Own
    metrics, plain = updated(algo, two_rows()), updated(by_hand(prioritized=True), two_rows())
    assert (metrics["loss"], metrics["rows"]) == (pytest.approx(plain["loss"] + 100), 2)
    assert algo.replay.told.tolist() == pytest.approx([10, 10])
    assert torch.equal(algo.critic.target_q(*STATE_AND_ACTION), before)


def test_first_priorities_need_a_replay_that_reads_its_rows_back() -> None:
    config = ddpg.Config(prioritized=True, initial_priority="td")
    algo = by_hand()
    with pytest.raises(ConfigError, match="which a OneBatch does not offer; use initial_priority=max"):
        ddpg.DDPG(algo.agent, algo.critic, OneBatch(two_rows()), algo.exploration, 1000, config)


def test_the_actor_ascends_the_critic_and_targets_follow() -> None:
    algo = by_hand()
    metrics = updated(algo, two_rows())
    a, b = math.tanh(0.5), math.tanh(1.0)
    assert metrics["policy_loss"] == pytest.approx(-(1 + 2 * a + 0.5 + 2 + 2 * b + 0.5) / 2, rel=1e-5)
    weight = algo.agent.model.mlp.layers.flat[0]
    assert weight.grad.item() == pytest.approx(-(2 * (1 - a * a) + 4 * (1 - b * b)) / 2, rel=1e-5)
    assert weight.item() == pytest.approx(0.5 + 1e-4, abs=1e-6)
    assert algo.target_actor.mlp.layers.flat[0].item() == pytest.approx(-0.5 + 0.25 * 1.0001, abs=1e-6)
    assert algo.critic.target.network.layers.flat[1][0].item() == pytest.approx(10 - 0.25 * 9.5)


def test_gradients_are_clipped_by_their_norm() -> None:
    algo = by_hand(max_grad_norm=1e-6, critic_learning_rate=1e-3)
    updated(algo, two_rows())
    norm = torch.cat([p.grad.flatten() for p in algo.critic.learned]).norm().item()
    assert norm == pytest.approx(1e-6, rel=1e-3)


def test_learning_rates_fall_linearly_if_asked() -> None:
    algo = by_hand(learning_rate="linear(1e-2,0)")
    algo.progress.scheduled = 250
    assert updated(algo, two_rows())["learning_rate"] == pytest.approx(0.75e-2)
    assert algo.agent.model.mlp.layers.flat[0].item() == pytest.approx(0.5 + 0.75e-2, abs=1e-5)


def test_a_stochastic_agent_is_refused() -> None:
    agent = learner(sac).agent
    with pytest.raises(TypeError, match="DDPG needs an agent with a deterministic policy, got SquashedGaussian"):
        ddpg.DDPG(agent, learner(ddpg).critic, learner(ddpg).replay, learner(ddpg).exploration, 100)
