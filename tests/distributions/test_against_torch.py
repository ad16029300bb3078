"""Log-probabilities and entropies match torch.distributions for every family and shape."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributions as td
import torch.nn.functional as F
from torch import Tensor

from rlframe.distributions import (
    Bernoulli,
    Beta,
    Categorical,
    DiagonalGaussian,
    Distribution,
    Joint,
    MultiCategorical,
    TanhGaussian,
)
from rlframe.distributions.gaussian import squashed_sample

LEADS = [(5,), (3, 2)]
SHAPES: list[tuple[int, ...]] = [(), (3,), (2, 2)]


def gaussian(params: Tensor, shape: tuple[int, ...]) -> td.Distribution:
    mean, log_std = params.chunk(2, -1)
    lead = params.shape[:-1]
    return td.Independent(td.Normal(mean.reshape(*lead, *shape), log_std.exp().reshape(*lead, *shape)), len(shape))


def tanh_gaussian(params: Tensor, shape: tuple[int, ...]) -> td.Distribution:
    base = gaussian(params, shape)
    return td.TransformedDistribution(base, [td.TanhTransform()])


def beta(params: Tensor, shape: tuple[int, ...]) -> td.Distribution:
    alpha, beta = (1 + F.softplus(params)).reshape(*params.shape[:-1], 2, *shape).unbind(params.dim() - 1)
    scaled = td.TransformedDistribution(td.Beta(alpha, beta), [td.AffineTransform(-1.0, 2.0)], validate_args=False)
    return td.Independent(scaled, len(shape))


def bernoulli(params: Tensor, shape: tuple[int, ...]) -> td.Distribution:
    return td.Independent(td.Bernoulli(logits=params.reshape(*params.shape[:-1], *shape)), len(shape))


CASES: list[Any] = [
    pytest.param(Categorical(4), lambda p: td.Categorical(logits=p), id="categorical"),
    *[pytest.param(DiagonalGaussian(s), lambda p, s=s: gaussian(p, s), id=f"gaussian{s}") for s in SHAPES],
    *[pytest.param(TanhGaussian(s), lambda p, s=s: tanh_gaussian(p, s), id=f"tanh{s}") for s in SHAPES],
    *[pytest.param(Beta(s), lambda p, s=s: beta(p, s), id=f"beta{s}") for s in SHAPES],
    *[pytest.param(Bernoulli(s), lambda p, s=s: bernoulli(p, s), id=f"bernoulli{s}") for s in SHAPES[1:]],
]


def drawn(dist: Distribution, lead: tuple[int, ...], seed: int = 0) -> tuple[Tensor, Any]:
    """Parameters and noise."""
    torch.manual_seed(seed)
    noise = dist.noise(np.random.default_rng(seed), lead)
    as_torch = tuple(map(torch.from_numpy, noise)) if isinstance(noise, tuple) else torch.from_numpy(noise)
    return 0.5 * torch.randn(*lead, dist.param_size), as_torch


@pytest.mark.parametrize("lead", LEADS)
@pytest.mark.parametrize(("dist", "reference"), CASES)
def test_log_prob_matches_torch(dist: Distribution, reference: Any, lead: tuple[int, ...]) -> None:
    params, noise = drawn(dist, lead)
    action = dist.sample(params, noise)
    expected = reference(params).log_prob(action if isinstance(dist, Categorical) else action.float())
    assert expected.shape == lead
    torch.testing.assert_close(dist.log_prob(params, action), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("lead", LEADS)
@pytest.mark.parametrize(("dist", "reference"), [case for case in CASES if not case.id.startswith(("tanh", "beta"))])
def test_entropy_matches_torch(dist: Distribution, reference: Any, lead: tuple[int, ...]) -> None:
    params, _ = drawn(dist, lead)
    torch.testing.assert_close(dist.entropy(params), reference(params).entropy(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("lead", LEADS)
@pytest.mark.parametrize(("dist", "reference"), CASES)
def test_the_divergence_of_two_matches_torch(dist: Distribution, reference: Any, lead: tuple[int, ...]) -> None:
    (params, _), (other, _) = drawn(dist, lead), drawn(dist, lead, seed=1)
    expected = td.kl_divergence(reference(params), reference(other))
    torch.testing.assert_close(dist.kl(params, other), expected.reshape(*lead, -1).sum(-1), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(dist.kl(params, params), torch.zeros(lead), rtol=0, atol=1e-6)


@pytest.mark.parametrize(("mean", "log_std"), [(0.0, -3.0), (0.5, -1.0), (-1.0, 0.0), (2.0, 1.0)])
def test_the_entropy_of_a_tanh_gaussian_and_its_gradient_are_means_over_samples(mean: float, log_std: float) -> None:
    params = torch.tensor([mean, log_std], dtype=torch.float64, requires_grad=True)
    noise = torch.randn(200_000, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    expected = -squashed_sample(params[:1].expand_as(noise), params[1:].expand_as(noise), noise)[1].mean()
    found = TanhGaussian((1,)).entropy(params)
    torch.testing.assert_close(found, expected, rtol=0.01, atol=0.01)
    slopes = (torch.autograd.grad(x, params)[0] for x in (found, expected))
    torch.testing.assert_close(*slopes, rtol=0.01, atol=0.03)


def test_the_entropy_of_a_beta_is_torchs_on_an_interval_twice_as_long() -> None:
    params, _ = drawn(Beta((3,)), (5,))
    alpha, other = (1 + F.softplus(params)).chunk(2, -1)
    expected = td.Beta(alpha, other).entropy().sum(-1) + 3 * np.log(2)
    torch.testing.assert_close(Beta((3,)).entropy(params), expected.float(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("lead", LEADS)
def test_multi_categorical_is_independent_categoricals(lead: tuple[int, ...]) -> None:
    dist = MultiCategorical((2, 3))
    params, noise = drawn(dist, lead)
    action = dist.sample(params, noise)
    assert action.shape == (*lead, 2)
    parts, double = ([td.Categorical(logits=x) for x in (k * params).split([2, 3], -1)] for k in (1, 2))
    log_prob = sum(part.log_prob(action[..., i]) for i, part in enumerate(parts))
    torch.testing.assert_close(dist.log_prob(params, action), log_prob)
    torch.testing.assert_close(dist.entropy(params), sum(part.entropy() for part in parts))
    torch.testing.assert_close(dist.kl(params, 2 * params), sum(map(td.kl_divergence, parts, double)))


@pytest.mark.parametrize("lead", LEADS)
def test_a_nested_joint_is_the_sum_of_its_parts(lead: tuple[int, ...]) -> None:
    which, level, bits = Categorical(3), DiagonalGaussian((2,)), Bernoulli((2, 2))
    dist = Joint({"which": which, "rest": Joint((level, bits))})
    torch.manual_seed(0)
    params = torch.randn(*lead, 11)
    noise = dist.noise(np.random.default_rng(0), lead)
    noise = (torch.from_numpy(noise[0]), tuple(map(torch.from_numpy, noise[1])))
    action, log_prob = dist.act(params, noise)
    assert list(action) == ["which", "rest"]
    assert action["rest"][1].shape == (*lead, 2, 2)

    split = params.split([3, 4, 4], -1)
    actions = (action["which"], *action["rest"])
    parts: tuple[Distribution, ...] = (which, level, bits)
    expected = sum(d.log_prob(p, a) for d, p, a in zip(parts, split, actions, strict=True))
    torch.testing.assert_close(dist.log_prob(params, action), expected)
    torch.testing.assert_close(log_prob, expected)
    torch.testing.assert_close(dist.entropy(params), sum(d.entropy(p) for d, p in zip(parts, split, strict=True)))
    moved = sum(d.kl(p, 2 * p) for d, p in zip(parts, split, strict=True))
    torch.testing.assert_close(dist.kl(params, 2 * params), moved)


def test_a_dict_of_actions_is_read_by_key_not_by_order() -> None:
    dist = Joint({"a": Categorical(2), "b": Categorical(3)})
    params = torch.tensor([[0.0, 1.0, 0.0, 1.0, 2.0]])
    one, two = torch.tensor([1]), torch.tensor([2])
    torch.testing.assert_close(
        dist.log_prob(params, {"b": two, "a": one}), dist.log_prob(params, {"a": one, "b": two}), rtol=0, atol=0
    )


@pytest.mark.parametrize("lead", LEADS)
@pytest.mark.parametrize("dist", [case.values[0] for case in CASES], ids=[case.id for case in CASES])
def test_log_prob_entropy_matches_both_and_gradient_matches_autograd(dist: Distribution, lead: tuple[int, ...]) -> None:
    params, noise = drawn(dist, lead)
    action, weights = dist.sample(params, noise), torch.randn(2, *lead)
    leaf = params.clone().requires_grad_()
    apart = dist.log_prob(leaf, action), dist.entropy(leaf)
    together = dist.log_prob_entropy(leaf, action)
    torch.testing.assert_close(together, apart)
    found, expected = (torch.autograd.grad(list(each), [leaf], list(weights)) for each in (together, apart))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
