"""A network is parameters and buffers read at each call, so that torch.func reaches rlframe's own networks."""

import math
from typing import Any

import pytest
import torch
from gymnasium import spaces
from torch import Tensor
from torch.func import functional_call, grad, stack_module_state, vmap

from rlframe.algos import ppo, sac
from rlframe.critics import ExpectedValue, make_critic
from rlframe.models import ModelConfig
from rlframe.models.network import Network
from tests.algos.learners import inputs_at
from tests.models.compared import BOX, VECTOR, close

X, ACTION = torch.randn(6, 5), torch.rand(6, 2)


@pytest.mark.parametrize("norm", ["none", "layer", "batch"])
def test_two_stacked_critics_are_the_two(norm: str) -> None:
    config = ModelConfig(hidden=(8, 7), activation="relu", norm=norm)
    critics = [make_critic(VECTOR, BOX, ExpectedValue(), config, 2, seed).networks for seed in (0, 1)]
    parameters, buffers = stack_module_state(critics)  # type: ignore[arg-type]

    def values(parameters: Any, buffers: Any) -> Tensor:
        found: Tensor = functional_call(critics[0], (parameters, buffers), (X, ACTION))
        return found

    with torch.no_grad():
        found = vmap(values)(parameters, buffers)
        close(found, torch.stack([critic(X, ACTION) for critic in critics]))
    assert not torch.allclose(found[0], found[1])


@pytest.mark.parametrize("norm", ["none", "layer", "batch"])
def test_gradients_of_stacked_critics_are_those_of_each(norm: str) -> None:
    networks = [Network([5, 8, 1], "relu", norm=norm) for _ in range(2)]
    parameters, buffers = stack_module_state(networks)  # type: ignore[arg-type]

    def loss(parameters: Any, buffers: Any) -> Tensor:
        found: Tensor = functional_call(networks[0], (parameters, buffers), (X,))
        return found.square().sum()

    found = vmap(grad(loss))(parameters, buffers)
    for i, network in enumerate(networks):
        network(X).square().sum().backward()
        for name, parameter in network.named_parameters():
            assert parameter.grad is not None
            close(found[name][i], parameter.grad)


@pytest.mark.parametrize("norm", ["none", "layer", "batch"])
@pytest.mark.parametrize("n", [6, 300], ids=["small", "large"])
def test_stacked_networks_learn_as_each_of_them(norm: str, n: int) -> None:
    networks = [Network([5, 64, 64, 1], "relu", norm=norm) for _ in range(2)]
    parameters, buffers = stack_module_state(networks)  # type: ignore[arg-type]
    x = torch.randn(n, 5)

    def values(parameters: Any, buffers: Any) -> Tensor:
        found: Tensor = functional_call(networks[0], (parameters, buffers), (x,))
        return found

    found = vmap(values)(parameters, buffers)
    found.square().mean((1, 2)).sum().backward()
    for i, network in enumerate(networks):
        y = network(x)
        close(found[i], y)
        y.square().mean().backward()
        for name, parameter in network.named_parameters():
            close(parameters[name].grad[i], parameter.grad)
        for name, buffer in network.named_buffers():
            close(buffers[name][i], buffer)


@pytest.mark.parametrize("norm", ["none", "layer", "batch"])
def test_a_gradient_of_a_large_networks_gradient_exists(norm: str) -> None:
    network, x = Network([64, 64, 64, 1], "tanh", norm=norm), torch.randn(256, 64, requires_grad=True)
    (of_x,) = torch.autograd.grad(network(x).sum(), x, create_graph=True)
    of_x.square().sum().backward()
    assert all(parameter.grad is not None for parameter in network.linears[:-1].parameters() if parameter.dim() == 2)


@pytest.mark.parametrize("module", [ppo, sac], ids=["ppo", "sac"])
def test_other_parameters_reach_agents_without_any_mode(module: Any) -> None:
    one, other = (module.Config().make_agent(VECTOR, BOX, ModelConfig(hidden=(8,)), seed) for seed in (0, 1))
    arguments = (inputs_at(X), ()) if module is ppo else (X,)
    found = functional_call(one.model, dict(other.model.named_parameters()), arguments)
    expected = other.model(*arguments)
    first, second = (x[0] if module is ppo else x for x in (found, expected))
    close(first, second)
    assert not torch.allclose(first, (one.model(*arguments)[0] if module is ppo else one.model(*arguments)))
    first.sum().backward()
    assert all(parameter.grad is None for parameter in one.model.parameters()), "the gradient is the others'"


def test_an_update_of_critics_is_a_pure_function_of_parameters_and_a_batch() -> None:
    critic = make_critic(VECTOR, spaces.Box(-1, 1, (2,)), ExpectedValue(math.inf), ModelConfig(hidden=(8,)), 2, 0)
    parameters = {name: x.detach() for name, x in critic.networks.named_parameters()}

    def loss(parameters: Any, y: Tensor) -> Tensor:
        found: Tensor = functional_call(critic.networks, parameters, (X, ACTION))
        return 0.5 * (found.squeeze(-1) - y).square().mean(-1).sum()

    found = grad(loss)(parameters, torch.ones(6))
    values = critic(X, ACTION)
    critic.loss(values, torch.ones(6, 1), torch.zeros(6), _Batch(), math.inf).backward()
    for name, parameter in critic.networks.named_parameters():
        close(found[name], parameter.grad)


class _Batch:
    bootstrap, weight = torch.ones(6), torch.ones(6)
