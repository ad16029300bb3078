"""A network is one autograd node whose gradients are those of the plain network."""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import Space, spaces
from torch import Tensor, nn

from rlframe.algos.optimizer_step import gradients_of
from rlframe.core.spaces import zeros
from rlframe.core.struct import map_tree
from rlframe.kernels import mlp, numpy_mlp
from rlframe.kernels.device import has_bf16_units, learning_in
from rlframe.kernels.mlp import Layers, frozen, plain_networks, together
from rlframe.models import ModelConfig
from rlframe.models.actor import Actor
from rlframe.models.critics import Critics, first, make_critics, make_discrete_critics, with_target
from rlframe.models.mlp import Mlp, Mlps
from rlframe.ops.fused import soft_objective

needs_units = pytest.mark.skipif(not has_bf16_units(), reason="a CPU without units for bfloat16")
ACTIVATIONS = ["tanh", "relu", "elu", "silu"]
BOX = spaces.Box(-1, 1, (2,), np.float32)
VECTOR, IMAGE = spaces.Box(-9, 9, (5,), np.float32), spaces.Box(0, 255, (12, 12, 3), np.uint8)
MIXED = spaces.Dict({"image": IMAGE, "place": VECTOR, "which": spaces.Discrete(3)})
OBSERVATIONS = {"vector": VECTOR, "image": IMAGE, "dict": MIXED}


def close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def observations(space: Space, n: int) -> Any:
    generator = torch.Generator().manual_seed(0)

    def fill(x: np.ndarray) -> Tensor:
        drawn = torch.rand(x.shape, generator=generator)
        return drawn if x.dtype.kind == "f" else (drawn * 2.99).to(torch.from_numpy(x).dtype)

    return map_tree(fill, zeros(space, (n,)))


def gradients(module: nn.Module) -> list[Tensor | None]:
    return [parameter.grad for parameter in module.parameters()]


def same_as_plain(module: nn.Module, loss: Callable[[nn.Module], Tensor], *inputs: Tensor) -> None:
    """The loss and all gradients, on the fast path and inside plain_networks()."""
    found = []
    for fast in (True, False):
        own = copy.deepcopy(module)
        for x in inputs:
            x.grad = None
        if fast:
            value = loss(own)
            value.backward()
        else:
            with plain_networks():
                value = loss(own)
                value.backward()
        found.append([value.detach(), *gradients(own), *(x.grad for x in inputs)])
    close(found[0], found[1])
    assert any(x is not None and bool(x.any()) for x in found[0][1:])


@pytest.mark.parametrize("hidden", [(), (7,), (7, 6), (7, 6, 5)])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("small", [True, False], ids=["numpy", "torch"])
def test_the_gradients_are_those_of_the_plain_network(
    activation: str, hidden: tuple[int, ...], small: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(numpy_mlp, "LARGE", numpy_mlp.LARGE if small else 0)
    network, x, weight = Mlp(4, hidden, 3, activation), torch.randn(9, 4, requires_grad=True), torch.randn(9, 3)
    with torch.no_grad():
        _, trace = network.layers.evaluate(x)
    assert isinstance(trace, numpy_mlp.NumpyTrace if small else mlp.Trace)
    same_as_plain(network, lambda own: (own(x) * weight).sum(), x)


def test_size_decides_between_numpy_and_torch() -> None:
    layers = Mlp(256, (256,), 2, "relu").layers
    assert isinstance(layers.evaluate(torch.zeros(8, 256))[1], numpy_mlp.NumpyTrace)
    assert isinstance(layers.evaluate(torch.zeros(256, 256))[1], mlp.Trace)


def test_losses_on_one_network_add_their_gradients() -> None:
    network, x = Mlp(3, (5,), 2, "tanh"), torch.randn(6, 3)
    same_as_plain(network, lambda own: own(x).square().mean() + own(x[:2]).sum() + own(-x).abs().mean())
    (network(x).sum()).backward()
    once = [g.clone() for g in gradients(network) if g is not None]
    (network(x).sum()).backward()
    close(gradients(network), [2 * g for g in once])


def test_a_second_derivative_is_refused_and_plain_networks_give_it() -> None:
    network, x = Mlp(3, (5,), 1, "tanh"), torch.randn(6, 3, requires_grad=True)
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
    network, x = Mlp(3, (5,), 2, "relu"), torch.randn(6, 3, requires_grad=True)
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
    both = nn.ModuleList([Mlp(3, (5,), 2, "tanh"), Mlp(3, (4,), 1, "relu")])
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
            (Mlp(3, (5,), 2, "none"), torch.randn(6, 3)),
            (Mlps(2, 3, (5,), 2, "relu"), torch.randn(2, 6, 3)),
        ):
            y = network(x)
            gone = weakref.ref(y)
            y.sum().backward()
            del y
            assert gone() is None, "a reference cycle would keep it until the garbage collector looks"
    finally:
        gc.enable()


def test_copies_learn_for_themselves() -> None:
    network = Mlp(3, (5,), 2, "tanh")
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
    network = Mlps(k, 20, (256, 256), 1, activation)
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
        (Mlp(20, (256, 12), 3, "relu"), torch.randn(256, 20)),
        (Mlps(2, 20, (256, 12), 3, "relu"), torch.randn(2, 256, 20)),
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
    several, x, weight = Mlps(3, 4, hidden, 2, "elu"), torch.randn(3, 9, 4, requires_grad=True), torch.randn(3, 9, 2)
    same_as_plain(several, lambda own: (own(x) * weight).sum(), x)
    for k in range(3):
        alone = Layers(
            [(w.detach()[k], b.detach()[k]) for w, b in several.layers.parameters], several.layers.activations
        )
        close(several(x)[k].detach(), alone(x[k].detach()))
    close(several.first(x[0]), several(x)[0])


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_least_of_several_has_the_gradient_of_the_one_that_is(activation: str) -> None:
    torch.manual_seed(0)
    critics = Critics(VECTOR, BOX, ModelConfig(hidden=(7, 6), activation=activation), 3)  # type: ignore[arg-type]
    with torch.no_grad():
        critics.mlps.joined[-1].zero_()
    x, action = 3 * torch.randn(40, 5), torch.randn(40, 2, requires_grad=True)
    q = critics(x, action)
    assert len(q.min(0).indices.unique()) == 3
    (expected,) = torch.autograd.grad(q.amin(0).sum(), action)
    critics.zero_grad()
    with frozen(critics.parameters()):
        soft_objective(critics(x, action), torch.zeros(40), torch.tensor(0.0))[0].backward()
    close(-40 * action.grad, expected)
    assert all(g is None for g in gradients(critics)), "constant here"


@pytest.mark.parametrize("space", OBSERVATIONS.values(), ids=OBSERVATIONS)
def test_critics_with_target_are_both_evaluated_apart(space: Space) -> None:
    critics = make_critics(space, BOX, ModelConfig(hidden=(7,), image_hidden=(6,), activation="relu"), 2, 0)
    observation, action, weight = observations(space, 6), torch.rand(6, 2), torch.randn(2, 6)
    after, next_action = map_tree(lambda x: x.flip(0), observation), torch.rand(6, 2)
    target = copy.deepcopy(critics).requires_grad_(False)
    with torch.no_grad():
        for parameter in critics.parameters():
            parameter += 0.1 * torch.randn(parameter.shape)

    def loss(own: nn.Module) -> Tensor:
        q, next_q = with_target(own, target, observation, action, after, next_action)
        close([q, next_q], [own(observation, action), target(after, next_action)])
        assert not next_q.requires_grad
        return (q * weight).sum() + (q * next_q).mean()

    same_as_plain(critics, loss)
    assert all(g is None for g in gradients(target))

    moved = action.clone().requires_grad_()
    (expected,) = torch.autograd.grad(critics(observation, moved)[0].sum(), moved)
    critics.zero_grad()
    with frozen(critics.parameters()):
        first(critics, observation, moved).sum().backward()
    close(moved.grad, expected)
    assert all(g is None for g in gradients(critics)), "constant here"


def test_critics_of_ones_own_are_evaluated_as_they_are() -> None:
    class Sums(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor([[1.0], [2.0]]))

        def forward(self, observation: Tensor, action: Tensor) -> Tensor:
            return self.scale * (observation.sum(-1) + action.sum(-1))

    critics, x, a = Sums(), torch.ones(3, 5), torch.zeros(3, 2, requires_grad=True)
    target = copy.deepcopy(critics).requires_grad_(False)
    q, next_q = with_target(critics, target, x, a.detach(), -x, a.detach())
    close(q.tolist(), [[5.0] * 3, [10.0] * 3])
    close(next_q.tolist(), [[-5.0] * 3, [-10.0] * 3])
    with frozen(critics.parameters()):
        first(critics, x, a).sum().backward()
    assert a.grad is not None
    close(a.grad, torch.ones(3, 2))
    assert critics.scale.grad is None


@pytest.mark.parametrize("space", OBSERVATIONS.values(), ids=OBSERVATIONS)
def test_actors_and_discrete_critics_are_their_plain_networks(space: Space) -> None:
    config = ModelConfig(hidden=(7,), image_hidden=(6,), activation="elu", normalize_observation=True)
    torch.manual_seed(0)
    actor, one, other = Actor(space, 4, config), observations(space, 6), observations(space, 3)
    weight = torch.randn(6, 4)
    actor.norm.update(one)  # type: ignore[union-attr]
    same_as_plain(actor, lambda own: (own(one) * weight).sum())

    def loss(own: Any) -> Tensor:
        params, next_params = own.params_with_next(own.normalized(one), own.normalized(other))
        close([params, next_params], [own(one), own(other)])
        assert not next_params.requires_grad
        return (params * weight).sum()

    same_as_plain(actor, loss)
    critics = make_discrete_critics(space, spaces.Discrete(4), config, 2, 0)
    same_as_plain(critics, lambda own: (own(one) * torch.ones(2, 6, 4)).square().mean())


def test_critics_differ_from_each_other_and_copies_do_not() -> None:
    critics = make_critics(VECTOR, BOX, ModelConfig(), 2, 0)
    q = critics(torch.rand(5, 5), torch.rand(5, 2))
    assert not torch.allclose(q[0], q[1], atol=1e-3)
    target = copy.deepcopy(critics).requires_grad_(False)
    with torch.no_grad():
        critics.mlps.joined[0][0].zero_()
    assert not torch.equal(target(torch.ones(1, 5), torch.ones(1, 2)), critics(torch.ones(1, 5), torch.ones(1, 2)))


def test_critics_see_what_is_loaded_or_moved_beside_them() -> None:
    x, a = torch.rand(4, 5), torch.rand(4, 2)
    critics, others = (make_critics(VECTOR, BOX, ModelConfig(), 2, seed) for seed in (0, 1))
    target = copy.deepcopy(critics).requires_grad_(False)

    def check() -> None:
        q, next_q = with_target(critics, target, x, a, x, a)
        close([q, next_q], [critics(x, a), others(x, a)])

    target.load_state_dict(others.state_dict())
    check()
    critics.double().float()  # new memory, as by another device
    check()
    with torch.no_grad():
        critics.mlps.joined[-1].add_(1.0)
    check()
