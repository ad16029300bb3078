"""Samples are functions of noise: zero noise is the mode, seeded noise follows the probabilities."""

import math
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from gymnasium import spaces
from gymnasium.spaces import Space

from rlframe.core.errors import ConfigError
from rlframe.core.struct import leaves, map_tree
from rlframe.distributions import (
    Bernoulli,
    Beta,
    Categorical,
    DiagonalGaussian,
    Distribution,
    Joint,
    MultiCategorical,
    TanhGaussian,
    make_distribution,
)
from rlframe.distributions.gaussian import _log_slope

N = 20_000


def many(dist: Distribution, params: list[float]) -> Any:
    """N seeded samples."""
    noise = map_tree(torch.from_numpy, dist.noise(np.random.default_rng(0), (N,)))
    return dist.sample(torch.tensor(params).expand(N, -1), noise)


def test_frequencies_are_the_probabilities_of_a_categorical() -> None:
    counts = torch.bincount(many(Categorical(3), [math.log(0.1), math.log(0.2), math.log(0.7)]), minlength=3)
    torch.testing.assert_close(counts / N, torch.tensor([0.1, 0.2, 0.7]), rtol=0, atol=0.012)  # 4 standard errors


def test_frequencies_are_the_probabilities_of_each_of_several_categories() -> None:
    actions = many(
        MultiCategorical((2, 3)), [math.log(0.9), math.log(0.1), math.log(0.5), math.log(0.3), math.log(0.2)]
    )
    assert (actions[:, 0] == 1).float().mean().item() == pytest.approx(0.1, abs=0.012)
    assert (actions[:, 1] == 1).float().mean().item() == pytest.approx(0.3, abs=0.012)
    both = ((actions[:, 0] == 1) & (actions[:, 1] == 1)).float().mean().item()
    assert both == pytest.approx(0.03, abs=0.006), "the categories are not independent"


def test_frequencies_are_the_probabilities_of_bits() -> None:
    actions = many(Bernoulli((2,)), [math.log(0.2 / 0.8), math.log(0.6 / 0.4)])
    torch.testing.assert_close(actions.float().mean(0), torch.tensor([0.2, 0.6]), rtol=0, atol=0.014)


def test_gaussian_samples_have_the_right_mean_and_deviation() -> None:
    actions = many(DiagonalGaussian((2,)), [1.0, -3.0, math.log(0.5), math.log(2.0)])
    torch.testing.assert_close(actions.mean(0), torch.tensor([1.0, -3.0]), rtol=0, atol=0.06)
    torch.testing.assert_close(actions.std(0), torch.tensor([0.5, 2.0]), rtol=0.03, atol=0)


@pytest.mark.parametrize(
    ("dist", "params", "mode"),
    [
        (Categorical(3), [0.1, 2.0, 0.3], 1),
        (MultiCategorical((2, 3)), [1.0, 0.0, 0.0, 0.1, 0.2], [0, 2]),
        (Bernoulli((3,)), [0.5, -0.5, 3.0], [1, 0, 1]),
        (DiagonalGaussian((2,)), [0.3, 7.0, 1.0, 1.0], [0.3, 7.0]),
        (DiagonalGaussian(()), [0.3, 1.0], 0.3),
        (TanhGaussian((2,)), [0.0, 1.0, 1.0, 1.0], [0.0, math.tanh(1.0)]),
        (Beta((2,)), [math.log(math.e - 1), 20.0, math.log(math.e**3 - 1), 20.0], [-0.5, 0.0]),  # alpha 2, beta 4
    ],
)
def test_zero_noise_is_the_mode(dist: Distribution, params: list[float], mode: Any) -> None:
    noise = np.zeros_like(dist.noise(np.random.default_rng(0), (1,)))
    action = dist.sample(torch.tensor([params]), torch.from_numpy(noise))
    torch.testing.assert_close(action[0], torch.tensor(mode).to(action.dtype))


NOISY = [Categorical(3), MultiCategorical((2, 3)), Bernoulli((2,)), DiagonalGaussian((2,)), Beta((2,))]


@pytest.mark.parametrize("dist", NOISY)
def test_noise_is_the_same_drawn_at_once_or_in_parts(dist: Distribution) -> None:
    one, other = np.random.default_rng(5), np.random.default_rng(5)
    whole = dist.noise(one, (5,))
    pieces = np.concatenate([dist.noise(other, (2,)), dist.noise(other, (3,))])
    np.testing.assert_array_equal(whole, pieces)
    assert whole.dtype == np.float32


@pytest.mark.parametrize("raw", [(-9.0, -9.0), (0.5, 0.5), (5.0, 0.0), (60.0, 80.0)], ids=str)
def test_samples_of_a_beta_have_its_moments(raw: tuple[float, float]) -> None:
    actions = many(Beta((1,)), list(raw))
    alpha, beta = (1 + F.softplus(torch.tensor(raw))).tolist()
    variance = 4 * alpha * beta / ((alpha + beta) ** 2 * (alpha + beta + 1))
    mean = 2 * alpha / (alpha + beta) - 1
    assert actions.mean().item() == pytest.approx(mean, abs=4 * (variance / N) ** 0.5)
    assert actions.var().item() == pytest.approx(variance, rel=0.05)
    assert actions.abs().max() < 1


def test_a_beta_is_finite_at_any_parameters_and_actions() -> None:
    params = torch.tensor([[-1e4, -1e4], [1e4, 1e4], [1e4, -1e4]], requires_grad=True)
    for edge in (-1.0, 1.0):
        log_prob = Beta((1,)).log_prob(params, torch.full((3, 1), edge))
        (gradient,) = torch.autograd.grad(log_prob.sum() + Beta((1,)).entropy(params).sum(), params)
        assert log_prob.isfinite().all()
        assert gradient.isfinite().all()


def test_the_log_prob_is_that_of_the_unclipped_sample() -> None:
    dist = DiagonalGaussian((1,))
    params = torch.tensor([[0.0, 0.0]])
    action, log_prob = dist.act(params, torch.tensor([[3.0]]))
    assert action.item() == 3.0, "clipping is the environment's side"
    assert log_prob.item() == pytest.approx(-0.5 * 9 - 0.5 * math.log(2 * math.pi), abs=1e-6)


@pytest.mark.parametrize("raw", [20.0, -20.0])
def test_tanh_log_determinant_is_exact_at_saturation(raw: float) -> None:
    x = torch.tensor([[raw]], requires_grad=True)
    assert abs(x.tanh().item()) == 1.0
    log_det = _log_slope(x, torch).sum(-1)
    # log(1 - tanh(x)^2) = 2 log 2 - 2|x| - 2 log(1 + exp(-2|x|))
    assert log_det.item() == pytest.approx(2 * math.log(2) - 2 * 20.0, abs=1e-4)
    log_det.sum().backward()
    torch.testing.assert_close(x.grad, torch.tensor([[-math.copysign(2.0, raw)]]))


def test_tanh_log_prob_of_an_action_at_the_bound_is_finite() -> None:
    dist = TanhGaussian((1,))
    params = torch.zeros(2, 2, requires_grad=True)
    log_prob = dist.log_prob(params, torch.tensor([[1.0], [-1.0]]))
    log_prob.sum().backward()
    assert torch.isfinite(log_prob).all()
    assert torch.isfinite(params.grad).all()  # type: ignore[arg-type]


CHOICES: list[tuple[Space, type[Distribution], int]] = [
    (spaces.Discrete(3, start=4), Categorical, 3),
    (spaces.MultiDiscrete([2, 3]), MultiCategorical, 5),
    (spaces.MultiBinary(4), Bernoulli, 4),
    (spaces.MultiBinary([2, 3]), Bernoulli, 6),
    (spaces.Box(-1, 1, ()), DiagonalGaussian, 2),
    (spaces.Box(-np.inf, np.inf, (2, 2)), DiagonalGaussian, 8),
    (spaces.Dict({"a": spaces.Discrete(2), "b": spaces.Tuple((spaces.Box(-1, 1, (1,)),))}), Joint, 4),
]


@pytest.mark.parametrize(("space", "family", "size"), CHOICES)
def test_every_action_space_has_its_distribution(space: Space, family: type, size: int) -> None:
    dist = make_distribution(space)
    assert type(dist) is family
    assert dist.param_size == size
    noise = map_tree(torch.from_numpy, dist.noise(np.random.default_rng(0), (5,)))
    action, log_prob = dist.act(torch.zeros(5, size), noise)
    assert log_prob.shape == (5,)
    shapes = [tuple(leaf.shape) for leaf in leaves(action)]
    assert shapes == [(5, *sub.shape) for sub in _parts(space)]


def _parts(space: Space) -> list[Any]:
    match space:
        case spaces.Dict():
            return [part for sub in space.spaces.values() for part in _parts(sub)]
        case spaces.Tuple():
            return [part for sub in space.spaces for part in _parts(sub)]
    return [space]


def test_a_distribution_by_name_is_that_of_every_box_only() -> None:
    space = spaces.Dict({"a": spaces.Discrete(2), "b": spaces.Box(-1, 1, (1,))})
    dist = make_distribution(space, "squashed_gaussian")
    assert isinstance(dist, Joint)
    assert [type(part) for part in dist.parts] == [Categorical, TanhGaussian]


@pytest.mark.parametrize("box", [spaces.Box(-np.inf, np.inf, (2,)), spaces.Box(0, np.inf, (2,))])
def test_squashing_an_unbounded_box_raises_an_error_with_the_remedy(box: spaces.Box) -> None:
    with pytest.raises(ConfigError, match=r"model.distribution=squashed_gaussian needs finite .*; use gaussian"):
        make_distribution(box, "squashed_gaussian")


class Own(DiagonalGaussian):
    """A distribution of a user's."""


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gausian", "not one of auto, gaussian, .*; did you mean gaussian"),
        ("tests.distributions.test_sampling:Owm", "has no Owm; did you mean Own"),
        ("tests.distributions.test_sampling:np", "not a subclass of rlframe.distributions.Distribution"),
        ("nowhere:Own", "No module named 'nowhere'"),
    ],
)
def test_a_distribution_of_ones_own_is_found_and_wrong_names_are_refused(name: str, message: str) -> None:
    space = spaces.Tuple((spaces.Box(-1, 1, (2, 3)), spaces.Discrete(2)))
    found = make_distribution(space, "tests.distributions.test_sampling:Own")
    assert isinstance(found, Joint)
    assert (found.parts[0].shape, found.parts[0].param_size) == ((2, 3), 12)  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=message):
        make_distribution(space, name)


@pytest.mark.parametrize("space", [spaces.Text(3), spaces.Sequence(spaces.Discrete(2)), spaces.MultiDiscrete([[2, 3]])])
def test_an_unsupported_space_raises_an_error(space: Space) -> None:
    with pytest.raises(ValueError, match=f"{type(space).__name__}.*is not supported; use"):
        make_distribution(space)


@pytest.mark.parametrize("name", ["gaussian", "squashed_gaussian", "beta"])
@pytest.mark.parametrize("shape", [(), (2,), (2, 3)])
def test_act_and_log_prob_agree(shape: tuple[int, ...], name: str) -> None:
    dist = make_distribution(spaces.Box(-1, 1, shape), name)
    rng = np.random.default_rng(0)
    params = torch.from_numpy(rng.standard_normal((50, dist.param_size)).astype(np.float32))
    noise = torch.from_numpy(dist.noise(rng, (50,)))
    action, log_prob = dist.act(params, noise)
    torch.testing.assert_close(action, dist.sample(params, noise))
    torch.testing.assert_close(log_prob, dist.log_prob(params, action), rtol=0, atol=1e-4)
