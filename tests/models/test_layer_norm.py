"""Layer normalisation stands before the activations of hidden layers, in torch and NumPy, of one network or several."""

import copy

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor, nn

from rlframe.algos.off_policy import soft_update
from rlframe.core.errors import ConfigError
from rlframe.experiment.build import make_agent
from rlframe.experiment.config import from_flat
from rlframe.kernels.mlp import frozen, plain_networks
from rlframe.models import ModelConfig, numpy_inference
from rlframe.models.base import averaged
from rlframe.models.critics import first, make_critics, with_target
from rlframe.models.encoders import HiddenLayers
from rlframe.models.mlp import Mlp, Mlps
from rlframe.models.q_network import Stream

BOX, VECTOR = spaces.Box(-1, 1, (2,), np.float32), spaces.Box(-9, 9, (5,), np.float32)
X = torch.randn(7, 5, generator=torch.Generator().manual_seed(0))


def shuffled(network: nn.Module) -> nn.Module:
    """With random gains and shifts."""
    torch.manual_seed(1)
    for parameter in network.parameters():
        nn.init.normal_(parameter, 0, 0.5)
    return network


def by_hand(x: Tensor, linears: nn.ModuleList, norms: nn.ModuleList, activation: nn.Module, ends: bool) -> Tensor:
    """The usual torch modules."""
    for i, linear in enumerate(linears):
        x = linear(x)
        if i < len(norms):
            x = activation(norms[i](x))
    assert len(norms) == len(linears) - ends
    return x


def close(one: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", [HiddenLayers, Mlp])
def test_networks_and_their_gradients_are_those_of_torchs_modules(kind: type) -> None:
    ends = kind is Mlp
    network = shuffled(Mlp(5, (8, 6), 3, "silu", True) if ends else HiddenLayers(5, (8, 6), "silu", True))
    other = copy.deepcopy(network)
    expected = by_hand(X, other.linears, other.norms, nn.SiLU(), ends)  # type: ignore[arg-type]
    close(network(X), expected)
    with plain_networks():
        close(network(X), expected)
    network(X).square().sum().backward()
    expected.square().sum().backward()
    for one, two in zip(network.parameters(), other.parameters(), strict=True):
        assert one.grad is not None
        assert two.grad is not None
        close(one.grad, two.grad)


@pytest.mark.parametrize("noisy", [False, True])
def test_the_hidden_layer_of_a_stream_is_normalised(noisy: bool) -> None:
    stream = shuffled(Stream(5, (8,), 3, noisy, True))
    hidden, last = stream.layers  # type: ignore[misc]
    inner = hidden(X, 0.0) if noisy else hidden(X)
    inner = stream.norms[0](inner).relu()  # type: ignore[index]
    expected = last(inner, 0.0) if noisy else last(inner)
    close(stream(X, 0.0), expected)
    found = stream.numpy_forward()(X.numpy(), np.zeros((7, 1), np.float32))  # type: ignore[operator]
    close(torch.from_numpy(found), expected.detach())


def test_numpy_computes_it_as_torch_does_and_sees_new_parameters() -> None:
    network = Mlp(5, (8, 6), 3, "tanh", True)
    forward = numpy_inference.mlp(network.layers)
    shuffled(network)
    close(torch.from_numpy(forward(X.numpy())), network(X).detach())
    blocks = X[:6].view(3, 2, 5)
    close(torch.from_numpy(forward(blocks.numpy())), network(blocks).detach())


def test_several_networks_at_once_are_each_of_them_alone() -> None:
    several, target = (shuffled(Mlps(2, 5, (8, 6), 3, "relu", True)) for _ in range(2))
    with torch.no_grad():
        for parameter in target.parameters():
            parameter += 0.1
    x = X.expand(2, -1, -1)
    found, of_target = several.with_target(target, torch.cat([x, x]))  # type: ignore[operator]
    assert not of_target.requires_grad
    for k in range(2):
        alone = Mlp(5, (8, 6), 3, "relu", True)
        joined, norms = several.joined, several.norms  # type: ignore[union-attr]
        with torch.no_grad():
            for own, value in zip(alone.layers.flat, joined, strict=True):  # type: ignore[arg-type]
                own.copy_(value[k])
            for i, norm in enumerate(alone.norms):
                norm.weight.copy_(norms[i][k])  # type: ignore[index,operator]
                norm.bias.copy_(norms[2 + i][k])  # type: ignore[index,operator]
        close(found[k], alone(X))
        assert k or torch.allclose(several.first(X), alone(X), atol=1e-5)  # type: ignore[operator]
    close(of_target, target(x))


def test_critics_are_their_plain_networks_with_a_gradient_to_the_action_alone_when_frozen() -> None:
    critics, target = (make_critics(VECTOR, BOX, ModelConfig(hidden=(8,), layer_norm=True), 2, seed) for seed in (0, 1))
    action = torch.rand(7, 2, requires_grad=True)
    q, next_q = with_target(critics, target, X, action, X, action)
    close(q, critics(X, action))
    close(next_q, target(X, action))
    with frozen(critics.parameters()):
        first(critics, X, action).sum().backward()
    assert action.grad is not None
    assert action.grad.abs().sum() > 0
    assert all(parameter.grad is None for parameter in critics.parameters())


@pytest.mark.parametrize("words", [{}, {"algo": "dqn", "algo.dueling": True}, {"algo": "dqn", "explore": "noisy"}])
def test_every_hidden_layer_has_one_and_the_output_none(words: dict[str, object]) -> None:
    agent = made(words)
    norms = [parameter for name, parameter in agent.named_parameters() if "norms." in name]
    assert len(norms) == (8 if not words else 6 if "algo.dueling" in words else 4)  # gain and shift of each
    assert {len(norm) for norm in norms} == {64}


def made(words: dict[str, object]) -> nn.Module:
    experiment = from_flat({"model.layer_norm": True, **words})
    return make_agent(experiment, VECTOR, spaces.Discrete(2), torch.device("cpu"))


@pytest.mark.parametrize("words", [{"model.hidden": []}, {"model.encoder": "tests.models.moded:Moded"}])
def test_a_network_without_hidden_layers_is_refused(words: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"model.layer_norm=true: this network has no hidden .*; give it some"):
        made(words)


def test_target_networks_follow_gains_and_shifts() -> None:
    critics = make_critics(VECTOR, BOX, ModelConfig(hidden=(8,), layer_norm=True), 2, 0)
    target = copy.deepcopy(critics)
    with torch.no_grad():
        for norm in critics.mlps.norms:
            norm += 1
        soft_update(averaged(target), averaged(critics), 0.5)
    assert [norm.unique().tolist() for norm in target.mlps.norms] == [[1.5], [0.5]]
    q = target(X, torch.zeros(7, 2))
    assert not torch.equal(q, critics(X, torch.zeros(7, 2)))
