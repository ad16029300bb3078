"""TD3: its losses and targets against numbers worked out by hand, and its exploration."""

import math
from typing import Any

import pytest
import torch

from rlframe.algos import td3
from rlframe.exploration import GaussianConfig
from tests.algos.learners import learner, target_q, transitions, updated, write_critic, write_linear

TANH_HALF = math.tanh(0.5)


def by_hand(module: Any = td3, **settings: Any) -> td3.TD3:
    """μ(s) = tanh(s / 2);  Q1 = s + 2a + 0.5, Q2 = 2s + a - 1;  targets Q1' = 10 + a, Q2' = 9 + 3a, μ' = μ."""
    algo: td3.TD3 = learner(module, **{"target_noise": 0.0, "discount": 0.9, "tau": 0.5} | settings)
    for actor in (algo.agent.model, algo.target_actor):
        write_linear(actor.mlp, [[0.5]], [0.0])
    write_critic(algo.critic.networks, 0, [[1.0, 2.0]], [0.5])
    write_critic(algo.critic.networks, 1, [[2.0, 1.0]], [-1.0])
    write_critic(algo.critic.target, 0, [[0.0, 1.0]], [10.0])
    write_critic(algo.critic.target, 1, [[0.0, 3.0]], [9.0])
    return algo


def two_rows() -> Any:
    """One goes on to state 1, one terminated."""
    return transitions([1.0, 2.0], [0.5, -1.0], [0.25, 3.0], [0.9, 0.0], [1.0, 7.0])


# a' = tanh(0.5) = 0.462: Q1' = 10.462, Q2' = 10.386, the least is that of Q2'
TARGETS = [0.25 + 0.9 * (9 + 3 * TANH_HALF), 3.0]
Q = [[1 + 1 + 0.5, 2 - 2 + 0.5], [2 + 0.5 - 1, 4 - 1 - 1]]


def test_targets_are_the_least_of_the_target_critics_and_termination_does_not_bootstrap() -> None:
    with torch.no_grad():
        assert target_q(by_hand(), two_rows()).tolist() == pytest.approx(TARGETS, rel=1e-6)


def test_the_critics_descend_the_squared_error_of_both() -> None:
    algo = by_hand(prioritized=True)
    metrics = updated(algo, two_rows())
    errors = [[q - y for q, y in zip(row, TARGETS, strict=True)] for row in Q]
    assert metrics["loss"] == pytest.approx(sum(e * e for row in errors for e in row) / 2, rel=1e-5)
    assert metrics["q"] == pytest.approx((2.5 + 0.5 + 1.5 + 2.0) / 4, rel=1e-5)
    assert algo.replay.told.tolist() == pytest.approx([sum(map(abs, each)) / 2 for each in zip(*errors, strict=True)])
    weight, bias = algo.critic.networks.network.layers.parameters[0]
    for k, (one, two) in enumerate(errors):
        # d mean (Q - y)² = error * (s, a) of state 1 with action 0.5 and of state 2 with action -1, twice over 2 rows
        assert weight.grad[k].tolist()[0] == pytest.approx([one + 2 * two, 0.5 * one - two], rel=1e-5)
        assert bias.grad[k].item() == pytest.approx(one + two, rel=1e-5)


def test_the_actor_ascends_the_first_critic() -> None:
    algo = by_hand(policy_interval=1, target_interval=1, critic_learning_rate=0.0)
    metrics = updated(algo, two_rows())
    a, b = math.tanh(0.5), math.tanh(1.0)
    assert metrics["policy_loss"] == pytest.approx(-(1 + 2 * a + 0.5 + 2 + 2 * b + 0.5) / 2, rel=1e-5)
    weight, bias = algo.agent.model.mlp.layers.parameters[0]
    slopes = [2 * (1 - a * a), 2 * (1 - b * b)]  # dQ1/da * da/dx
    assert bias.grad.item() == pytest.approx(-sum(slopes) / 2, rel=1e-5)
    assert weight.grad.item() == pytest.approx(-(slopes[0] * 1 + slopes[1] * 2) / 2, rel=1e-5)
    assert weight.item() == pytest.approx(0.5 + 3e-4, abs=1e-6), "Adam's first step is the learning rate"


def test_targets_are_copies_at_first() -> None:
    algo = learner(td3, model={"hidden": (8,)})
    assert len(algo.online) == len(algo.targets) == 8
    for online, target in zip(algo.online, algo.targets, strict=True):
        assert torch.equal(online, target)
        assert online is not target
        assert not target.requires_grad


def test_target_noise_is_clipped_and_so_is_the_action_it_moves() -> None:
    algo = by_hand(target_noise=100.0, target_noise_clip=0.25)
    n = 200
    batch = transitions([0.0] * n, [0.0] * n, [0.0] * n, [1.0] * n, [0.0, 6.0] * (n // 2))
    with torch.no_grad():
        found = target_q(algo, batch)
    # least of 10 + a and 9 + 3a, at a = 0 ± 0.25, and at tanh(3) ± 0.25, which ends at 1
    at_zero, high = (rows.round(decimals=4).unique().tolist() for rows in (found[::2], found[1::2]))
    assert at_zero == pytest.approx([9 - 0.75, 9 + 0.75], abs=1e-3)
    assert high == pytest.approx([10 + math.tanh(3) - 0.25, 11.0], abs=1e-3)


def test_target_noise_has_the_standard_deviation_asked_for() -> None:
    algo = by_hand(target_noise=0.1, target_noise_clip=1.0)
    n = 4000
    with torch.no_grad():
        found = target_q(algo, transitions([0.0] * n, [0.0] * n, [0.0] * n, [1.0] * n, [0.0] * n))
    assert found.std().item() == pytest.approx(0.3, rel=0.05)


def test_exploration_is_annealed_by_env_steps_and_warm_up_ends_at_learning_starts() -> None:
    algo = learner(td3, n_steps=100, explore=GaussianConfig(std="linear(0.4,0.2)"), learning_starts=50)
    found = []
    for env_steps in (0, 49, 50, 100, 200):
        algo.progress.env_steps = env_steps
        algo.explore()
        found.append((algo.agent.random.item(), round(algo.agent.exploration.level[0].item(), 5)))
    assert found == [(1.0, 0.4), (1.0, 0.302), (0.0, 0.3), (0.0, 0.2), (0.0, 0.2)]
