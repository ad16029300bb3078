"""Normalisation stands before the activations of hidden layers, in torch and NumPy, of one network or several."""

import copy
import math
from typing import Any

import chz
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor, nn

from rlframe.algos import sac, td3
from rlframe.algos.targets import soft_update
from rlframe.core.errors import ConfigError
from rlframe.critics import ExpectedValue, make_critic
from rlframe.experiment.build import make_agent
from rlframe.experiment.settings import from_flat
from rlframe.models import ModelConfig, numpy_inference
from rlframe.models.base import OF_NORMS, CriticConfig
from rlframe.models.network import BATCH_EPSILON, BATCH_MOMENTUM, Network, Norm, frozen
from rlframe.models.q_network import Stream
from tests.agents.test_own_actor import with_net
from tests.models.compared import close

BOX, VECTOR = spaces.Box(-1, 1, (2,), np.float32), spaces.Box(-9, 9, (5,), np.float32)
X = torch.randn(7, 5, generator=torch.Generator().manual_seed(0))
both_kinds = pytest.mark.parametrize("norm", ["layer", "batch"])


def shuffled(network: nn.Module) -> nn.Module:
    """With random gains, shifts and statistics."""
    torch.manual_seed(1)
    for parameter in network.parameters():
        nn.init.normal_(parameter, 0, 0.5)
    for name, buffer in network.named_buffers():
        nn.init.uniform_(buffer, 0.5 if "variance" in name else -1.0, 2.0)
    return network


def reference(norm: nn.Module, x: Tensor) -> Tensor:
    """torch's own module for rows x [n, size]."""
    size = x.shape[-1]
    if norm.kind == "layer":
        other: nn.Module = nn.LayerNorm(size)
    else:
        other = nn.BatchNorm1d(size, eps=BATCH_EPSILON)
        other.train(torch.is_grad_enabled())
        assert isinstance(norm.mean, Tensor)
        assert isinstance(norm.variance, Tensor)
        other.running_mean, other.running_var = norm.mean.clone(), norm.variance.clone()
    other.weight, other.bias = norm.weight, norm.bias  # type: ignore[assignment]
    found: Tensor = other(x)
    return found


def by_hand(network: nn.Module, x: Tensor, activation: nn.Module) -> Tensor:
    """The usual torch modules."""
    norms = list(network.norms)  # type: ignore[arg-type]
    for i, linear in enumerate(network.linears):  # type: ignore[arg-type]
        x = linear(x)
        if i < len(norms):
            x = activation(reference(norms[i], x))
    return x


@both_kinds
@pytest.mark.parametrize("last", ["none", "silu"])
def test_networks_and_their_gradients_are_those_of_torchs_modules(norm: str, last: str) -> None:
    network, x = shuffled(Network([5, 8, 6, 3], "silu", last, norm)).double(), X.double()
    assert len(network.norms) == (2 if last == "none" else 3)  # type: ignore[arg-type]
    with torch.no_grad():
        close(network(x), by_hand(network, x, nn.SiLU()))
    other = copy.deepcopy(network)
    expected = by_hand(other, x, nn.SiLU())
    found = network(x)
    close(found, expected)
    found.square().sum().backward()
    expected.square().sum().backward()
    for one, two in zip(network.parameters(), other.parameters(), strict=True):
        assert one.grad is not None
        assert two.grad is not None
        close(one.grad, two.grad)
    close(network(x), expected)


def test_batch_statistics_are_used_and_followed_where_the_network_learns_and_nowhere_else() -> None:
    network = Network([5, 8, 3], "relu", norm="batch")
    norm, hidden = network.norms[0], network.linears[0](X)

    def statistics() -> list[Tensor]:
        return [x.clone() for x in (norm.mean, norm.variance)]

    before = statistics()
    with torch.no_grad():
        acting = network(X)
    with frozen(network.parameters()):
        network(X.clone().requires_grad_())
    close(acting, copy.deepcopy(network).requires_grad_(False)(X))
    assert all(map(torch.equal, statistics(), before))
    network(X)
    close(statistics()[0], BATCH_MOMENTUM * hidden.mean(0))
    close(statistics()[1], 1 - BATCH_MOMENTUM + BATCH_MOMENTUM * hidden.var(0, correction=0))
    normalized = norm(hidden)
    close(normalized.mean(0), torch.zeros(8))


def test_in_eval_mode_a_network_uses_running_statistics_though_it_learns() -> None:
    network = shuffled(Network([5, 8, 3], "relu", norm="batch"))
    with torch.no_grad():
        expected = network(X)
    before = {name: x.clone() for name, x in network.named_buffers()}
    network.eval()
    close(network(X), expected)
    exported = torch.export.export(network, (X,)).module()
    close(exported(X), expected)
    parameters = {name: x.detach() for name, x in network.named_parameters()}
    torch.func.grad(lambda p: torch.func.functional_call(network, p, (X,)).sum())(parameters)
    assert all(torch.equal(x, before[name]) for name, x in network.named_buffers())


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_a_batch_that_is_not_finite_leaves_the_running_statistics_as_they_are(wrong: float) -> None:
    network = Network([5, 8, 3], "relu", norm="batch")
    network(X)
    before = [x.clone() for x in network.buffers()]
    network(torch.full_like(X, wrong))
    assert all(map(torch.equal, network.buffers(), before))


@both_kinds
@pytest.mark.parametrize("noisy", [False, True])
def test_the_hidden_layer_of_a_stream_is_normalised(noisy: bool, norm: str) -> None:
    stream = shuffled(Stream([5, 8, 3], noisy, norm, "silu"))
    (hidden, last), of_hidden = stream.network.linears, stream.network.norms[0]  # type: ignore[union-attr,misc,index]
    with torch.no_grad():
        inner = hidden(X, 0.0) if noisy else hidden(X)
        inner = nn.functional.silu(reference(of_hidden, inner))
        expected = last(inner, 0.0) if noisy else last(inner)
        close(stream(X, 0.0), expected)
    found = stream.numpy_forward()(X.numpy(), np.zeros((7, 1), np.float32))  # type: ignore[operator]
    close(torch.from_numpy(found), expected)


@both_kinds
def test_numpy_computes_it_as_torch_does_and_sees_new_parameters(norm: str) -> None:
    network = Network([5, 8, 6, 3], "tanh", norm=norm)
    forward = numpy_inference.mlp(network.layers)
    shuffled(network)
    blocks = X[:6].view(3, 2, 5)
    with torch.no_grad():
        close(torch.from_numpy(forward(X.numpy())), network(X))
        close(torch.from_numpy(forward(blocks.numpy())), network(blocks))
    network(X)  # moves the statistics
    with torch.no_grad():
        close(torch.from_numpy(forward(X.numpy())), network(X))


@both_kinds
def test_several_networks_at_once_are_each_of_them_alone(norm: str) -> None:
    several: Any = shuffled(Network([5, 8, 6, 3], "relu", norm=norm, k=2))
    x, state = X.expand(2, -1, -1), copy.deepcopy(several.state_dict())
    found = several(x)
    for k in range(2):
        alone = Network([5, 8, 6, 3], "relu", norm=norm)
        alone.load_state_dict({name: value[k] for name, value in state.items()})
        close(found[k], alone(X))
    with torch.no_grad():
        close(several.first(X), several(x)[0])


def test_critics_have_a_gradient_to_the_action_alone_when_frozen() -> None:
    critic = make_critic(VECTOR, BOX, ExpectedValue(), ModelConfig(hidden=(8,), norm="layer"), 2, 0)
    action = torch.rand(7, 2, requires_grad=True)
    with frozen(critic.learned):
        critic.first_q(X, action).sum().backward()
    assert action.grad is not None
    assert action.grad.abs().sum() > 0
    assert all(parameter.grad is None for parameter in critic.parameters())


@pytest.mark.parametrize("words", [{}, {"algo": "dqn", "algo.dueling": True}, {"algo": "dqn", "explore": "noisy"}])
def test_every_hidden_layer_has_one_and_the_output_none(words: dict[str, object]) -> None:
    agent = made(words)
    norms = [parameter for name, parameter in agent.named_parameters() if "norms." in name]
    assert len(norms) == (8 if not words else 6 if "algo.dueling" in words else 4)  # gain and shift of each
    assert {len(norm) for norm in norms} == {64}


def made(words: dict[str, object]) -> nn.Module:
    experiment = from_flat({"model.norm": "layer", **words})
    return make_agent(experiment, VECTOR, spaces.Discrete(2), torch.device("cpu"))


def test_a_network_of_ones_own_may_name_its_normalisations_as_it_likes() -> None:
    experiment = chz.replace(from_flat({"algo": "td3", "model.norm": "layer"}), algo=with_net(td3)())
    one = spaces.Box(-1, 1, (1,), np.float32)
    agent = make_agent(experiment, one, one, torch.device("cpu"))
    assert not any("norms" in name for name, _ in agent.named_parameters())


@pytest.mark.parametrize("words", [{"model.hidden": []}, {"model.encoder": "tests.models.moded:Moded"}])
def test_a_network_without_hidden_layers_is_refused(words: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"model.norm=layer: this network has no hidden .*; give it some"):
        made(words)


@pytest.mark.parametrize("name", OF_NORMS)
def test_policies_alone_may_be_normalised(name: str) -> None:
    model = ModelConfig(hidden=(8,), norm="layer", critic=CriticConfig(norm="none"), **{name: True})
    critic = make_critic(VECTOR, BOX, ExpectedValue(), model, 2, 0)
    assert not any(isinstance(module, Norm) for module in critic.modules())
    policy = sac.Config().make_agent(VECTOR, BOX, model).model
    assert any(isinstance(module, Norm) for module in policy.modules())


@both_kinds
def test_target_networks_follow_gains_shifts_and_statistics(norm: str) -> None:
    critic = make_critic(VECTOR, BOX, ExpectedValue(), ModelConfig(hidden=(8,), norm=norm), 2, 0)
    networks, target = critic.networks.network, critic.target.network
    with torch.no_grad():
        for x in (*networks.norms.parameters(), *networks.norms.buffers()):  # type: ignore[union-attr]
            x += 1
        soft_update(*critic.target_and_online(), 0.5)
    values = [x.unique().tolist() for x in (*target.norms.parameters(), *target.norms.buffers())]  # type: ignore[union-attr]
    assert values == [[1.5], [0.5], [0.5], [1.5]][: 4 if norm == "batch" else 2]


@pytest.mark.parametrize("k", [0, 3])
def test_inputs_far_from_0_are_normalised_from_the_first_batch(k: int) -> None:
    x = 1e5 + torch.randn(*([k] if k else []), 256, 4, generator=torch.Generator().manual_seed(0))
    exact = x.double() - x.double().mean(-2, keepdim=True)
    expected = exact / (exact.square().mean(-2, keepdim=True) + BATCH_EPSILON).sqrt()
    torch.testing.assert_close(Norm("batch", 4, k)(x), expected.float(), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("k", [0, 3])
def test_a_batch_of_no_rows_changes_no_statistics(k: int) -> None:
    norm = Norm("batch", 4, k)
    before = norm.mean.clone()
    assert norm(torch.zeros(*([k] if k else []), 0, 4)).shape[-2:] == (0, 4)
    assert torch.equal(norm.mean, before)
