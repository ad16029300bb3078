"""Convolutions by key: what each list does, which fit an image, and one line for those that do not."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from gymnasium import spaces
from torch import Tensor, nn

from rlframe.algos import dqn
from rlframe.core.errors import ConfigError
from rlframe.kernels.device import learning_in
from rlframe.models import ModelConfig
from rlframe.models.convolutions import ChannelNorm, SpectralConv2d
from rlframe.models.encoders import ConvNet, Encoder, make_encoder

IMAGE, SMALL, VECTOR = (spaces.Box(0, 255, shape, np.uint8) for shape in ((84, 84, 3), (12, 20, 3), (5,)))


def convolutions(space: spaces.Space, **model: Any) -> nn.Sequential:
    encoder = make_encoder(space, ModelConfig(image_hidden=(), **model))
    assert isinstance(encoder, Encoder)
    found = encoder.image_leaves[0][1]  # type: ignore[index]
    assert isinstance(found, nn.Sequential)
    return found


def shapes(net: nn.Sequential) -> list[tuple[int, int, int, int]]:
    """Channels, kernel and stride of each convolution, and the pool after it."""
    found: list[tuple[int, int, int, int]] = []
    for part in net:
        if isinstance(part, nn.Conv2d):
            found.append((part.out_channels, part.kernel_size[0], part.stride[0], 1))
        elif isinstance(part, nn.MaxPool2d):
            found[-1] = (*found[-1][:3], part.kernel_size)  # type: ignore[assignment]
    return found


NATURE = [(32, 8, 4, 1), (64, 4, 2, 1), (64, 3, 1, 1)]


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ({}, NATURE),
        ({"encoder": "nature", "channels": (16, 32, 32)}, [(16, 8, 4, 1), (32, 4, 2, 1), (32, 3, 1, 1)]),
        ({"kernels": (6, 4, 2)}, [(32, 6, 4, 1), (64, 4, 2, 1), (64, 2, 1, 1)]),
        ({"pools": (1, 2, 1), "strides": (2, 2, 1)}, [(32, 8, 2, 1), (64, 4, 2, 2), (64, 3, 1, 1)]),
        ({"channels": (4, 5), "kernels": (3, 3), "strides": (2, 1), "pools": (2, 3)}, [(4, 3, 2, 2), (5, 3, 1, 3)]),
        ({"channels": (1,), "kernels": (84,), "strides": (200,)}, [(1, 84, 200, 1)]),
    ],
    ids=str,
)
def test_each_list_replaces_that_of_the_nature_network(model: dict[str, Any], expected: list[Any]) -> None:
    assert shapes(convolutions(IMAGE, **model)) == expected


def test_small_images_have_impala_unless_the_convolutions_are_given() -> None:
    assert not isinstance(convolutions(SMALL), ConvNet)
    given = {"channels": (4, 8), "kernels": (3, 3), "strides": (1, 1)}
    assert shapes(convolutions(SMALL, **given)) == [(4, 3, 1, 1), (8, 3, 1, 1)]


def by_pixel(x: Tensor, norm: Any) -> Tensor:
    """Each pixel's channels with mean 0 and variance 1, and the gain and shift."""
    centred = x - x.mean(1, keepdim=True)
    scaled = centred / (centred.square().mean(1, keepdim=True) + 1e-5).sqrt()
    return scaled * norm.weight[:, None, None] + norm.bias[:, None, None]


def shuffled(net: nn.Module) -> Any:
    """The network with random gains, shifts and biases."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in net.parameters():
            if parameter.dim() == 1:
                parameter.normal_()
    return net


def test_normalised_convolutions_are_normalised_pixel_by_pixel_before_their_relu() -> None:
    net, x = shuffled(convolutions(IMAGE, image_norm="layer", pools=(1, 2, 1))), torch.randint(0, 256, (2, 3, 84, 84))
    first, norm_1, _, second, norm_2, _, _, third, norm_3, _ = net
    y = by_pixel(F.conv2d(x / 255, first.weight, first.bias, 4), norm_1).relu()
    y = F.max_pool2d(by_pixel(F.conv2d(y, second.weight, second.bias, 2), norm_2).relu(), 2)
    y = by_pixel(F.conv2d(y, third.weight, third.bias), norm_3).relu()
    torch.testing.assert_close(net(x), y, rtol=1e-4, atol=1e-4)


def test_every_convolution_of_impala_is_normalised_too() -> None:
    plain, normalised = (convolutions(SMALL, image_norm=norm) for norm in ("none", "layer"))
    n_convolutions = sum(isinstance(part, nn.Conv2d) for part in plain.modules())
    norms = [part for part in normalised.modules() if isinstance(part, ChannelNorm)]
    assert len(norms) == n_convolutions == 15
    normalised(torch.rand(2, 3, 12, 20)).square().sum().backward()
    assert all(norm.weight.grad is not None and norm.weight.grad.any() for norm in norms), "each is used"


def test_hadamax_is_three_products_of_normalised_convolutions() -> None:
    net, x = shuffled(convolutions(IMAGE, encoder="hadamax", channels=(4, 6, 5))), torch.randint(0, 256, (2, 3, 84, 84))
    y = x / 255
    for stage, out, padding, pool in zip(net, (4, 6, 5), (4, 2, 1), ((4, 4), (2, 2), (3, 1, 1)), strict=True):
        weights, biases = stage.both.weight.split(out), stage.both.bias.split(out)
        one, other = (
            F.gelu(by_pixel(F.conv2d(y, weight, bias, padding=padding), norm), approximate="tanh")
            for weight, bias, norm in zip(weights, biases, stage.norms, strict=True)
        )
        y = F.max_pool2d(one * other, *pool)
    assert y.shape == (2, 5, 11, 11)
    torch.testing.assert_close(net(x), y, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("side", "n_features"), [(84, 64 * 11 * 11), (8, 64)])
def test_hadamax_is_followed_by_gelu_in_the_paper_s_sizes(side: int, n_features: int) -> None:
    space = spaces.Box(0, 255, (4, side, side), np.uint8)
    encoder = make_encoder(space, ModelConfig(encoder="hadamax", norm="layer"))
    assert isinstance(encoder, Encoder)
    assert encoder.mlp.in_size == n_features
    assert encoder.mlp.layers.activations == ("gelu",)
    assert encoder(torch.zeros(5, 2, 4, side, side, dtype=torch.uint8)).shape == (5, 2, 512)
    q = dqn.Config(dueling=True).make_agent(space, spaces.Discrete(3), ModelConfig(encoder="hadamax"), 0).model
    assert q.advantage.network.layers.activations[0] == q.value.network.layers.activations[0] == "gelu"


def test_channels_are_the_widths_of_impalas_stages() -> None:
    stages = convolutions(IMAGE, encoder="impala", channels=(4, 6))
    assert [part.out_channels for part in stages if isinstance(part, nn.Conv2d)] == [4, 6]


def spectral(gain: float = 1.0) -> tuple[SpectralConv2d, Tensor]:
    """A convolution with random weights, and its weights divided by their largest singular value."""
    torch.manual_seed(0)
    layer = SpectralConv2d(3, 8, 3, padding=1)
    with torch.no_grad():
        layer.weight.normal_().mul_(gain)
    return layer, layer.weight.detach() / torch.linalg.svdvals(layer.weight.detach().flatten(1))[0]


@pytest.mark.parametrize("gain", [0.1, 10.0])
def test_spectral_weights_have_a_largest_singular_value_of_one(gain: float) -> None:
    layer, expected = spectral(gain)
    x = torch.randn(2, 3, 5, 5)
    for _ in range(60):
        y = layer(x)  # an iteration each
    torch.testing.assert_close(y, F.conv2d(x, expected, layer.bias, padding=1), rtol=1e-4, atol=1e-4)
    (found,) = torch.autograd.grad(y.square().sum(), layer.weight)
    weight = layer.weight.detach().requires_grad_()
    exact = F.conv2d(x, weight / torch.linalg.svdvals(weight.flatten(1))[0], layer.bias, padding=1)
    torch.testing.assert_close(found, torch.autograd.grad(exact.square().sum(), weight)[0], rtol=1e-3, atol=1e-3)


def test_only_learning_moves_the_singular_vector_and_acting_has_the_weights_that_learning_has() -> None:
    layer, _ = spectral()
    x, before = torch.randn(2, 3, 5, 5), layer.left.clone()
    with torch.no_grad():
        acted = layer(x)
    layer.requires_grad_(False)
    layer(x)
    layer.requires_grad_(True)
    assert torch.equal(layer.left, before)
    torch.testing.assert_close(layer(x), acted, rtol=0, atol=0)
    assert not torch.equal(layer.left, before)


def test_impala_has_spectral_weights_in_its_residual_blocks_alone() -> None:
    net = convolutions(IMAGE, encoder="impala", channels=(4, 6), spectral_norm=True)
    found = [part.weight.shape[:2] for part in net.modules() if isinstance(part, SpectralConv2d)]
    assert found == [(4, 4)] * 4 + [(6, 6)] * 4


@pytest.mark.parametrize("encoder", ["nature", "impala", "hadamax"])
def test_pooled_features_are_maxima_of_equal_parts(encoder: str) -> None:
    space = spaces.Box(0, 255, (4, 84, 84), np.uint8)
    encoders = [make_encoder(space, ModelConfig(encoder=encoder, image_hidden=(), image_pool=n)) for n in (0, 3)]
    encoders[1].load_state_dict(dict(zip(encoders[1].state_dict(), encoders[0].state_dict().values(), strict=True)))
    x = torch.randint(0, 256, (2, 4, 84, 84), dtype=torch.uint8)
    with torch.no_grad():
        plain, pooled = (each(x) for each in encoders)
    side = {"nature": 7, "impala": 11, "hadamax": 11}[encoder]
    expected = F.adaptive_max_pool2d(plain.unflatten(1, (-1, side, side)), 3)
    torch.testing.assert_close(pooled, expected.flatten(1), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("space", "model", "message"),
    [
        (IMAGE, {"kernels": (8, 4)}, r"model.channels=\[32,64,64\], model.kernels=\[8,4\], .*: each needs one number"),
        (IMAGE, {"kernels": (8, 4, 10)}, "model.kernels: 10x10 in layer 3 of 3, which sees 9x9 .* image of 84x84; use"),
        (IMAGE, {"pools": (1, 1, 8)}, "model.pools: 8x8 in layer 3 of 3, which sees 7x7 pixels of an image of 84x84"),
        (IMAGE, {"kernels": (85, 1, 1)}, "model.kernels: 85x85 in layer 1 of 3, which sees 84x84 pixels"),
        (SMALL, {"channels": (4,), "kernels": (13,), "strides": (1,)}, "13x13 in layer 1 of 1, which sees 12x20"),
        (SMALL, {"encoder": "nature"}, "needs images of 36 pixels per side, got 12x20; use impala, or smaller"),
        (IMAGE, {"encoder": "impala", "strides": (1, 1, 1)}, "not for model.encoder=impala; use encoder=nature"),
        (IMAGE, {"encoder": "hadamax", "pools": (1,)}, "not for model.encoder=hadamax; use encoder=nature"),
        (IMAGE, {"encoder": "hadamax", "channels": (4, 8)}, r"model.channels=\[4, 8\] must be three numbers"),
        (VECTOR, {"image_norm": "layer"}, "model.image_norm=layer needs images, but .*; use model.norm"),
        (IMAGE, {"encoder": "mlp", "channels": (4,)}, "model.channels is for the images of model.encoder=auto"),
        (
            IMAGE,
            {"encoder": "nature", "spectral_norm": True},
            "spectral_norm=true is for model.encoder=impala, not nature",
        ),
        (IMAGE, {"image_pool": 8}, "model.image_pool=8 is larger than the convolutions' output of 7x7; use at most 7"),
        (VECTOR, {"image_pool": 6}, "model.image_pool is for the images of model.encoder=auto"),
        (VECTOR, {"spectral_norm": True}, "model.spectral_norm is for the images of model.encoder=auto"),
        (VECTOR, {"pools": (2,)}, "model.pools is for the images of model.encoder=auto"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused_with_the_layer_the_sizes_and_the_remedy(
    space: spaces.Space, model: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make_encoder(space, ModelConfig(**model))


def test_a_size_of_zero_is_refused() -> None:
    for name in ("channels", "kernels", "strides", "pools"):
        with pytest.raises(ConfigError, match=rf"model.{name}=\[0\] must be at least 1"):
            ModelConfig(**{name: (0,)})


@pytest.mark.parametrize(
    "model",
    [
        {"kernels": (7, 4, 3), "strides": (4, 2, 1)},
        {"channels": (8, 8), "kernels": (4, 3), "strides": (2, 1), "pools": (2, 2)},
        {"channels": (8, 8), "kernels": (2, 3), "strides": (3, 1)},
        {"image_norm": "layer"},
        {"encoder": "impala", "channels": (4, 8), "spectral_norm": True},
    ],
    ids=str,
)
def test_any_of_them_learns_in_bfloat16(model: dict[str, Any]) -> None:
    torch.manual_seed(0)
    net, x = convolutions(IMAGE, **model), torch.randint(0, 256, (4, 3, 84, 84), dtype=torch.uint8)
    found = []
    for precision in ("fp32", "bf16"):
        with learning_in(precision), torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            y = net(x).float()
        found.append([y.detach(), *torch.autograd.grad(y.square().mean(), list(net.parameters()))])
    for one, other in zip(*found, strict=True):
        assert (one - other).norm() <= 0.05 * one.norm()
