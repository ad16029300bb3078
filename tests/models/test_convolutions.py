"""Convolutions by key: what each list does, which fit an image, and one line for those that do not."""

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

from rlframe.core.errors import ConfigError
from rlframe.kernels.device import learning_in
from rlframe.models import ModelConfig
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


def test_channels_are_the_widths_of_impalas_stages() -> None:
    stages = convolutions(IMAGE, encoder="impala", channels=(4, 6))
    assert [part.out_channels for part in stages if isinstance(part, nn.Conv2d)] == [4, 6]


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
        (IMAGE, {"encoder": "mlp", "channels": (4,)}, "model.channels is for the images of model.encoder=auto"),
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
