"""Losses and gradients of PPO, A2C and PG against numbers worked out by hand."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from rlframe.algos.a2c import A2C
from rlframe.algos.a2c import Config as A2CConfig
from rlframe.algos.on_policy import values
from rlframe.algos.pg import Config as PGConfig
from rlframe.algos.pg import PolicyGradient
from rlframe.algos.ppo import PPO
from rlframe.algos.ppo import Config as PPOConfig
from rlframe.core.errors import ConfigError
from rlframe.core.types import BatchSpec, Samples
from rlframe.ops.policy_gradient import masked_mean, masked_normalize
from tests.algos.learners import kept_gradients
from tests.algos.table import Table, one_step_episodes, table_agent
from tests.samplers.made import sampler_for

HALF = math.log(0.5)  # log-probability of either action in the untrained table
PLAIN: dict[str, Any] = {
    "entropy_coef": 0.0,
    "value_coef": 0.0,
    "max_grad_norm": math.inf,
    "normalize_advantage": False,
}


def ppo_update(samples: Samples, table: Table | None = None, **config: Any) -> tuple[Table, dict[str, Any]]:
    """One gradient step of PPO on the whole batch; the table after it and the metrics."""
    agent = table_agent(samples.reward.shape[1])
    if table is not None:
        agent.model = table
    settings = {**PLAIN, "epochs": 1, "minibatches": 1, "clip": 0.2, **config}
    algo = PPO(agent, BatchSpec(*samples.reward.shape), 1000, PPOConfig(**settings))
    algo.receive(samples)
    metrics = algo.update()
    assert isinstance(agent.model, Table)
    return agent.model, {name: float(value) for name, value in metrics.items()}


def moved(parameter: Tensor) -> list[bool]:
    """Which states' entries have left zero."""
    return parameter.detach().reshape(len(parameter), -1).ne(0).any(-1).tolist()


# Ratios are 1.5, 0.5, 1 and, on a row that does not count, 2; advantages 1, -1, 2.
RATIOS = [HALF - math.log(1.5), HALF - math.log(0.5), HALF, HALF - math.log(2)]


def ratios() -> Samples:
    return one_step_episodes([1.0, 0.0, 2.5, 99.0], [0.0, 1.0, 0.5, 5.0], RATIOS, [True, True, True, False])


def test_ppo_clips_the_ratio_pessimistically() -> None:
    _, metrics = ppo_update(ratios())
    # min(1.5, 1.2) * 1 = 1.2;   min(0.5 * -1, 0.8 * -1) = -0.8;   1 * 2 = 2
    assert metrics["policy_loss"] == pytest.approx(-(1.2 - 0.8 + 2.0) / 3, abs=1e-6)
    assert metrics["clip_fraction"] == pytest.approx(2 / 3)
    kl = (0.5 - math.log(1.5)) + (-0.5 - math.log(0.5)) + 0.0
    assert metrics["kl"] == pytest.approx(kl / 3, abs=1e-6)
    assert metrics["entropy"] == pytest.approx(math.log(2), abs=1e-6)


def test_ppo_rows_that_are_clipped_have_no_gradient() -> None:
    table, metrics = ppo_update(ratios())
    assert moved(table.logits) == [False, False, True, False]
    # d log p / d logits = (1 - 0.5, -0.5), times advantage 2, over 3 rows
    assert metrics["grad_norm"] == pytest.approx(2 * math.sqrt(0.5) / 3, abs=1e-6)


def test_ppo_rows_clipped_the_other_way_keep_their_gradient() -> None:
    samples = one_step_episodes([-1.0, 1.0], [0.0, 0.0], RATIOS[:2])  # ratio 1.5 with A < 0, ratio 0.5 with A > 0
    table, metrics = ppo_update(samples)
    assert moved(table.logits) == [True, True]
    assert metrics["policy_loss"] == pytest.approx(-(-1.5 + 0.5) / 2, abs=1e-6)


def test_ppo_rows_clipped_from_a_ratio_beyond_float32_have_no_gradient() -> None:
    """e^100 is inf, and 0 times inf is NaN."""
    samples = one_step_episodes([1.0, 2.5], [0.0, 0.5], [HALF - 100, HALF], [True, True])
    table, metrics = ppo_update(samples)
    assert moved(table.logits) == [False, True]
    assert metrics["policy_loss"] == pytest.approx(-(1.2 + 2) / 2)


def test_ppo_normalises_the_advantage_over_valid_rows_only() -> None:
    _, metrics = ppo_update(
        one_step_episodes([3.0, 1.0, 99.0], [0.0, 0.0, 0.0], [HALF - math.log(1.1), HALF, HALF], [True, True, False]),
        normalize_advantage=True,
    )
    assert metrics["policy_loss"] == pytest.approx(-(1.1 * 1.0 + 1.0 * -1.0) / 2, abs=1e-5)


def test_ppo_adds_its_parts_with_their_coefficients() -> None:
    samples = one_step_episodes([2.0], [0.5], [HALF])
    table, metrics = ppo_update(samples, value_coef=0.5, learning_rate=0.01)
    assert metrics["value_loss"] == pytest.approx(0.5 * 2.0**2, abs=1e-6)
    # policy: A = 1.5;  value: d/dv 0.5 * 0.5 (0 - 2)^2 = -1
    assert metrics["grad_norm"] == pytest.approx(math.sqrt((1.5 * math.sqrt(0.5)) ** 2 + 1.0), abs=1e-5)
    assert table.value.item() == pytest.approx(0.01, rel=1e-3), "Adam's first step is the learning rate"


def test_an_entropy_bonus_pulls_towards_uniform() -> None:
    table = Table(1)
    with torch.no_grad():
        table.logits[0, 0] = 1.0
    log_prob = 1.0 - math.log(1 + math.e)
    after, _ = ppo_update(one_step_episodes([0.0], [0.0], [log_prob]), table, entropy_coef=0.01)
    assert after.logits[0, 0].item() < 1.0 < 1.0 + after.logits[0, 1].item()


@pytest.mark.parametrize(
    ("now", "target", "gradient"),
    [
        (0.0, 1000.0, -1000.0),  # not moved yet: alive, however far the target
        (0.1, 1000.0, -999.9),  # moved less than the clip
        (-5.0, 1000.0, -1005.0),  # moved the wrong way: free to return
        (5.0, 1.0, 4.0),  # moved past the target: free to return
        (0.5, 1000.0, 0.0),  # moved towards it by more than the clip
    ],
)
def test_value_clip_stops_only_moves_beyond_it(now: float, target: float, gradient: float) -> None:
    table = Table(1)
    with torch.no_grad():
        table.value[0] = now
    samples = one_step_episodes([target], [0.0], RATIOS[:1])  # a ratio beyond the clip: the policy has no gradient
    _, metrics = ppo_update(samples, table, value_clip=0.2, value_coef=1.0)
    assert metrics["grad_norm"] == pytest.approx(abs(gradient), rel=1e-5, abs=1e-6)


def single(cls: Any, config: Any, samples: Samples, **settings: Any) -> tuple[Table, dict[str, float]]:
    agent = table_agent(samples.reward.shape[1])
    algo = config(**PLAIN | settings).make_algorithm(agent, BatchSpec(*samples.reward.shape), 1000)
    algo.receive(samples)
    assert algo.updates_due() == 1
    metrics = algo.update()
    assert algo.updates_due() == 0
    assert isinstance(agent.model, Table)
    return agent.model, {name: float(value) for name, value in metrics.items()}


BOTH = pytest.mark.parametrize(("cls", "config"), [(A2C, A2CConfig), (PolicyGradient, PGConfig)])


@BOTH
def test_policy_gradient_is_log_prob_times_advantage(cls: Any, config: Any) -> None:
    samples = one_step_episodes([1.0, 3.0, 99.0], [0.0, 4.0, 0.0], [HALF] * 3, [True, True, False])
    table, metrics = single(cls, config, samples, value_coef=0.5)
    # advantages 1 and -1; value targets 1 and 3 against the table's 0
    assert metrics["policy_loss"] == pytest.approx(0.0, abs=1e-6)
    assert metrics["value_loss"] == pytest.approx(0.5 * (1 + 9) / 2, abs=1e-6)
    assert metrics["entropy"] == pytest.approx(math.log(2), abs=1e-6)
    policy, value = 2 * (0.5 * math.sqrt(0.5)) ** 2, 0.25**2 + 0.75**2  # squared norms
    assert metrics["grad_norm"] == pytest.approx(math.sqrt(policy + value), abs=1e-5)
    assert table.logits[0, 0] > 0 > table.logits[1, 0], "more of the good action, less of the bad"
    assert moved(table.logits) == moved(table.value) == [True, True, False]


@BOTH
def test_advantages_are_normalised_over_valid_rows_only(cls: Any, config: Any) -> None:
    samples = one_step_episodes([3.0, 1.0, 99.0], [0.0, 0.0, 0.0], [HALF] * 3, [True, True, False])
    _, metrics = single(cls, config, samples, normalize_advantage=True)
    assert metrics["grad_norm"] == pytest.approx(math.sqrt(2 * (0.5 * math.sqrt(0.5)) ** 2), abs=1e-5)


@BOTH
def test_gradients_are_clipped_by_their_norm(cls: Any, config: Any) -> None:
    samples = one_step_episodes([100.0], [0.0], [HALF])
    _, metrics = single(cls, config, samples, max_grad_norm=1e-9, learning_rate=1.0)
    assert metrics["grad_norm"] == pytest.approx(100 * math.sqrt(0.5), rel=1e-5), "the norm before clipping"
    table, _ = single(cls, config, samples, max_grad_norm=1e-9, learning_rate=1e-3)
    assert table.logits.abs().max() < 1e-6  # 1e-9 is far below Adam's and RMSProp's eps


@pytest.mark.parametrize("memory", ["none", "lstm"])
@pytest.mark.parametrize("env", ["CartPole-v1", "Pendulum-v1"])
@pytest.mark.parametrize("value_clip", [math.inf, 0.05])
def test_ppos_gradient_is_autograds_of_its_loss(env: str, memory: str, value_clip: float) -> None:
    torch.manual_seed(0)
    sampler, agent = sampler_for(env, T=40, B=2, model_memory=memory)
    config = PPOConfig(epochs=1, minibatches=1, value_clip=value_clip, max_grad_norm=1e9, clip=0.1)
    samples = sampler.collect()
    with torch.no_grad():  # another policy than that which acted: ratios on both sides of the clip
        for parameter in agent.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    algo = PPO(agent, BatchSpec(40, 2), 10**6, config)
    batch = algo.batch_of(samples, values(agent, samples))
    params, value, _ = agent(samples.inputs[:-1], samples.state)
    log_prob, entropy = agent.distribution.log_prob(params, samples.action), agent.distribution.entropy(params)
    ratio = (log_prob - batch.log_prob).exp()
    advantage, valid = masked_normalize(batch.advantage, batch.valid), batch.valid
    clipped = ratio.clamp(0.9, 1.1)
    assert {True, False} == set((ratio[valid] == clipped[valid]).tolist())
    moved = batch.value + (value - batch.value).clamp(-value_clip, value_clip)
    error = 0.5 * torch.max((value - batch.return_).square(), (moved - batch.return_).square())
    rows = torch.min(ratio * advantage, clipped * advantage) - 0.5 * error + 0.01 * entropy
    (-masked_mean(rows, valid)).backward()
    expected = {name: parameter.grad.clone() for name, parameter in agent.named_parameters()}
    agent.zero_grad()
    algo.receive(samples)
    with kept_gradients():
        algo.update()
    for name, parameter in agent.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=2e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda x: x.expand(3), r"shape \[3\] and must be one number \[\]"),
        (lambda x: x.detach(), "depends on no parameter"),
        (lambda x: 0 * x.detach() + torch.nn.Linear(1, 1).weight.sum(), "reaches no parameter of its optimizer"),
    ],
)
def test_a_loss_that_is_none_is_refused_by_what_is_wrong(loss: Any, message: str) -> None:
    class Own(PPO):
        def loss(self, params: Any, value: Any, batch: Any) -> Any:
            found, rows = super().loss(params, value, batch)
            return loss(found), rows

    algo = Own(table_agent(4), BatchSpec(1, 4), 1000, PPOConfig(**PLAIN, epochs=1, minibatches=1))
    algo.receive(ratios())
    with pytest.raises(ConfigError, match=message):
        algo.update()
