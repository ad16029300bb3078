"""Options of critics and their layers: batch renormalisation, unit rows, joint batches, subsets, truncated pools."""

import copy
import math
from typing import Any

import pytest
import torch
from gymnasium import spaces
from torch import Tensor

from rlframe.algos import dqn, sac, td3
from rlframe.algos.running_deviation import ScaledReturns
from rlframe.core.errors import ConfigError
from rlframe.core.types import AgentInputs, Samples
from rlframe.critics import Ensemble, ExpectedValue, QuantileValue, make_critic
from rlframe.models import ModelConfig, numpy_inference
from rlframe.models.base import CriticConfig
from rlframe.models.network import (
    BATCH_EPSILON,
    BATCH_MOMENTUM,
    RENORM_WARM_UP,
    LayerOptions,
    Network,
    Norm,
    Units,
    in_batch_statistics,
)
from rlframe.ops.q_learning import truncated
from tests.algos.learners import OneBatch, learner, transitions
from tests.models.compared import BOX, VECTOR, close

X = torch.tensor([[1.0, -2.0], [3.0, 0.0], [5.0, 5.0]])
HALF_SQUARE = ExpectedValue(math.inf)


def statistics(norm: Any) -> list[Tensor]:
    return [x.clone() for x in norm.buffers()]


def test_renormalisation_is_that_of_the_paper_once_it_is_warm() -> None:
    """x^ = (x - μ_B) / σ_B r + d (Ioffe 2017, eq. 4), r and d constant and within [1/3, 3] and [-5, 5]."""
    norm = Norm("renorm", 2, 0)
    norm.mean.copy_(torch.tensor([2.0, 9.0]))
    norm.variance.copy_(torch.tensor([4.0, 0.0]))
    gain, shift = norm.weight.data.copy_(torch.tensor([2.0, 3.0])), norm.bias.data.copy_(torch.tensor([0.5, 0.0]))
    mean, std = X.mean(0), (X.var(0, correction=0) + BATCH_EPSILON).sqrt()
    running = torch.tensor([4.0 + BATCH_EPSILON, BATCH_EPSILON]).sqrt()
    plain = (X - mean) / std * gain + shift
    close(norm(X), plain)  # at first r = 1 and d = 0
    assert norm.count == 1
    norm.mean.copy_(torch.tensor([2.0, 9.0]))
    norm.variance.copy_(torch.tensor([4.0, 0.0]))
    norm.count.fill_(RENORM_WARM_UP)
    r = torch.stack([std[0] / running[0], torch.tensor(3.0)])
    d = torch.stack([(mean[0] - 2) / running[0], torch.tensor(-5.0)])
    x = X.clone().requires_grad_()
    found = norm(x)
    close(found, ((X - mean) / std * r + d) * gain + shift)
    close(found[:, 0], (X[:, 0] - 2) / running[0] * gain[0] + shift[0])  # unclipped: what acting computes
    found.pow(3).sum().backward()
    y = X.clone().requires_grad_()
    hat = (y - y.mean(0)) * (y.var(0, correction=0) + BATCH_EPSILON).rsqrt()
    ((hat * r + d) * gain + shift).pow(3).sum().backward()
    assert x.grad is not None
    assert y.grad is not None
    close(x.grad, y.grad)
    close(norm.mean, torch.tensor([2.0, 9.0]) * (1 - BATCH_MOMENTUM) + BATCH_MOMENTUM * mean)


def test_the_variance_keeps_its_digits_far_from_zero_once_the_running_mean_is_there() -> None:
    norm = Norm("batch", 1, 0)
    norm.mean.fill_(10_000.0)
    rows = 10_000 + torch.tensor([[-0.5], [0.0], [0.5]])
    close(norm(rows), (rows - 10_000) / math.sqrt(1 / 6 + BATCH_EPSILON))


def test_normalisation_may_follow_activations_and_begin_at_the_input() -> None:
    network = Network([2, 3, 1], "relu", norm="batch", options=LayerOptions(norm_input=True, norm_after=True))

    def normal(x: Tensor) -> Tensor:
        return (x - x.mean(0)) / (x.var(0, correction=0) + BATCH_EPSILON).sqrt()

    hidden, last = network.linears
    close(network(X), last(normal(hidden(normal(X)).relu())), 1e-5)
    with torch.no_grad():
        close(torch.from_numpy(numpy_inference.mlp(network.layers)(X.numpy())), network(X), 1e-5)
        close(copy.deepcopy(network)(X), network(X))


def test_dropout_comes_before_normalisation_and_is_off_in_eval_mode() -> None:
    network = Network([2, 400, 1], "relu", norm="layer", options=LayerOptions(dropout=0.25))
    torch.manual_seed(0)
    kept = network.dropout[0](torch.ones(400))
    assert kept.unique().tolist() == pytest.approx([0.0, 1 / 0.75])
    torch.manual_seed(0)
    hidden, last = network.linears
    close(network(X[:1]), last(network.norms[0](hidden(X[:1]) * kept).relu()))
    network.eval()
    close(network(X), last(network.norms[0](hidden(X)).relu()))


@pytest.mark.parametrize("k", [0, 2])
def test_projection_makes_unit_rows_and_changes_nothing_after_normalisation(
    k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlframe.models.network.BATCH_EPSILON", 1e-9)
    network = Network([5, 64, 64, 3], "relu", norm="batch", k=k, options=LayerOptions(unit_rows=True))
    weights, x = Units.of(network).rows, torch.randn(*[k] * bool(k), 50, 5)
    assert len(weights) == 3
    for weight in weights:
        close(weight.norm(dim=-1), torch.ones(weight.shape[:-1]))
        weight.data *= torch.rand(*weight.shape[:-1], 1) + 1.0
    before = network(x)
    last = weights[-1].norm(dim=-1)
    Units(weights[:-1], []).project()
    close(network(x), before, 1e-4)
    Units(weights, []).project()
    bias = network.linears[-1].bias.unsqueeze(-2)
    close((network(x) - bias) * last.unsqueeze(-2) + bias, before, 1e-4)
    assert all(torch.allclose(w.norm(dim=-1), torch.ones(()), atol=1e-6) for w in weights)
    weights[0].data *= 2
    Units(weights, []).project(torch.tensor(1.0))
    close(weights[0].norm(dim=-1), torch.full(weights[0].shape[:-1], 2.0))  # a step that is skipped


@pytest.mark.parametrize("module", [sac, td3], ids=["sac", "td3"])
def test_rows_of_actor_and_critics_are_units_after_each_step(module: Any) -> None:
    model = {"hidden": (8,), "norm": "batch", "unit_rows": True}
    algo = learner(module, model=model, policy_interval=1, critic_learning_rate=0.1, learning_rate=0.1)
    algo.replay = OneBatch(rows())
    before = [weight.clone() for weight in algo.critic.units.rows]
    for _ in range(3):
        algo.update()
    weights = Units.of(algo.critic.networks, algo.agent.model).rows
    assert len(weights) == 4
    assert all(torch.allclose(weight.norm(dim=-1), torch.ones(()), atol=1e-6) for weight in weights)
    assert not torch.allclose(before[0], weights[0], atol=1e-2)


@pytest.mark.parametrize("k", [0, 2])
def test_no_bias_is_before_a_normalisation_over_the_batch_which_would_cancel_it(k: int) -> None:
    """Its gradient would be mere rounding, of which Adam would make steps (XQC's layers have none either)."""
    plain, after = (
        Network([2, 3, 3, 1], "relu", norm="batch", k=k, options=LayerOptions(norm_after=x)) for x in (0, 1)
    )
    assert [linear.bias is None for linear in plain.linears] == [True, True, False]
    assert not any(
        linear.bias is None for linear in (*after.linears, *Network([2, 3, 1], "relu", norm="layer").linears)
    )
    x = X.expand(*[k] * bool(k), 3, 2)
    hidden = [plain.norms[i] for i in (0, 1)]
    y = hidden[1](hidden[0](x @ plain.linears[0].weight.mT).relu() @ plain.linears[1].weight.mT).relu()
    close(plain(x), plain.linears[2](y))
    with torch.no_grad():
        if k:
            close(plain.first(X), plain(x)[0])
        else:
            close(torch.from_numpy(numpy_inference.mlp(plain.layers)(X.numpy())), plain(X), 1e-5)


@pytest.mark.parametrize("kind", ["batch", "renorm"])
def test_the_actors_statistics_move_at_each_update_and_its_parameters_with_their_counters_at_every_third(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """XQC: next actions are drawn with the running statistics, as in acting."""
    monkeypatch.setattr("rlframe.models.network.RENORM_WARM_UP", 0)
    algo = learner(sac, model={"hidden": (8,), "norm": kind}, policy_interval=3)
    algo.replay = OneBatch(rows())
    norm, actor = algo.agent.model.mlp.norms[0], algo.agent.model
    moved, seen, draw = [], [], algo.soft_value.draw
    monkeypatch.setattr(algo.soft_value, "draw", lambda params, noise: (seen.append(params), draw(params, noise))[1])
    for _ in range(6):
        mean, weight = norm.mean.clone(), norm.weight.clone()
        observation = algo.replay.batch.inputs.observation
        outputs = observation @ actor.mlp.linears[0].weight.T
        expected = mean + BATCH_MOMENTUM * (outputs.mean(0) - mean)
        learns_from = copy.deepcopy(actor).params(observation)
        algo.update()
        close(norm.mean, expected)
        moved.append((not torch.equal(norm.mean, mean), not torch.equal(norm.weight, weight)))
        if moved[-1][1]:
            torch.testing.assert_close(seen[-1], learns_from, rtol=0, atol=2e-6)  # by the statistics before this batch
    assert moved == [(True, False), (True, False), (True, True)] * 2
    assert [float(each.optimizer.state_dict()["state"][0]["step"]) for each in optimizers(algo)] == [6.0, 2.0, 2.0]
    x, y = torch.randn(5, 1), torch.randn(5, 1)
    with torch.inference_mode():
        acting = actor(y)
    with torch.no_grad():
        following, _ = algo.soft_value.draw_next(actor, (x, y), torch.zeros(5, 1))
    assert torch.equal(following, acting[:, :1].tanh())


class Normalizing(torch.nn.Module):
    """A user's encoder."""

    def __init__(self, space: Any) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(x)
        return y


@pytest.mark.parametrize("norm", ["none", "batch"])
def test_the_statistics_of_a_users_layer_move_once_an_update(norm: str) -> None:
    model = {"encoder": f"{__name__}:Normalizing", "hidden": (8,), "norm": norm}
    algo = learner(sac, model=model, policy_interval=3)
    algo.replay = OneBatch(rows())
    for _ in range(6):
        algo.update()
    (layer,) = [x for x in algo.agent.model.modules() if isinstance(x, torch.nn.BatchNorm1d)]
    assert layer.num_batches_tracked == 6


def optimizers(algo: Any) -> list[Any]:
    return [algo.critic_optimizer, algo.optimizer, algo.temperature_optimizer]


def rows() -> Any:
    return transitions([0.5, -0.5, 0.1], [0.2, -0.7, 0.0], [-1.0, 3.0, 0.0], [0.9] * 3, [1.0, 2.0, 3.0])


@pytest.mark.parametrize("norm", ["batch", "renorm"])
@pytest.mark.parametrize("has_target", [True, False])
def test_both_rows_are_normalised_as_one_batch_and_targets_keep_none_of_its_statistics(
    norm: str, has_target: bool
) -> None:
    """XQC; without targets CrossQ (Bhatt et al. 2024, section 3)."""
    config = ModelConfig(hidden=(7,), norm=norm)
    critic = make_critic(VECTOR, BOX, HALF_SQUARE, config, Ensemble(2, has_target), 0)
    x, a = torch.randn(6, 5), torch.randn(6, 2)
    both, actions = torch.cat([x, x + 9]), torch.cat([a, -a])
    online, target = copy.deepcopy(critic.networks), copy.deepcopy(critic.target)
    before = statistics(critic.target)
    values, found = critic.with_target(x, a, x + 9, -a)
    expected = online(both, actions)
    close(values, expected[:, :6])
    assert values.requires_grad
    if has_target:
        with torch.no_grad(), in_batch_statistics(target):
            close(found, target(both, actions)[:, 6:].amin(0))
        assert all(map(torch.equal, statistics(critic.target), before))
    else:
        close(found, expected[:, 6:].amin(0))
        assert critic.target_and_online() == ([], [])
        assert len(critic.state_dict()) == len(critic.networks.state_dict())
    close(statistics(critic.networks), statistics(online))  # of the whole batch
    assert not torch.allclose(values, critic.networks(x, a), atol=1e-3), "statistics are those of both"
    assert not found.requires_grad


def test_a_truncated_pool_is_sorted_without_the_largest_atoms() -> None:
    theta = torch.tensor([[[3.0, 1.0, 9.0]], [[2.0, 8.0, 0.0]]])  # [2 critics, 1 row, 3 atoms]
    assert truncated(theta, 1).tolist() == [[0.0, 1.0, 2.0, 3.0]]
    assert truncated(theta, 0).tolist() == [[0.0, 1.0, 2.0, 3.0, 8.0, 9.0]]
    ensemble = Ensemble(2, target_from="truncated", n_dropped=2)
    critic = make_critic(VECTOR, BOX, QuantileValue(3), ModelConfig(hidden=(7,)), ensemble, 0)
    x, a = torch.randn(4, 5), torch.randn(4, 2)
    values, target = critic.with_target(x, a, x + 1, a)
    atoms = critic.target(x + 1, a).transpose(0, 1).flatten(1)
    assert target.tolist() == [sorted(row)[:2] for row in atoms.tolist()]
    loss = critic.loss(values, target, torch.zeros(4), transitions([0.0] * 4, [0.0] * 4, *[[1.0] * 4] * 3), math.inf)
    u = target[None, :, None, :] - values[..., None]
    tau = torch.tensor([1 / 6, 0.5, 5 / 6])[:, None]
    huber = torch.where(u.abs() < 1, 0.5 * u.square(), u.abs() - 0.5)
    close(loss, ((tau - (u < 0).float()).abs() * huber).mean(-1).sum(-1).mean(-1).sum())


def test_the_target_is_of_critics_drawn_anew_for_each_update() -> None:
    """REDQ (Chen et al. 2021, algorithm 1): the least of M of N; the policy ascends the mean of all."""
    algo = learner(sac, n_critics=5, n_target_critics=2, policy_from="mean", model={"hidden": (4,)})
    critic, x, a = algo.critic, torch.randn(6, 1), torch.randn(6, 1)
    assert critic.state_dict().keys() == learner(sac, n_critics=5, model={"hidden": (4,)}).critic.state_dict().keys()
    drawn = []
    for _ in range(60):
        critic.choose(algo.generator)
        drawn.append(tuple(sorted(critic.chosen.tolist())))
        _, target = critic.with_target(x, a, x, a)
        close(target, critic.target(x, a)[critic.chosen].amin(0))
    assert all(len(set(pair)) == 2 for pair in drawn)
    assert len(set(drawn)) == 10  # every pair of five
    close(critic.policy_q(x, a), critic.q(x, a).mean(0))
    algo.replay = OneBatch(rows())
    before = critic.chosen.clone()
    changed = False
    for _ in range(8):
        algo.update()
        changed |= not torch.equal(before, critic.chosen)
    assert changed


def of_rewards(rewards: list[float], ends: list[bool]) -> Samples:
    """A batch of one environment; episodes end by termination."""
    reward, terminated = torch.tensor(rewards)[:, None], torch.tensor(ends)[:, None]
    never = torch.zeros_like(terminated)
    first = torch.cat([never[:1], terminated])
    inputs = AgentInputs(torch.zeros(len(rewards) + 1, 1, 1), reward, reward, first)
    return Samples(inputs, reward, reward, terminated, never, ~never, (), (), (), n_env_steps=len(rewards), start=0)  # type: ignore[arg-type]


def test_returns_are_scaled_by_the_deviation_at_the_time_of_the_update() -> None:
    scaled, batch = ScaledReturns(0.5), transitions([0.0] * 2, [0.0] * 2, [2.0, -4.0], [0.5] * 2, [0.0] * 2)
    scaled.receive(of_rewards([1.0, 2.0, 3.0], ends=[False, True, False]))
    sums = torch.tensor([0.0, 1.0, 2.5, 3.0])  # one sum of 0 at the start; a new episode begins at the third reward
    expected = sums.double().var(correction=0).add(1e-8).sqrt().item()
    assert scaled(batch).return_.tolist() == pytest.approx([2 / expected, -4 / expected], rel=1e-6)
    assert scaled(batch).bootstrap.tolist() == [0.5, 0.5]
    other = ScaledReturns(0.5)
    other.load_state_dict(scaled.state_dict())
    more = of_rewards([5.0], ends=[False])
    scaled.receive(more)
    other.receive(more)
    assert torch.equal(scaled(batch).return_, other(batch).return_)
    assert scaled(batch).return_[0] < 2 / expected


def test_no_scaled_return_so_far_is_above_the_limit() -> None:
    """r / max(std of G, max |G| / c) (FlashSAC, SimbaV2); the largest is kept in snapshots."""
    batch = transitions([0.0] * 2, [0.0] * 2, [3.0, -12.0], [0.5] * 2, [0.0] * 2)
    scaled = ScaledReturns(0.5, limit=2.0)
    scaled.receive(of_rewards([1.0] * 99 + [-10.0, 4.0], ends=[True] * 101))
    assert scaled(batch).return_.tolist() == pytest.approx([3 / 5, -12 / 5])
    other = ScaledReturns(0.5, limit=2.0)
    other.load_state_dict(copy.deepcopy(scaled.state_dict()))
    scaled.receive(of_rewards([30.0], ends=[True]))
    assert scaled(batch).return_.tolist() == pytest.approx([3 / 15, -12 / 15])
    assert other(batch).return_.tolist() == pytest.approx([3 / 5, -12 / 5])


def test_a_policy_that_learns_first_sees_both_rows_and_draws_next_actions_once_it_has() -> None:
    """FlashSAC: batch statistics are those of [s; s'], which move at policy steps alone."""
    settings = {"policy_first": True, "policy_interval": 2, "critic_learning_rate": 0.0}
    algo = learner(sac, model={"hidden": (8,), "norm": "batch"}, learning_rate=0.1, **settings)
    algo.replay = OneBatch(rows())
    actor, seen = algo.agent.model, []
    algo.soft_value.critic_loss = spied(algo.soft_value.critic_loss, seen)
    algo.soft_value.noise = lambda n: torch.zeros(2, n, 1)
    norm, linear = actor.mlp.norms[0], actor.mlp.linears[0]
    moves = []
    for _ in range(4):
        mean, weight = norm.mean.clone(), linear.weight.clone()
        both = torch.cat([algo.replay.batch.inputs.observation, algo.replay.batch.next_inputs.observation]) @ weight.T
        algo.update()
        moves.append((not torch.equal(norm.mean, mean), not torch.equal(linear.weight, weight)))
        if moves[-1][0]:
            close(norm.mean, mean + BATCH_MOMENTUM * (both.mean(0) - mean))
        with torch.inference_mode():
            acting = actor(algo.replay.batch.next_inputs.observation)[:, :1].tanh()
        close(seen[-1], acting)  # of the new parameters and running statistics
    assert moves == [(False, False), (True, True)] * 2


def spied(critic_loss: Any, seen: list[Tensor]) -> Any:
    def spy(batch: Any, observations: Any, next_drawn: Any, temperature: Tensor) -> Any:
        seen.append(next_drawn[0])
        return critic_loss(batch, observations, next_drawn, temperature)

    return spy


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"n_target_critics": 3}, "algo.n_target_critics=3 must be at most algo.n_critics=2"),
        ({"target_from": "truncated"}, "algo.target_from=truncated is of quantiles, and algo.value=expected"),
        (
            {"target_from": "truncated", "value": "quantile", "n_atoms": 2},
            "algo.drop_atoms=2 must be below algo.n_atoms=2",
        ),
    ],
)
def test_options_that_do_not_fit_are_refused(words: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        sac.Config(**words)


def test_layers_of_other_algorithms_have_no_such_options() -> None:
    with pytest.raises(ConfigError, match=r"model.unit_rows=True is for actors and their critics"):
        dqn.Config().make_agent(VECTOR, spaces.Discrete(2), ModelConfig(hidden=(4,), unit_rows=True))
    with pytest.raises(ConfigError, match=r"model.norm_after=true needs model.norm or model.critic.norm"):
        ModelConfig(norm_after=True)
    ModelConfig(norm_after=True, critic=CriticConfig(norm="batch"))
