"""SAC: its losses and targets against numbers worked out by hand, for continuous and for discrete actions."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from rlframe.algos import sac, td3
from rlframe.critics import Critic, Ensemble
from rlframe.optimizers import KINDS
from tests.algos.learners import learner, transitions, updated, write_critic, write_linear

TWO = spaces.Discrete(2)
ALPHA = 0.5


def continuous(module: Any = sac, log_std: float = -20.0, **settings: Any) -> Any:
    """a ~ tanh(N(s / 2, σ));  Q1 = s + 2a + 0.5, Q2 = 2s + a - 1;  targets Q1' = 10 + a, Q2' = 9 + 3a."""
    given = {"discount": 0.9, "tau": 0.5, "temperature": ALPHA, "critic_learning_rate": 0.0}
    algo = learner(module, **given | settings)
    write_linear(algo.agent.model.mlp, [[0.5], [0.0]], [0.0, log_std])
    write_critic(algo.critic.networks, 0, [[1.0, 2.0]], [0.5])
    write_critic(algo.critic.networks, 1, [[2.0, 1.0]], [-1.0])
    write_critic(algo.critic.target, 0, [[0.0, 1.0]], [10.0])
    write_critic(algo.critic.target, 1, [[0.0, 3.0]], [9.0])
    return algo


def two_rows(discrete: bool = False) -> Any:
    """One goes on to state 1, one terminated."""
    actions = [1, 0] if discrete else [0.5, -1.0]
    return transitions([1.0, 2.0], actions, [0.25, 3.0], [0.9, 0.0], [1.0, 7.0])


def drawn(algo: Any, n: int = 2) -> tuple[np.ndarray, np.ndarray]:
    """The noise that an algorithm will draw next: for n states, and for those after them."""
    copy = torch.Generator()
    copy.set_state(algo.generator.get_state())
    noise = torch.randn(2 * n, 1, generator=copy).numpy()[:, 0].astype(np.float64)
    return noise[:n], noise[n:]


def log_prob_at(raw: Any, noise: Any, log_std: float) -> Any:
    return -0.5 * noise**2 - log_std - 0.5 * np.log(2 * np.pi) - np.log(1 - np.tanh(raw) ** 2)


def test_targets_are_soft_and_termination_does_not_bootstrap() -> None:
    algo = continuous(log_std=-1.0)
    _, noise = drawn(algo)
    metrics = updated(algo, two_rows())
    raw = 0.5 + math.exp(-1) * noise[0]
    a, log_prob = math.tanh(raw), log_prob_at(raw, noise[0], -1.0)
    targets = [0.25 + 0.9 * (min(10 + a, 9 + 3 * a) - ALPHA * log_prob), 3.0]
    errors = [[2.5 - targets[0], 0.5 - targets[1]], [1.5 - targets[0], 2.0 - targets[1]]]
    assert metrics["loss"] == pytest.approx(0.5 * sum(e * e for row in errors for e in row) / 2, rel=1e-5)
    assert metrics["q"] == pytest.approx((2.5 + 0.5 + 1.5 + 2.0) / 4, rel=1e-5)
    weight, bias = algo.critic.networks.network.layers.parameters[0]
    for k, (one, two) in enumerate(errors):
        assert weight.grad[k].tolist()[0] == pytest.approx([(one + 2 * two) / 2, (0.5 * one - two) / 2], rel=1e-4)
        assert bias.grad[k].item() == pytest.approx((one + two) / 2, rel=1e-4)


def test_the_actor_ascends_the_least_critic_and_its_entropy() -> None:
    algo = continuous(log_std=-1.0)
    noise, _ = drawn(algo)
    metrics = updated(algo, two_rows())
    states, std = np.array([1.0, 2.0]), math.exp(-1)
    raw = states / 2 + std * noise
    a, log_prob = np.tanh(raw), log_prob_at(raw, noise, -1.0)
    q = np.stack([states + 2 * a + 0.5, 2 * states + a - 1])
    assert metrics["policy_loss"] == pytest.approx(float((ALPHA * log_prob - q.min(0)).mean()), rel=1e-4)
    assert metrics["entropy"] == pytest.approx(-float(log_prob.mean()), rel=1e-4)
    slope = np.where(q[0] < q[1], 2.0, 1.0)
    of_raw = -(1 - a**2) * slope / 2 + ALPHA * 2 * a / 2  # of the mean over two rows
    of_log_std = of_raw * std * noise - ALPHA / 2
    weight, bias = algo.agent.model.mlp.layers.parameters[0]
    assert bias.grad.tolist() == pytest.approx([of_raw.sum(), of_log_std.sum()], rel=1e-4)
    assert weight.grad.flatten().tolist() == pytest.approx(
        [float((of_raw * states).sum()), float((of_log_std * states).sum())], rel=1e-4
    )


@pytest.mark.parametrize(("log_std", "rises"), [(-5.0, True), (0.0, False)])
@pytest.mark.parametrize(("loss", "slope"), [("log", 1.0), ("linear", ALPHA)])
def test_the_temperature_rises_below_the_target_entropy_and_falls_above(
    log_std: float, rises: bool, loss: str, slope: float
) -> None:
    algo = continuous(log_std=log_std, temperature_loss=loss)  # entropies of about -4 and 0.6; the target is -1
    metrics = updated(algo, two_rows())
    assert (metrics["entropy"] < -1.0) == rises
    assert algo.temperature.log.grad.item() == pytest.approx(slope * (metrics["entropy"] - -1.0), rel=1e-5)
    moved = algo.temperature.log.item() - math.log(ALPHA)
    assert moved == pytest.approx(3e-4 if rises else -3e-4, rel=1e-2)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_weight_decay_leaves_the_temperature_to_its_gradient(optimizer: str) -> None:
    decaying: Any = KINDS[optimizer](weight_decay=1.0)
    algo = continuous(optimizer=decaying)
    algo.temperature_optimizer.minimize(0.0 * algo.temperature.log)
    assert algo.temperature.log.item() == pytest.approx(math.log(ALPHA))


def test_a_fixed_temperature_stays() -> None:
    algo = continuous(learn_temperature=False)
    for _ in range(3):
        assert updated(algo, two_rows())["temperature"] == pytest.approx(ALPHA)


@pytest.mark.parametrize(
    ("space", "settings", "expected"),
    [
        (spaces.Box(-1, 1, (2, 3), np.float32), {}, -6.0),
        (spaces.Box(-1, 1, (2,), np.float32), {"target_entropy": 0.5}, 0.5),
        (spaces.Discrete(5), {}, 0.98 * math.log(5)),
        (spaces.Discrete(5), {"target_entropy_fraction": 0.5}, 0.5 * math.log(5)),
    ],
)
def test_target_entropies(space: Any, settings: dict[str, Any], expected: float) -> None:
    algo = learner(sac, action_space=space, **settings)
    drawn = algo.soft_value.draw(torch.zeros(2, algo.agent.policy.param_size), torch.zeros(2, math.prod(space.shape)))
    assert float(algo.target_entropy(drawn)) == pytest.approx(expected)


def test_nothing_becomes_nan_when_actions_saturate() -> None:
    algo = continuous(log_std=2.0, critic_learning_rate=1e-3)
    write_linear(algo.agent.model.mlp, [[100.0], [50.0]], [0.0, 0.0])
    for _ in range(3):
        metrics = updated(algo, transitions([3.0, -3.0], [1.0, -1.0], [0.0, 0.0], [0.9, 0.9], [5.0, -5.0]))
        assert all(math.isfinite(value) for value in metrics.values()), metrics
    assert all(bool(p.isfinite().all()) for p in [*algo.agent.parameters(), *algo.critic.learned])


def test_only_the_critics_have_targets_which_are_copies_at_first_and_move_by_tau() -> None:
    fresh = learner(sac, model={"hidden": (8,)})
    assert all(torch.equal(one, other) for one, other in zip(fresh.online, fresh.targets, strict=True))
    algo = continuous()
    updated(algo, two_rows())
    assert algo.critic.target.network.layers.flat[1][0].item() == pytest.approx((10 + 0.5) / 2)


def discrete(module: Any = sac, **settings: Any) -> Any:
    """Logits (s, 0);  Q1 = (1, s), Q2 = (s, 2);  targets Q1' = (5, 7), Q2' = (6, 6)."""
    given = {"action_space": TWO, "discount": 0.9, "temperature": ALPHA, "critic_learning_rate": 0.0}
    algo = learner(module, **given | settings)
    write_linear(algo.agent.model.mlp, [[1.0], [0.0]], [0.0, 0.0])
    write_linear(algo.critic.networks.networks[0][1], [[0.0], [1.0]], [1.0, 0.0])
    write_linear(algo.critic.networks.networks[1][1], [[1.0], [0.0]], [0.0, 2.0])
    write_linear(algo.critic.target.networks[0][1], [[0.0], [0.0]], [5.0, 7.0])
    write_linear(algo.critic.target.networks[1][1], [[0.0], [0.0]], [6.0, 6.0])
    return algo


def policy_at(state: float) -> np.ndarray:
    return np.exp([state, 0.0]) / np.exp([state, 0.0]).sum()


def test_discrete_targets_are_the_expectation_over_all_actions() -> None:
    algo = discrete()
    metrics = updated(algo, two_rows(True))
    p = policy_at(1.0)
    targets = [0.25 + 0.9 * float((p * (np.array([5.0, 6.0]) - ALPHA * np.log(p))).sum()), 3.0]
    q = [[1.0, 1.0], [2.0, 2.0]]  # of action 1 in state 1 and of action 0 in state 2, by each critic
    errors = [[value - y for value, y in zip(row, targets, strict=True)] for row in q]
    assert metrics["loss"] == pytest.approx(0.5 * sum(e * e for row in errors for e in row) / 2, rel=1e-5)
    for critic, (one, two) in zip(algo.critic.networks.networks, errors, strict=True):
        assert critic[1].layers.flat[1].grad.tolist() == pytest.approx([two / 2, one / 2], rel=1e-5)


def test_the_discrete_actor_ascends_the_exact_soft_value() -> None:
    algo = discrete()
    metrics = updated(algo, two_rows(True))
    value, entropy, gradient = 0.0, 0.0, np.zeros(2)
    for state in (1.0, 2.0):
        p, q = policy_at(state), np.minimum([1.0, state], [state, 2.0])
        soft = q - ALPHA * np.log(p)
        value += float((p * soft).sum()) / 2
        entropy -= float((p * np.log(p)).sum()) / 2
        gradient -= p * (soft - (p * soft).sum()) / 2
    assert metrics["policy_loss"] == pytest.approx(-value, rel=1e-5)
    assert metrics["entropy"] == pytest.approx(entropy, rel=1e-5)
    assert algo.agent.model.mlp.layers.flat[1].grad.tolist() == pytest.approx(gradient.tolist(), rel=1e-4)


@pytest.mark.parametrize("is_discrete", [False, True])
def test_critics_without_targets_learn_from_their_own_values(is_discrete: bool) -> None:
    made = discrete() if is_discrete else continuous()
    critic = Critic(made.critic.networks, made.critic.value, Ensemble(has_target=False))
    config = sac.Config(replay_ratio=2.0, batch_size=2, discount=made.config.discount)
    algo = sac.SAC(made.agent, critic, made.replay, made.exploration, 100, config)
    before = [x.detach().clone() for x in critic.learned]
    metrics = updated(algo, two_rows(is_discrete))
    assert math.isfinite(metrics["loss"])
    assert not all(map(torch.equal, before, critic.learned))


def test_a_deterministic_agent_is_refused() -> None:
    with pytest.raises(TypeError, match="SAC needs an agent with a stochastic policy, got Deterministic"):
        sac.SAC(learner(td3).agent, learner(sac).critic, learner(sac).replay, learner(sac).exploration, 100)
