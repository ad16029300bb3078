"""Networks: gradients, constants, copies, precision."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from rlframe.kernels.device import has_bf16_units, learning_in
from rlframe.models.network import Network, frozen
from tests.models.compared import close, gradients

needs_units = pytest.mark.skipif(not has_bf16_units(), reason="a CPU without units for bfloat16")


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


def test_copies_learn_for_themselves_and_take_new_weights() -> None:
    network = Network([3, 5, 2], "tanh")
    other, x = copy.deepcopy(network), torch.randn(4, 3)
    other(x).sum().backward()
    assert gradients(network) == [None] * 4
    with torch.no_grad():
        other.linears[0].weight.zero_()
        other.double().float()  # in other memory
        other.linears[0].bias.fill_(1.0)
    close(other(x), torch.ones(4, 5).tanh() @ other.linears[1].weight.T + other.linears[1].bias)
    assert not torch.equal(other(x), network(x))
    other.load_state_dict(network.state_dict())
    assert torch.equal(other(x), network(x))
    assert torch.equal(pickle.loads(pickle.dumps(network))(x), network(x))


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


def test_losses_on_one_network_add_their_gradients() -> None:
    network, x = Network([3, 5, 1], "tanh"), torch.randn(6, 3, requires_grad=True)
    network(x).sum().backward()
    once = [g.clone() for g in gradients(network) if g is not None]
    network(x).sum().backward()
    close(gradients(network), [2 * g for g in once])


@pytest.mark.parametrize(("width", "n"), [(5, 6), (64, 256)], ids=["small", "large"])
def test_gradients_have_gradients_which_are_those_of_torchs_layers(width: int, n: int) -> None:
    network, x = Network([width, width, 1], "tanh"), torch.randn(n, width, requires_grad=True)

    def of_torch(x: Tensor) -> Tensor:
        first, last = network.linears
        return F.linear(F.linear(x, first.weight, first.bias).tanh(), last.weight, last.bias)

    found = []
    for forward in (network, of_torch):
        (of_x,) = torch.autograd.grad(forward(x).sum(), x, create_graph=True)
        found.append(torch.autograd.grad(of_x.square().sum(), [each.weight for each in network.linears]))
    assert all(g.abs().max() > 0.01 for g in found[1])
    close(found[0], found[1], 1e-4)
