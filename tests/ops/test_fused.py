"""Every closed form equals its plain function: results and gradients."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rlframe.algos import ppo
from rlframe.algos.on_policy import Batch
from rlframe.core.types import AgentInputs
from rlframe.kernels.mlp import plain_networks
from rlframe.ops.fused import (
    log_prob_entropy,
    quantile_huber,
    soft_objective,
    squared_error,
    squashed_sample,
    squashed_samples,
    td_huber,
)

N = 30


def randn(*shape: int) -> Tensor:
    return torch.randn(*shape)


def batch(*shape: int) -> Batch:
    valid = torch.rand(shape) < 0.8
    weight = valid / valid.sum()
    rows = -torch.rand(shape), randn(*shape), randn(*shape), randn(*shape)
    return Batch(AgentInputs((), (), (), ()), (), *rows, valid, weight)


def ppo_arguments(*shape: int, value_clip: float = float("inf"), clip: float = 0.2) -> tuple[Any, ...]:
    config = ppo.Config(clip=clip, value_clip=value_clip, entropy_coef=0.03)
    return -torch.rand(shape), torch.rand(shape), randn(*shape), batch(*shape), config


CASES: dict[str, tuple[Any, Any, int]] = {  # function, arguments, how many of them have a gradient
    "categorical": (log_prob_entropy, lambda: (randn(N, 4), torch.randint(0, 4, (N,))), 1),
    "categorical of sequences": (log_prob_entropy, lambda: (randn(5, 6, 4), torch.randint(0, 4, (5, 6))), 1),
    "squashed normal": (
        squashed_samples,
        lambda: (0.5 * randn(N, 6), 0.5 * randn(N, 6), randn(2 * N, 3), -0.6, 0.5),
        1,
    ),
    "critics": (squared_error, lambda: (randn(3, N), randn(N), torch.rand(N)), 1),
    "soft objective": (soft_objective, lambda: (randn(3, N), randn(N), torch.tensor(0.3)), 2),
    "quantiles": (quantile_huber, lambda: (randn(N, 7), 3 * randn(N, 5)), 1),
    "huber": (td_huber, lambda: (3 * randn(N, 4), torch.randint(0, 4, (N,)), randn(N)), 1),
    "quantiles squared": (quantile_huber, lambda: (randn(N, 7), 3 * randn(N, 5), float("inf")), 1),
    "wide huber": (td_huber, lambda: (3 * randn(N, 4), torch.randint(0, 4, (N,)), randn(N), 2.5), 1),
    "squared": (td_huber, lambda: (3 * randn(N, 4), torch.randint(0, 4, (N,)), randn(N), float("inf")), 1),
    "huber of one atom": (td_huber, lambda: (3 * randn(N, 4, 1), torch.randint(0, 4, (N,)), randn(N)), 1),
    "ppo": (ppo._loss, lambda: ppo_arguments(N), 3),
    "ppo with value clip": (ppo._loss, lambda: ppo_arguments(N, value_clip=0.3), 3),
    "ppo without clip": (ppo._loss, lambda: ppo_arguments(N, clip=float("inf")), 3),
    "ppo of sequences": (ppo._loss, lambda: ppo_arguments(5, 6), 3),
}


@pytest.mark.parametrize("name", CASES)
def test_the_closed_form_is_the_plain_function(name: str) -> None:
    function, make, n = CASES[name]
    torch.manual_seed(0)
    arguments = make()
    inputs = [x.requires_grad_() for x in arguments[:n]]
    found = []
    for results in (function(*arguments), function.plain(*arguments)):
        # all results at once, then each alone: a loss need not depend on all of them
        differentiable = [x for x in results if x.requires_grad]
        weights = [
            torch.linspace(-1, 1, x.numel()).view_as(x) if x.dim() else torch.tensor(0.7) for x in differentiable
        ]
        losses = [(x * w).sum() for x, w in zip(differentiable, weights, strict=True)]
        of_each = [torch.autograd.grad(loss, inputs, retain_graph=True) for loss in [sum(losses), *losses]]
        found.append(([x.detach() for x in results], of_each))
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_plain_networks_turn_it_off(name: str) -> None:
    function, make, n = CASES[name]
    arguments = make()
    inputs = [x.requires_grad_() for x in arguments[:n]]
    with pytest.raises(RuntimeError, match="plain_networks"):
        torch.autograd.grad(function(*arguments)[0].sum(), inputs, create_graph=True, allow_unused=True)
    with plain_networks():
        torch.autograd.grad(function(*arguments)[0].sum(), inputs, create_graph=True, allow_unused=True)


def test_the_squashed_normal_is_that_of_torch() -> None:
    torch.manual_seed(0)
    mean, log_std, noise = (0.5 * torch.randn(30, 3, dtype=torch.float64) for _ in range(3))
    raw = mean + log_std.exp() * noise
    normal = torch.distributions.Normal(mean, log_std.exp())
    expected = (normal.log_prob(raw) - torch.log(1 - raw.tanh() ** 2)).sum(-1)
    action, log_prob = squashed_sample(torch.cat([mean, log_std], -1), noise, -20.0, 2.0)
    torch.testing.assert_close(action, raw.tanh())
    torch.testing.assert_close(log_prob, expected, rtol=1e-4, atol=1e-6)


def test_a_saturated_squashed_normal_has_a_finite_log_probability_and_gradient() -> None:
    params = torch.tensor([[40.0, -40.0, 2.0, -20.0]], requires_grad=True)
    action, log_prob = squashed_sample(params, torch.tensor([[3.0, -3.0]]), -20.0, 2.0)
    assert action.tolist() == [[1.0, -1.0]]
    # -ε²/2 - log σ - log √2π + 2 (u - log 2) for large u, of both dimensions
    raw = [40 + 3 * np.exp(2.0), 40 + 3 * np.exp(-20.0)]
    expected = sum(-4.5 - s - 0.5 * np.log(2 * np.pi) + 2 * (u - np.log(2)) for u, s in zip(raw, (2, -20), strict=True))
    assert log_prob.item() == pytest.approx(expected, rel=1e-5)
    (action.sum() + log_prob.sum()).backward()
    assert params.grad is not None
    assert bool(params.grad.isfinite().all())
