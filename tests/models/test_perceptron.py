"""The gradients that are written out are autograd's."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import Space, spaces

from rlframe.core.spaces import zeros
from rlframe.core.struct import map_tree
from rlframe.kernels.precision import has_bf16_units, learning_in
from rlframe.models import ModelConfig
from rlframe.models.actor import Actor
from rlframe.models.critics import make_critics, make_discrete_critics
from rlframe.models.perceptron import Perceptron, Perceptrons, least, least_to_input
from rlframe.ops.squashed import squashed_gradient, squashed_sample

needs_units = pytest.mark.skipif(not has_bf16_units(), reason="a CPU without units for bfloat16")
ACTIVATIONS = ["tanh", "relu", "elu", "silu"]
VECTOR, IMAGE = spaces.Box(-9, 9, (5,), np.float32), spaces.Box(0, 255, (12, 12, 3), np.uint8)
MIXED = spaces.Dict({"image": IMAGE, "place": VECTOR, "which": spaces.Discrete(3)})
OBSERVATIONS = {"vector": VECTOR, "image": IMAGE, "dict": MIXED}


def close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def observations(space: Space, n: int) -> Any:
    generator = torch.Generator().manual_seed(0)

    def fill(x: np.ndarray) -> torch.Tensor:
        drawn = torch.rand(x.shape, generator=generator)
        return drawn if x.dtype.kind == "f" else (drawn * 2.99).to(torch.from_numpy(x).dtype)

    return map_tree(fill, zeros(space, (n,)))


@pytest.mark.parametrize("hidden", [(), (7,), (7, 6), (7, 6, 5)])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_pass_gives_the_gradients_of_autograd(activation: str, hidden: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    network = Perceptron(4, hidden, 3, activation)
    plain = copy.deepcopy(network)
    x, gradient = torch.randn(9, 4, requires_grad=True), torch.randn(9, 3)
    (plain(x) * gradient).sum().backward()
    for _ in range(2):  # gradients are set, not added up
        found = network.run(x.detach())
        close(found.output, plain(x).detach())
        close(network.run(x.detach()).to_input(gradient.clone()), x.grad)
        close(found.to_all(gradient.clone()), x.grad)
        for one, other in zip(network.parameters(), plain.parameters(), strict=True):
            close(one.grad, other.grad)


@needs_units
@pytest.mark.parametrize("activation", ["relu", "tanh"])
@pytest.mark.parametrize("k", [1, 2])
def test_in_bfloat16_gradients_are_those_of_float32_but_for_rounding(k: int, activation: str) -> None:
    torch.manual_seed(0)
    network = Perceptrons(k, 20, (256, 256), 1, activation)
    x, gradient = torch.randn(k, 256, 20), torch.randn(k, 256, 1)
    found = []
    for precision in ("fp32", "bf16"):
        with learning_in(precision):
            run = network.run(x)
            of_input = run.to_all(gradient.clone())
        found.append([run.output, of_input, *(parameter.grad for parameter in network.parameters())])
    assert not torch.equal(found[0][1], found[1][1])
    for exact, rounded in zip(*found, strict=True):
        assert rounded.dtype == torch.float32
        assert (rounded - exact).norm() < 0.1 * exact.norm()  # a few units of relu change sides


def test_gradients_lie_in_memory_as_their_parameters() -> None:
    for network, x in (
        (Perceptron(20, (256, 12), 3, "relu"), torch.randn(256, 20)),
        (Perceptrons(2, 20, (256, 12), 3, "relu"), torch.randn(2, 256, 20)),
    ):
        network.run(x).to_parameters(torch.randn(*x.shape[:-1], 3))
        for parameter in network.parameters():
            assert parameter.grad is not None
            assert parameter.grad.stride() == parameter.stride()


@pytest.mark.parametrize("hidden", [(), (7, 6)])
def test_several_networks_at_once_are_each_of_them(hidden: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    several = Perceptrons(3, 4, hidden, 2, "elu")
    x, gradient = torch.randn(3, 9, 4), torch.randn(3, 9, 2)
    found = several.run(x)
    of_input = found.to_all(gradient.clone())
    for k in range(3):
        alone = Perceptron(4, hidden, 2, "elu")
        with torch.no_grad():
            for own, given in zip(alone.layers, several[k].layers, strict=True):
                for parameter, value in zip(own, given, strict=True):
                    parameter.copy_(value)
        run = alone.run(x[k])
        close(found.output[k], run.output)
        close(of_input[k], run.to_all(gradient[k].clone()))
        for own, (weight, bias) in zip(alone.layers, several.stack.layers, strict=True):
            close([weight.grad[k], bias.grad[k]], [each.grad for each in own])  # type: ignore[index]


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_least_of_several_gives_the_gradient_of_autograd(activation: str) -> None:
    torch.manual_seed(0)
    networks = Perceptrons(3, 4, (7, 6), 1, activation)
    with torch.no_grad():
        networks.joined[-1].zero_()
    x, gradient = (3 * torch.randn(40, 4)).requires_grad_(), torch.randn(40)
    value = networks(x.expand(3, -1, -1)).squeeze(-1).amin(0)
    (value * gradient).sum().backward()
    run = networks.run(x.detach().expand(3, -1, -1))
    found, which = least(run)
    assert len(which.unique()) == 3
    close(found, value.detach())
    close(least_to_input(run, which, gradient), x.grad)


def test_a_network_that_never_has_the_least_changes_nothing() -> None:
    networks = Perceptrons(2, 2, (4,), 1, "relu")
    with torch.no_grad():
        networks.joined[-1][1].fill_(100.0)
    x, gradient = torch.randn(5, 2), torch.ones(5)
    run = networks.run(x.expand(2, -1, -1))
    _, which = least(run)
    close(least_to_input(run, which, gradient), networks[0].run(x).to_input(gradient.unsqueeze(-1)))


@pytest.mark.parametrize("space", OBSERVATIONS.values(), ids=OBSERVATIONS)
def test_critics_give_the_gradients_of_autograd_encoders_and_all(space: Space) -> None:
    box = spaces.Box(-1, 1, (2,), np.float32)
    critics = make_critics(space, box, ModelConfig(hidden=(7,), image_hidden=(6,), activation="relu"), 2, 0)
    target = critics.make_target()
    with torch.no_grad():
        for parameter in critics.parameters():
            parameter += 0.1 * torch.randn(parameter.shape)
    plain, plain_target = copy.deepcopy(critics), copy.deepcopy(target)
    observation, action, gradient = observations(space, 6), torch.rand(6, 2, requires_grad=True), torch.randn(2, 6)
    after, next_action = map_tree(lambda x: x.flip(0), observation), torch.rand(6, 2)
    (plain(observation, action) * gradient).sum().backward()
    for _ in range(2):
        run, next_q = critics.run_beside(target, observation, action.detach(), after, next_action)
        run.to_parameters(gradient)
        close(run.q, plain(observation, action).detach())
        close(next_q, plain_target(after, next_action))
    assert all(parameter.grad is None for parameter in target.parameters())
    for one, other in zip(critics.parameters(), plain.parameters(), strict=True):
        close(one.grad, other.grad)

    before = [parameter.grad.clone() for parameter in critics.parameters()]
    for found, expected in (
        (critics.least(observation, action.detach()), plain(observation, action).amin(0)),
        (critics.first(observation, action.detach()), plain(observation, action)[0]),
    ):
        (of_action,) = torch.autograd.grad(expected.sum(), action)
        close(found.q, expected.detach())
        close(found.to_action(torch.ones(6)), of_action)
    assert all(torch.equal(p.grad, b) for p, b in zip(critics.parameters(), before, strict=True)), "constant here"


@pytest.mark.parametrize("space", OBSERVATIONS.values(), ids=OBSERVATIONS)
def test_actors_and_discrete_critics_give_the_gradients_of_autograd(space: Space) -> None:
    config = ModelConfig(hidden=(7,), image_hidden=(6,), activation="elu", normalize_observation=True)
    torch.manual_seed(0)
    actor, observation, gradient = Actor(space, 4, config), observations(space, 6), torch.randn(6, 4)
    actor.norm.update(observation)  # type: ignore[union-attr]
    plain = copy.deepcopy(actor)
    (plain(observation) * gradient).sum().backward()
    actor.run(actor.normalized(observation)).to_parameters(gradient)
    for one, other in zip(actor.parameters(), plain.parameters(), strict=True):
        close(one.grad, other.grad)
    critics = make_discrete_critics(space, 4, config, 2, 0)
    for network, q in zip(critics.run(observation), critics(observation), strict=True):
        close(network.output, q.detach())


def test_critics_differ_from_each_other_and_copies_do_not() -> None:
    box = spaces.Box(-1, 1, (2,), np.float32)
    critics = make_critics(VECTOR, box, ModelConfig(), 2, 0)
    q = critics(torch.rand(5, 5), torch.rand(5, 2))
    assert not torch.allclose(q[0], q[1], atol=1e-3)
    target = copy.deepcopy(critics).requires_grad_(False)
    with torch.no_grad():
        critics.perceptrons.joined[0][0].zero_()
    assert not torch.equal(target(torch.ones(1, 5), torch.ones(1, 2)), critics(torch.ones(1, 5), torch.ones(1, 2)))


def test_critics_see_what_is_loaded_or_moved_beside_them() -> None:
    box, x, a = spaces.Box(-1, 1, (2,), np.float32), torch.rand(4, 5), torch.rand(4, 2)
    critics, others = (make_critics(VECTOR, box, ModelConfig(), 2, seed) for seed in (0, 1))
    target = critics.make_target()
    target.load_state_dict(others.state_dict())
    close(critics.run_beside(target, x, a, x, a)[1], others(x, a).detach())
    critics.double().float()  # new memory, as by another device
    close(critics.run_beside(target, x, a, x, a)[0].q, critics(x, a).detach())
    with torch.no_grad():
        critics.perceptrons.joined[-1].add_(1.0)
    close(critics.run_beside(target, x, a, x, a)[0].q, critics(x, a).detach())
    close(critics.run_beside(target, x, a, x, a)[1], others(x, a).detach())


def test_an_actor_sees_two_batches_at_once_and_learns_from_the_first() -> None:
    for space in OBSERVATIONS.values():
        actor = Actor(space, 4, ModelConfig(hidden=(7,), image_hidden=(6,), activation="elu"))
        one, other, gradient = observations(space, 6), observations(space, 3), torch.randn(6, 4)
        actor.run(one).to_parameters(gradient.clone())
        expected = [parameter.grad.clone() for parameter in actor.parameters()]
        run, params = actor.run_beside(one, other)
        close(params, torch.cat([actor(one), actor(other)]).detach())
        run.to_parameters(gradient.clone())
        for parameter, of_parameter in zip(actor.parameters(), expected, strict=True):
            close(parameter.grad, of_parameter)


def test_the_squashed_normal_gives_the_gradients_of_autograd() -> None:
    torch.manual_seed(0)
    mean, log_std = ((0.5 * torch.randn(30, 3, dtype=torch.float64)).requires_grad_() for _ in range(2))
    noise, of_action = torch.randn(30, 3).double(), torch.randn(30, 3).double()
    of_log_prob = torch.tensor(0.7)
    normal = torch.distributions.Normal(mean, log_std.exp())
    raw = mean + log_std.exp() * noise
    log_prob = (normal.log_prob(raw) - torch.log(1 - raw.tanh() ** 2)).sum(-1)
    (raw.tanh() * of_action).sum().backward(retain_graph=True)
    (log_prob * of_log_prob).sum().backward()
    action, found = squashed_sample(mean.detach(), log_std.detach(), noise)
    close(found, log_prob.detach())
    of_mean, of_log_std = squashed_gradient(action, log_std.detach(), noise, of_action, of_log_prob)
    close(of_mean, mean.grad)
    close(of_log_std, log_std.grad)


def test_a_saturated_squashed_normal_has_a_finite_log_probability_and_gradient() -> None:
    mean, log_std = torch.tensor([[40.0, -40.0]]), torch.tensor([[2.0, -20.0]])
    action, log_prob = squashed_sample(mean, log_std, torch.tensor([[3.0, -3.0]]))
    assert action.tolist() == [[1.0, -1.0]]
    # -ε²/2 - log σ - log √2π + 2 (u - log 2) for large u, of both dimensions
    raw = [40 + 3 * np.exp(2.0), 40 + 3 * np.exp(-20.0)]
    expected = sum(-4.5 - s - 0.5 * np.log(2 * np.pi) + 2 * (u - np.log(2)) for u, s in zip(raw, (2, -20), strict=True))
    assert log_prob.item() == pytest.approx(expected, rel=1e-5)
    gradients = squashed_gradient(action, log_std, torch.ones(1, 2), torch.ones(1, 2), torch.tensor(1.0))
    assert all(bool(gradient.isfinite().all()) for gradient in gradients)
