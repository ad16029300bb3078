"""BC, MARWIL, IQL, TD3+BC and CQL: their losses against numbers worked out by hand, and what they learn from data."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor, nn

from rlframe.agents import PolicyAgent
from rlframe.algos import bc, cql, dqn, iql, marwil, td3_bc
from rlframe.core.errors import ConfigError
from rlframe.core.struct import Tree
from rlframe.core.types import AgentInputs
from rlframe.critics import Critic, Ensemble, ExpectedValue
from rlframe.optimizers import AdamWConfig
from rlframe.replay import Sequences, Transitions
from rlframe.updates.progress import Progress
from tests.algos.learners import LEVEL, NUMBER, OneBatch, inputs_at, learner, transitions, updated
from tests.algos.table import table_agent
from tests.algos.test_sac import continuous, discrete, drawn, log_prob_at, two_rows
from tests.algos.test_td3 import by_hand
from tests.algos.test_td3 import two_rows as rows_of_td3

HALF = math.log(0.5)


def choices(
    state: list[int], action: list[int], return_: list[float], bootstrap: list[float], after: list[int]
) -> Transitions:
    """Transitions between the states of a table."""
    found = transitions([0.0] * len(state), action, return_, bootstrap, [0.0] * len(state))
    return replace(found, inputs=inputs_at(torch.tensor(state)), next_inputs=inputs_at(torch.tensor(after)))


def in_table(n: int, value: list[float] | None = None) -> PolicyAgent:
    """Two equally likely actions, and V of each state."""
    agent = table_agent(n)
    agent.observation_space, agent.action_space = spaces.Discrete(n), spaces.Discrete(2)
    with torch.no_grad():
        agent.model.value.copy_(torch.tensor(value or [0.0] * n))  # type: ignore[operator]
    return agent


def test_bc_descends_the_negative_log_probability() -> None:
    agent = in_table(2)
    algo = bc.BC(agent, OneBatch(choices([0, 1], [0, 0], [9.0, 9.0], [0.0, 0.0], [0, 0])), 100)
    metrics = updated(algo, algo.replay.batch)
    assert metrics["policy_loss"] == pytest.approx(-HALF)
    assert agent.model.logits.grad.tolist() == [[-0.25, 0.25], [-0.25, 0.25]]


def test_bc_of_the_mode_descends_the_squared_error() -> None:
    algo = learner(bc, LEVEL, loss="mse")
    head = algo.agent.model.policy_head.mean
    with torch.no_grad():
        head.weight.fill_(0.5)
        head.bias.fill_(0.25)
    metrics = updated(algo, transitions([1.0, 2.0], [0.5, -1.0], [0.0, 0.0], [0.0, 0.0], [0.0, 0.0]))
    errors = [0.75 - 0.5, 1.25 + 1.0]
    assert metrics["policy_loss"] == pytest.approx(sum(e * e for e in errors) / 2)
    assert head.bias.grad.item() == pytest.approx(sum(errors))
    with pytest.raises(ConfigError, match=r"algo\.loss=mse is for a Box .* and this policy is a Categorical"):
        learner(bc, action_space=spaces.Discrete(2), loss="mse")


def test_bc_with_memory_learns_from_the_valid_rows_of_sequences() -> None:
    model = {"memory": "lstm", "memory_size": 4, "hidden": (4,)}
    algo = learner(bc, action_space=spaces.Discrete(2), model=model, learn_T=3)
    assert algo.rows_of_update() == 8 * 3
    valid = torch.tensor([[True, True], [True, False], [True, True]])
    inputs = AgentInputs(torch.randn(4, 2, 1), torch.zeros(4, 2).long(), torch.zeros(4, 2), torch.zeros(4, 2).bool())
    never, state = torch.zeros_like(valid), algo.agent.initial_state(range(2))
    batch = Sequences(
        inputs, (~valid).long(), torch.zeros(3, 2), never, never, valid, state, torch.ones(2), np.arange(2)
    )
    log_prob = algo.agent.evaluate(inputs[:-1], state, batch.action)[0]
    assert updated(algo, batch)["policy_loss"] == pytest.approx(-log_prob[valid].mean().item(), rel=1e-6)


RETURNS = choices([0, 1, 2], [0, 0, 0], [2.0, 1.0, 1.0], [0.0, 0.0, 0.5], [2, 2, 1])


def test_marwil_weighs_actions_by_the_exponential_of_their_normalised_advantage() -> None:
    agent = in_table(3, [1.0, 2.0, 0.5])
    algo = marwil.MARWIL(agent, OneBatch(RETURNS), 100, marwil.Config(beta=0.8, norm_rate=0.25))
    metrics = updated(algo, RETURNS)
    advantage = np.array([2 - 1, 1 - 2, 1 + 0.5 * 2 - 0.5])  # the last return is completed by V of state 1
    c = math.sqrt((advantage**2).mean())
    weight = np.exp(0.8 * advantage / c)
    assert metrics["value_loss"] == pytest.approx(float((advantage**2).mean()) / 2)
    assert metrics["advantage_weight"] == pytest.approx(float(weight.mean()), rel=1e-5)
    assert metrics["policy_loss"] == pytest.approx(float(-(weight * HALF).mean()), rel=1e-5)
    assert agent.model.logits.grad[:, 0].tolist() == pytest.approx((-weight / 6).tolist(), rel=1e-5)
    assert agent.model.value.grad.tolist() == pytest.approx((-advantage / 3).tolist(), rel=1e-5)


def test_its_norm_is_a_running_mean_that_is_right_from_the_first_update_on() -> None:
    algo = marwil.MARWIL(in_table(1), OneBatch(RETURNS), 100, marwil.Config(norm_rate=0.25))
    found = [algo.norm.follow(torch.tensor([x])).item() ** 2 for x in (3.0, -1.0)]
    assert found == pytest.approx([9.0, (0.75 * 0.25 * 9 + 0.25 * 1) / (0.75 * 0.25 + 0.25)])


def test_one_bad_batch_leaves_the_norm_of_advantages_as_it_is() -> None:
    norm = marwil.AdvantageNorm(0.5, Progress(), torch.device("cpu"))
    for advantage in (torch.tensor([1e20, 1.0]), torch.tensor([math.nan])):
        norm.follow(advantage)
    assert norm.follow(torch.tensor([3.0, -3.0])).item() == 3


def test_marwil_with_beta_0_clones_and_its_largest_weight_bounds_it() -> None:
    one, other, bounded = in_table(3, [9.0, 0.0, 0.0]), in_table(3), in_table(3, [-9.0, 0.0, 0.0])
    updated(marwil.MARWIL(one, OneBatch(RETURNS), 100, marwil.Config(beta=0.0)), RETURNS)
    updated(bc.BC(other, OneBatch(RETURNS), 100), RETURNS)
    assert torch.equal(one.model.logits, other.model.logits)
    metrics = updated(marwil.MARWIL(bounded, OneBatch(RETURNS), 100, marwil.Config(most_weight=0.5)), RETURNS)
    assert metrics["advantage_weight"] == 0.5


class TableCritics(nn.Module):
    """Two tables of Q of two actions in each state."""

    def __init__(self, q: list[list[list[float]]]) -> None:
        super().__init__()
        self.q = nn.Parameter(torch.tensor(q))  # [2, states, 2]

    def forward(self, observation: Tree) -> Tensor:
        return self.q[:, observation]


def iql_in_table(**settings: Any) -> iql.IQL:
    agent, q = in_table(2, [1.0, 2.0]), [[[3.0, 0.0], [1.0, 5.0]], [[2.0, 9.0], [4.0, 0.5]]]
    critic = Critic(TableCritics(q), ExpectedValue(math.inf), Ensemble())
    batch = choices([0, 1], [0, 1], [1.0, 2.0], [0.9, 0.0], [1, 0])
    return iql.IQL(agent, critic, OneBatch(batch), 100, iql.Config(**{"expectile": 0.7, "beta": 2.0} | settings))


def test_iql_learns_v_by_expectiles_q_by_v_and_the_policy_by_advantages() -> None:
    algo = iql_in_table()
    metrics = updated(algo, algo.replay.batch)
    advantage = np.array([2.0 - 1.0, 0.5 - 2.0])  # the least of Q'(s, a), less V(s)
    share = np.array([0.7, 0.3])
    assert metrics["value_loss"] == pytest.approx(float((share * advantage**2).mean()), rel=1e-5)
    assert algo.agent.model.value.grad.tolist() == pytest.approx((-share * advantage).tolist(), rel=1e-5)
    weight = np.exp(2 * advantage)
    assert metrics["policy_loss"] == pytest.approx(float(-(weight * HALF).mean()), rel=1e-5)
    assert algo.agent.model.logits.grad[0, 0].item() == pytest.approx(-weight[0] / 4, rel=1e-5)
    targets = [1 + 0.9 * 2.0, 2.0]
    errors = [[3.0 - targets[0], 5.0 - targets[1]], [2.0 - targets[0], 0.5 - targets[1]]]
    assert metrics["loss"] == pytest.approx(sum(e * e for row in errors for e in row) / 2, rel=1e-5)
    taken = algo.critic.networks.q.grad[:, [0, 1], [0, 1]].tolist()
    assert taken[0] == pytest.approx(errors[0])
    assert taken[1] == pytest.approx(errors[1])


def test_weights_of_iql_end_at_100_and_its_targets_move_by_tau() -> None:
    algo = iql_in_table(beta=10.0, tau=0.5, critic_learning_rate=0.1, target_interval=2)
    before = algo.critic.target.q.clone()
    assert updated(algo, algo.replay.batch)["advantage_weight"] == pytest.approx((100 + math.exp(-15)) / 2)
    assert torch.equal(algo.critic.target.q, before)
    updated(algo, algo.replay.batch)
    torch.testing.assert_close(algo.critic.target.q.data, (before + algo.critic.networks.q.data) / 2)


def test_iql_refuses_actions_and_networks_that_its_critics_do_not_have() -> None:
    with pytest.raises(ConfigError, match="algo=iql has critics of one Box or one Discrete, not MultiDiscrete"):
        learner(iql, action_space=spaces.MultiDiscrete([2, 2]))
    for module in (iql, marwil):
        with pytest.raises(ConfigError, match="learns from single rows; use bc or memory=none"):
            learner(module, model={"memory": "lstm"})


def test_the_actor_of_td3_bc_ascends_the_scaled_critic_and_imitates() -> None:
    algo = by_hand(td3_bc, policy_interval=1, critic_learning_rate=0.0, q_weight=3.0)
    metrics = updated(algo, rows_of_td3())
    a = np.tanh([0.5, 1.0])
    q, data = np.array([1.0, 2.0]) + 2 * a + 0.5, np.array([0.5, -1.0])
    assert metrics["policy_loss"] == pytest.approx(float(-3.0 + ((a - data) ** 2).mean()), rel=1e-5)
    slope = (-3.0 / np.abs(q).mean() * 2 + 2 * (a - data)) * (1 - a**2) / 2
    assert algo.agent.model.mlp.layers.parameters[0][1].grad.item() == pytest.approx(float(slope.sum()), rel=1e-5)


def gap_by_hand(algo: Any) -> np.ndarray:
    """[critics, n] of the rows of test_sac, from the numbers that the generator is to give."""
    copy = torch.Generator()
    copy.set_state(algo.generator.get_state())
    torch.randn(4, 1, generator=copy)  # SAC's own
    normal = torch.randn(8, 1, generator=copy).double().numpy().reshape(4, 2)  # two at each of s, then at s'
    uniform = 2 * torch.rand(4, 1, generator=copy).double().numpy().reshape(2, 2) - 1
    state, after, data = np.array([1.0, 2.0]), np.array([1.0, 7.0]), np.array([0.5, -1.0])
    raw = np.concatenate([[state, state], [after, after]]) / 2 + math.exp(-1) * normal
    actions = np.concatenate([uniform, np.tanh(raw)])
    density = np.concatenate([np.full((2, 2), HALF), log_prob_at(raw, normal, -1.0)])
    q = [state + 2 * actions + 0.5, 2 * state + actions - 1]
    of_data = np.array([state + 2 * data + 0.5, 2 * state + data - 1])
    return np.log(np.exp(np.array(q) - density).sum(1)) - of_data


def test_cql_adds_the_gap_by_importance_to_the_losses_of_sac() -> None:
    plain, algo = continuous(log_std=-1.0), continuous(cql, log_std=-1.0, n_actions=2, conservative_weight=3.0)
    expected, soft = gap_by_hand(algo), continuous(cql, log_std=-1.0, n_actions=2, entropy_in_target=True)
    of_sac = updated(plain, two_rows())
    metrics = updated(algo, two_rows())
    assert metrics["conservative_gap"] == pytest.approx(expected.mean(), rel=1e-4)
    assert updated(soft, two_rows())["loss"] == pytest.approx(of_sac["loss"], rel=1e-5)
    assert metrics["policy_loss"] == pytest.approx(of_sac["policy_loss"], rel=1e-5)
    a = math.tanh(0.5 + math.exp(-1) * drawn(continuous(log_std=-1.0))[1][0])
    targets = [0.25 + 0.9 * min(10 + a, 9 + 3 * a), 3.0]  # without the entropy
    errors = [[2.5 - targets[0], 0.5 - targets[1]], [1.5 - targets[0], 2.0 - targets[1]]]
    assert metrics["loss"] == pytest.approx(0.5 * sum(e * e for row in errors for e in row) / 2, rel=1e-5)
    bias = [each.critic.networks.network.layers.parameters[0][1].grad.flatten() for each in (soft, plain)]
    torch.testing.assert_close(bias[0], bias[1])  # the gap is the same for Q + c
    weights = [each.critic.networks.network.layers.parameters[0][0].grad.flatten() for each in (soft, plain)]
    assert not torch.allclose(*weights)


@pytest.mark.parametrize(("target_gap", "rises"), [(-9.0, True), (9.0, False)])
def test_a_learned_weight_rises_while_the_gap_is_above_its_target_and_does_not_decay(
    target_gap: float, rises: bool
) -> None:
    settings = {"learn_conservative_weight": True, "conservative_weight": 2.0, "target_gap": target_gap}
    algo = continuous(cql, log_std=-1.0, critic_learning_rate=1e-2, optimizer=AdamWConfig(weight_decay=0.5), **settings)
    first = updated(algo, two_rows())
    assert first["conservative_weight"] == pytest.approx(2.0)
    gradient = -2.0 * (first["conservative_gap"] - target_gap)
    assert algo.multiplier.log.grad.item() == pytest.approx(gradient, rel=1e-4)
    assert updated(algo, two_rows())["conservative_weight"] == pytest.approx(2.0 * math.exp(1e-2 if rises else -1e-2))


def test_a_learned_weight_at_its_limit_falls_once_the_gap_is_below_its_target() -> None:
    settings = {"learn_conservative_weight": True, "conservative_weight": 1e6, "critic_learning_rate": 1e-2}
    rising, falling = (continuous(cql, log_std=-1.0, target_gap=gap, **settings) for gap in (-9.0, 9.0))
    for algo in (rising, falling):
        updated(algo, two_rows())
    assert rising.multiplier.log.item() == pytest.approx(math.log(1e6))
    assert falling.multiplier.log.item() == pytest.approx(math.log(1e6) - 1e-2)


def test_cql_of_discrete_actions_is_exact() -> None:
    metrics = updated(discrete(cql), two_rows(True))
    # Q1 = (1, s) and Q2 = (s, 2), of action 1 in state 1 and of action 0 in state 2
    pairs = [((1.0, 1.0), 1.0), ((1.0, 2.0), 1.0), ((1.0, 2.0), 2.0), ((2.0, 2.0), 2.0)]
    gaps = [math.log(sum(map(math.exp, q))) - taken for q, taken in pairs]
    assert metrics["conservative_gap"] == pytest.approx(sum(gaps) / 4, rel=1e-5)


@pytest.mark.parametrize("value", ["expected", "quantile"])
def test_dqn_with_a_conservative_weight_adds_the_gap(value: str) -> None:
    plain, algo = (
        learner(dqn, action_space=spaces.Discrete(3), value=value, n_atoms=5, conservative_weight=w, seed=3)
        for w in (0.0, 2.0)
    )
    batch = transitions([1.0, -2.0], [0, 2], [1.0, 2.0], [0.9, 0.0], [0.5, 0.5])
    q = plain.agent.kind.q(plain.agent(batch.inputs, ())[0])
    gap = q.logsumexp(-1) - q[[0, 1], [0, 2]]
    torch.testing.assert_close(algo.evaluate(batch)[0], plain.evaluate(batch)[0] + 2 * gap)


def test_a_forbidden_action_is_in_no_gap() -> None:
    space = spaces.Dict({"action_mask": spaces.MultiBinary(3), "x": NUMBER})
    algo = learner(dqn, space, spaces.Discrete(3), conservative_weight=1.0)
    observation = {"action_mask": torch.tensor([[1, 1, 0]]), "x": torch.zeros(1, 1)}
    batch = replace(transitions([0.0], [1], [0.0], [0.0], [0.0]), inputs=inputs_at(observation))
    gap = algo._gap(torch.tensor([[1.0, 2.0, 99.0]]), batch)
    assert gap.item() == pytest.approx(math.log(math.e + math.e**2) - 2)
