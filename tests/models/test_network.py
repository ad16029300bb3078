"""A network is one autograd node whose gradients are those of the plain network."""

import copy
from typing import Any

import pytest
import torch
from gymnasium import Space
from torch import Tensor, nn

from rlframe.algos.optimizer_step import gradients_of
from rlframe.kernels import mlp, numpy_mlp
from rlframe.kernels.device import has_bf16_units, learning_in
from rlframe.kernels.mlp import Layers, frozen, plain_networks, together
from rlframe.models import ModelConfig
from rlframe.models.actor import Actor
from rlframe.models.network import Network
from tests.models.compared import BOX, OBSERVATIONS, close, gradients, observations, same_as_plain

needs_units = pytest.mark.skipif(not has_bf16_units(), reason="a CPU without units for bfloat16")
ACTIVATIONS = ["tanh", "relu", "elu", "silu"]


@pytest.mark.parametrize("hidden", [(), (7,), (7, 6), (7, 6, 5)])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("small", [True, False], ids=["numpy", "torch"])
def test_the_gradients_are_those_of_the_plain_network(
    activation: str, hidden: tuple[int, ...], small: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(numpy_mlp, "LARGE", numpy_mlp.LARGE if small else 0)
    network = Network([4, *hidden, 3], activation)
    x, weight = torch.randn(9, 4, requires_grad=True), torch.randn(9, 3)
    with torch.no_grad():
        _, trace = network.layers.evaluate(x)
    assert isinstance(trace, numpy_mlp.NumpyTrace if small else mlp.Trace)
    same_as_plain(network, lambda own: (own(x) * weight).sum(), x)


def test_size_decides_between_numpy_and_torch() -> None:
    layers = Network([256, 256, 2], "relu").layers
    assert isinstance(layers.evaluate(torch.zeros(8, 256))[1], numpy_mlp.NumpyTrace)
    assert isinstance(layers.evaluate(torch.zeros(256, 256))[1], mlp.Trace)


def test_losses_on_one_network_add_their_gradients() -> None:
    network, x = Network([3, 5, 2], "tanh"), torch.randn(6, 3)
    same_as_plain(network, lambda own: own(x).square().mean() + own(x[:2]).sum() + own(-x).abs().mean())
    (network(x).sum()).backward()
    once = [g.clone() for g in gradients(network) if g is not None]
    (network(x).sum()).backward()
    close(gradients(network), [2 * g for g in once])


def test_a_second_derivative_is_refused_and_plain_networks_give_it() -> None:
    network, x = Network([3, 5, 1], "tanh"), torch.randn(6, 3, requires_grad=True)
    (of_x,) = torch.autograd.grad(network(x.detach().requires_grad_()).sum(), x, allow_unused=True) or (None,)
    assert of_x is None
    with pytest.raises(RuntimeError, match="plain_networks"):
        torch.autograd.grad(network(x).sum(), x, create_graph=True)
    with plain_networks():
        (of_x,) = torch.autograd.grad(network(x).sum(), x, create_graph=True)
        of_x.square().sum().backward()
    assert all(g is None or bool(g.isfinite().all()) for g in gradients(network))
    assert network.linears[0].weight.grad is not None


def test_frozen_parameters_get_no_gradient_and_inputs_do() -> None:
    network, x = Network([3, 5, 2], "relu"), torch.randn(6, 3, requires_grad=True)
    with frozen(network.parameters()):
        y = network(x)
    y.sum().backward()
    assert gradients(network) == [None] * 4
    assert x.grad is not None
    assert all(parameter.requires_grad for parameter in network.parameters())
    network.linears[0].bias.requires_grad_(False)
    network(x).sum().backward()
    assert [g is None for g in gradients(network)] == [False, True, False, False]


def test_networks_that_see_the_same_rows_are_one_node() -> None:
    torch.manual_seed(0)
    both = nn.ModuleList([Network([3, 5, 2], "tanh"), Network([3, 4, 1], "relu")])
    x = torch.randn(4, 6, 3)

    def loss(own: Any) -> Tensor:
        one, other = together(x, own[0].layers, own[1].layers)
        assert one.shape == (4, 6, 2)
        return (one.square().sum() + other.sum()) / 7

    same_as_plain(both, loss)
    one, _ = together(x, both[0].layers, both[1].layers)  # type: ignore[arg-type]
    one.sum().backward()
    assert [g is None for g in gradients(both[1])] == [True] * 4, "the loss does not depend on it"


def test_a_node_keeps_no_memory_once_its_graph_is_gone() -> None:
    import gc
    import weakref

    gc.disable()
    try:
        for network, x in (
            (Network([3, 5, 2], "none"), torch.randn(6, 3)),
            (Network([3, 5, 2], "relu", k=2), torch.randn(2, 6, 3)),
        ):
            y = network(x)
            gone = weakref.ref(y)
            y.sum().backward()
            del y
            assert gone() is None, "a reference cycle would keep it until the garbage collector looks"
    finally:
        gc.enable()


def test_copies_learn_for_themselves() -> None:
    network = Network([3, 5, 2], "tanh")
    other, x = copy.deepcopy(network), torch.randn(4, 3)
    other(x).sum().backward()
    assert gradients(network) == [None] * 4
    with torch.no_grad():
        other.linears[0].weight.zero_()
        other.double().float()  # in other memory
        other.linears[0].bias.fill_(1.0)
    close(other(x), other.layers.plain(x))
    assert not torch.equal(other(x), network(x))


@needs_units
@pytest.mark.parametrize("activation", ["relu", "tanh"])
@pytest.mark.parametrize("k", [1, 2])
def test_in_bfloat16_gradients_are_those_of_float32_but_for_rounding(k: int, activation: str) -> None:
    torch.manual_seed(0)
    network = Network([20, 256, 256, 1], activation, k=k)
    x, weight = torch.randn(k, 256, 20, requires_grad=True), torch.randn(k, 256, 1)
    found = []
    for precision in ("fp32", "bf16"):
        network.zero_grad()
        x.grad = None
        with learning_in(precision):
            y = network(x)
            (y * weight).sum().backward()
        found.append([y.detach(), x.grad, *gradients(network)])
    assert not torch.equal(found[0][1], found[1][1])
    for exact, rounded in zip(*found, strict=True):
        assert rounded.dtype == torch.float32
        assert (rounded - exact).norm() < 0.1 * exact.norm()  # a few units of relu change sides


def test_gradients_lie_in_memory_as_their_parameters() -> None:
    for network, x in (
        (Network([20, 256, 12, 3], "relu"), torch.randn(256, 20)),
        (Network([20, 256, 12, 3], "relu", k=2), torch.randn(2, 256, 20)),
    ):
        network(x).sum().backward()
        for parameter in network.parameters():
            assert parameter.grad is not None
            assert parameter.grad.stride() == parameter.stride()


def test_gradients_in_one_piece_of_memory_are_taken_together_only_if_they_fill_it() -> None:
    memory = torch.ones(5)
    part, rest, other = (nn.Parameter(torch.zeros(n)) for n in (3, 2, 2))
    part.grad, rest.grad, other.grad = memory[:3], memory[3:], torch.full((2,), 7.0)
    assert gradients_of([part, rest])[0] is memory
    assert gradients_of([part])[0] is part.grad
    assert [gradient.tolist() for gradient in gradients_of([part, other])] == [[1, 1, 1], [7, 7]]


@pytest.mark.parametrize("hidden", [(), (7, 6)])
def test_several_networks_at_once_are_each_of_them(hidden: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    several = Network([4, *hidden, 2], "elu", k=3)
    x, weight = torch.randn(3, 9, 4, requires_grad=True), torch.randn(3, 9, 2)
    same_as_plain(several, lambda own: (own(x) * weight).sum(), x)
    for k in range(3):
        places = [{"weight": w.detach()[k], "bias": b.detach()[k]} for w, b in several.layers.parameters]
        alone = Layers(places, several.layers.activations)
        close(several(x)[k].detach(), alone(x[k].detach()))
    close(several.first(x[0]), several(x)[0])


@pytest.mark.parametrize("space", OBSERVATIONS.values(), ids=OBSERVATIONS)
def test_actors_are_their_plain_networks(space: Space) -> None:
    config = ModelConfig(hidden=(7,), image_hidden=(6,), activation="elu", normalize_observation=True)
    torch.manual_seed(0)
    actor, one, other = Actor(space, 4, config, BOX), observations(space, 6), observations(space, 3)
    weight = torch.randn(6, 4)
    actor.norm.update(one)  # type: ignore[union-attr]
    same_as_plain(actor, lambda own: (own(one) * weight).sum())

    def loss(own: Any) -> Tensor:
        params, next_params = own.params_with_next(own.normalized(one), own.normalized(other))
        close([params, next_params], [own(one), own(other)])
        assert not next_params.requires_grad
        return (params * weight).sum()

    same_as_plain(actor, loss)
