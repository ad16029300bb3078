"""Initial weights by rule: their distribution in every layer, and what stays as it was."""

import math
from typing import Any

import pytest
import torch
from gymnasium.spaces import Box, Discrete, Tuple
from torch import Tensor, nn

from rlframe.algos import dqn, ppo, sac
from rlframe.critics import make_critic
from rlframe.critics.values import ExpectedValue
from rlframe.models import ModelConfig
from rlframe.models.network import Linear

VECTOR, ACTION, IMAGE = Box(-1, 1, (200,)), Box(-1, 1, (4,)), Box(0, 255, (4, 84, 84), "uint8")
WIDTH = 300


def networks(**options: Any) -> list[nn.Module]:
    """Of a policy, and of twin critics."""
    model = ModelConfig(hidden=(WIDTH, WIDTH), **options)
    agent = sac.Config().make_agent(VECTOR, ACTION, model, seed=3)
    return [agent.model, make_critic(VECTOR, ACTION, ExpectedValue(), model, 2, 3)]


def weights(*found: nn.Module) -> list[tuple[Tensor, Tensor | None, int, int]]:
    """Weights and biases of all layers with their inputs and outputs."""
    result = []
    for layer in (x for network in found for x in network.modules()):
        if isinstance(layer, nn.Conv2d):
            area = math.prod(layer.kernel_size)
            result.append((layer.weight.detach(), layer.bias, layer.in_channels * area, layer.out_channels * area))
        elif isinstance(layer, Linear | nn.Linear):
            result.append((layer.weight.detach(), layer.bias, layer.weight.shape[-1], layer.weight.shape[-2]))
    return result


@pytest.mark.parametrize("kind", ["lecun", "xavier", "torch"])
@pytest.mark.parametrize("of", ["actor and critics", "policy", "q_values"])
def test_every_layer_has_the_variance_of_the_rule(kind: str, of: str) -> None:
    if of == "actor and critics":
        found = networks(init=kind)
    else:
        module, model = (ppo, ModelConfig(init=kind)) if of == "policy" else (dqn, ModelConfig(init=kind))
        found = [module.Config().make_agent(IMAGE, Discrete(6), model, seed=3).model]
    for weight, bias, n, m in weights(*found):
        variance = {"lecun": 1 / n, "xavier": 2 / (n + m), "torch": 1 / (3 * n)}[kind]
        assert weight.std().item() == pytest.approx(math.sqrt(variance), rel=6 / math.sqrt(2 * weight.numel()))
        largest = {"lecun": 2 / 0.8796 / math.sqrt(n), "xavier": math.sqrt(6 / (n + m)), "torch": 1 / math.sqrt(n)}
        assert weight.abs().max() <= largest[kind] * 1.001
        assert bias is None or bool(bias.any()) == (kind == "torch")


def test_auto_is_the_networks_own_and_seeds_decide_the_others() -> None:
    def same(one: list[nn.Module], other: list[nn.Module]) -> bool:
        pairs = zip(weights(*one), weights(*other), strict=True)
        return all(torch.equal(x[0], y[0]) for x, y in pairs)

    by_torch = 1 / math.sqrt(3)  # of U(-1/√n, 1/√n), of dense layers of actors and critics
    for weight, bias, n, _ in weights(*networks()):
        assert weight.std().item() * math.sqrt(n) == pytest.approx(by_torch, rel=6 / math.sqrt(2 * weight.numel()))
        assert bias is None or bias.any()
    assert same(networks(init="lecun"), networks(init="lecun"))
    assert not same(networks(init="torch"), networks()), "drawn anew"


@pytest.mark.parametrize("kind", ["auto", "lecun", "xavier"])
def test_the_deviation_that_is_an_output_starts_where_it_should(kind: str) -> None:
    model = ModelConfig(hidden=(8,), state_dependent_std=True, log_std=-2.0, init=kind)
    for action in (ACTION, Tuple((ACTION, Discrete(3)))):
        agent = ppo.Config().make_agent(VECTOR, action, model, seed=3)
        head = agent.model.policy_head
        bias = head.heads[0].bias if isinstance(action, Tuple) else head.bias
        torch.testing.assert_close(bias.detach(), torch.tensor([0.0] * 4 + [-2.0] * 4))


def test_critics_differ_and_rows_of_unit_length_stay_so() -> None:
    _, critic = networks(init="lecun", unit_rows=True)
    for weight, *_ in weights(critic):
        assert not torch.equal(weight[0], weight[1])
        assert torch.allclose(weight.norm(dim=-1), torch.ones(()), atol=1e-5)
