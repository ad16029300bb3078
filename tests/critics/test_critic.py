"""Critics are their networks, evaluated together with targets or apart, and learn as their kind of value says."""

from typing import Any

import pytest
import torch
from gymnasium import Space, spaces
from torch import Tensor, nn

from rlframe.algos import ddpg, ppo, sac, td3
from rlframe.algos.targets import soft_update
from rlframe.core.errors import ConfigError
from rlframe.critics import CategoricalValue, Critic, Ensemble, ExpectedValue, QuantileValue, Value, make_critic
from rlframe.models import ModelConfig
from rlframe.models.base import CriticConfig
from rlframe.models.network import frozen
from rlframe.replay import Transitions
from tests.algos.learners import OneBatch, learner, transitions
from tests.models.compared import BOX, VECTOR, close

HALF_SQUARE = ExpectedValue(float("inf"))
VALUES = {"expected": HALF_SQUARE, "categorical": CategoricalValue(7, -2.0, 2.0), "quantile": QuantileValue(5)}


def critic_of(space: Space = VECTOR, value: Value = HALF_SQUARE, k: int = 2, seed: int = 0, **words: Any) -> Critic:
    return make_critic(space, BOX, value, ModelConfig(**{"hidden": (7,)} | words), k, seed)


def moved(critic: Critic) -> Critic:
    """With networks that differ from their targets."""
    with torch.no_grad():
        for parameter in critic.learned:
            parameter += 0.1 * torch.randn(parameter.shape)
    return critic


class Sums(nn.Module):
    """A user's critics: i (sum of observation and action), without a dimension for atoms."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([[1.0], [2.0]]))

    def forward(self, observation: Tensor, action: Tensor) -> Tensor:
        return self.scale * (observation.sum(-1) + action.sum(-1))


def test_networks_of_ones_own_are_evaluated_as_they_are() -> None:
    critic, x, a = Critic(Sums(), HALF_SQUARE, Ensemble()), torch.ones(3, 5), torch.zeros(3, 2, requires_grad=True)
    values, target = critic.with_target(x, a.detach(), -x, a.detach())
    close(values.squeeze(-1).tolist(), [[5.0] * 3, [10.0] * 3])
    close(target.squeeze(-1).tolist(), [-10.0] * 3)
    with frozen(critic.learned):
        critic.first_q(x, a).sum().backward()
    assert a.grad is not None
    close(a.grad, torch.ones(3, 2))
    assert critic.learned[0].grad is None


def test_networks_of_ones_own_are_as_many_as_the_key_says() -> None:
    critic = Critic(Sums(), HALF_SQUARE, Ensemble(k=3))
    with pytest.raises(ConfigError, match=r"algo\.n_critics=3, but Sums gives values of 2 critics; make as many"):
        critic.q(torch.ones(3, 5), torch.zeros(3, 2))


def test_networks_of_ones_own_have_the_numbers_that_the_value_is_of() -> None:
    critic = Critic(Sums(), QuantileValue(5), Ensemble())
    with pytest.raises(ConfigError, match=r"Sums gives 1 numbers .* a QuantileValue, is of 5 \(algo\.n_atoms\)"):
        critic.q(torch.ones(3, 5), torch.zeros(3, 2))


@pytest.mark.parametrize("norm", ["batch", "renorm"])
def test_without_a_gradient_a_row_has_the_values_that_it_has_among_others(norm: str) -> None:
    """First priorities of replay are of a few rows; see DDPG._first_priority."""
    critic = moved(critic_of(norm=norm, hidden=(7,)))
    x, a, y, b = torch.randn(6, 5), torch.randn(6, 2), torch.randn(6, 5), torch.randn(6, 2)
    with torch.no_grad():
        all_rows = critic.with_target(x, a, y, b)
        one_row = critic.with_target(x[:1], a[:1], y[:1], b[:1])
    close([all_rows[0][:, :1], all_rows[1][:1]], list(one_row))


def test_critics_differ_from_each_other_and_their_targets_move_with_them() -> None:
    critic = critic_of()
    x, a = torch.rand(5, 5), torch.rand(5, 2)
    q = critic.q(x, a)
    assert not torch.allclose(q[0], q[1], atol=1e-3)
    close(critic.target(x, a), critic(x, a))
    with torch.no_grad():
        critic.learned[0][0].zero_()
    assert not torch.equal(critic.target(x, a), critic(x, a))
    soft_update(*critic.target_and_online(), 1.0)
    assert not any(target.requires_grad for target in critic.target_and_online()[0]), "targets stay constants"
    assert torch.equal(critic.target(x, a), critic(x, a))


def test_critics_see_what_is_loaded_or_moved_beside_them() -> None:
    x, a = torch.rand(4, 5), torch.rand(4, 2)
    critic, others = critic_of(), critic_of(seed=1)

    def check() -> None:
        values, target = critic.with_target(x, a, x, a)
        close([values, target], [critic(x, a), others(x, a).amin(0)])

    critic.target.load_state_dict(others.networks.state_dict())
    check()
    critic.double().float()  # new memory, as by another device
    check()
    with torch.no_grad():
        critic.learned[-1].add_(1.0)
    check()


def test_critics_have_widths_and_normalisation_of_their_own() -> None:
    config = ModelConfig(hidden=(7,), critic=CriticConfig(hidden=(9, 8), activation="relu", norm="layer"))
    critic = make_critic(VECTOR, BOX, HALF_SQUARE, config, 2, 0)
    shapes = [tuple(parameter.shape) for parameter in critic.learned]
    assert shapes[:6] == [(2, 9, 7), (2, 9), (2, 8, 9), (2, 8), (2, 1, 8), (2, 1)]
    assert shapes[6:] == [(2, 9), (2, 9), (2, 8), (2, 8)]
    with pytest.raises(ConfigError, match=r"model.critic.norm=layer: critics have no hidden layer"):
        critic_of(hidden=(), critic=CriticConfig(norm="layer"))


@pytest.mark.parametrize("space", [VECTOR, spaces.Box(0, 255, (1, 36, 36), "uint8")], ids=["vector", "image"])
def test_the_value_network_of_a_policy_has_widths_of_its_own(space: Space) -> None:
    config = ModelConfig(hidden=(5,), image_hidden=(5,), shared=False, critic=CriticConfig(hidden=(7, 6)))
    model: Any = ppo.Config().make_agent(space, BOX, config, 0).model
    assert (model.actor.size, model.critic.size) == (5, 6)


def test_widths_of_critics_of_images_and_actions_are_those_of_their_head() -> None:
    config = ModelConfig(hidden=(8,), image_hidden=(16,), critic=CriticConfig(hidden=(7,)))
    critic = make_critic(spaces.Box(0, 255, (1, 36, 36), "uint8"), BOX, HALF_SQUARE, config, 2, 0)
    widths = [tuple(x.shape[-2:]) for name, x in critic.networks.named_parameters() if x.dim() == 3]
    assert widths == [(7, 18), (1, 7)]
    normalised = ModelConfig(hidden=(), image_hidden=(16,), critic=CriticConfig(norm="layer"))
    make_critic(spaces.Box(0, 255, (1, 36, 36), "uint8"), BOX, HALF_SQUARE, normalised, 2, 0)


def test_clip_bounds_the_targets_of_expected_values_and_quantiles() -> None:
    values, ones = torch.zeros(1, 3, 1), torch.ones(3)
    target, return_ = torch.full((3, 1), 7.0), torch.tensor([-20.0, 0.0, 1.0])
    loss, error = HALF_SQUARE.loss(values, target, return_, ones, clip=5.0)
    assert error.tolist() == [[5.0, 5.0, 5.0]]
    assert loss.tolist() == [[12.5, 12.5, 12.5]]
    _, error = QuantileValue(1, float("inf")).loss(values, target, return_, ones, clip=5.0)
    assert error.tolist() == [[5.0, 5.0, 5.0]]


def test_distributional_targets_are_those_of_the_critic_with_the_least_mean() -> None:
    values = torch.tensor([[[0.0, 4.0]], [[1.0, 1.0]]])  # means 2 and 1
    assert QuantileValue(2).least(values).tolist() == [[1.0, 1.0]]


def rows() -> Transitions:
    return transitions([0.5, -0.5], [0.2, -0.7], [-1.0, 3.0], [0.0, 0.0], [1.0, 2.0])


@pytest.mark.parametrize(
    ("module", "value"),
    [
        (td3, "quantile"),
        (sac, "categorical"),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in ((ddpg, "categorical"), (ddpg, "quantile"), (td3, "categorical"), (sac, "quantile"))
        ),
    ],
    ids=lambda each: each if isinstance(each, str) else each.__name__.rpartition(".")[2],
)
def test_ddpg_td3_and_sac_learn_distributions_to_returns_that_end(module: Any, value: str) -> None:
    """D4PG (Barth-Maron et al. 2018) is DDPG with categorical values."""
    words = {"value": value, "n_atoms": 21, "v_min": -5.0, "v_max": 5.0, "critic_learning_rate": 2e-2}
    algo = learner(module, model={"hidden": (16,), "activation": "tanh"}, **words)
    algo.replay = OneBatch(rows())
    for _ in range(150):
        algo.update()
    q = algo.critic.q(rows().inputs.observation, rows().action)
    close(q, torch.tensor([[-1.0, 3.0]] * len(q)), 0.1)  # terminated: the return is the reward
    close(algo.critic.q(rows().inputs.observation, rows().action), q)


@pytest.mark.parametrize(
    ("module", "words", "message"),
    [
        (ddpg, {"target_clip": 5.0}, "algo.target_clip=5.0 is not for algo.value=categorical"),
        (sac, {"huber_delta": 1.0}, "algo.huber_delta=1.0 is not for algo.value=categorical"),
    ],
)
def test_options_of_other_losses_are_refused(module: Any, words: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        module.Config(value="categorical", **words)


def test_discrete_actions_have_expected_values() -> None:
    with pytest.raises(ConfigError, match=r"algo.value=quantile is for Box actions"):
        sac.Config(value="quantile").make_agent(VECTOR, spaces.Discrete(2))
