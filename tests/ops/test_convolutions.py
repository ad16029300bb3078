"""Convolutions with a written gradient: values and gradients of torch, in either precision."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rlframe.ops.convolutions import as_floats, channels_last, convolved, writes_out
from rlframe.ops.precision import learning_in


def layers() -> list[nn.Conv2d]:
    torch.manual_seed(0)
    return [nn.Conv2d(4, 8, 8, 4), nn.Conv2d(8, 16, 4, 2), nn.Conv2d(16, 16, 3)]


def images(channels: int = 4) -> Tensor:
    """Stacks that share memory with others, as replay gives them."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, 256, (3, channels + 1, 44, 44), dtype=torch.uint8, generator=generator)[:, :channels]


def of_double(convs: list[nn.Conv2d], x: Tensor, scale: float, gradient: Tensor) -> list[Tensor]:
    """Values, then gradients of all parameters."""
    parameters = [p.detach().double().requires_grad_() for conv in convs for p in (conv.weight, conv.bias)]
    y = x.double() * scale
    for i, conv in enumerate(convs):
        y = F.conv2d(y, parameters[2 * i], parameters[2 * i + 1], conv.stride).relu()
    return [y.detach(), *torch.autograd.grad(y, parameters, gradient.double())]


@pytest.mark.parametrize(("precision", "error"), [("fp32", 1e-5), ("bf16", 0.05)])
def test_values_and_gradients_are_those_of_double_precision(precision: str, error: float) -> None:
    convs, x, scale = layers(), images(), 1 / 255
    with learning_in(precision):
        y = convolved(x, convs, scale)
        gradient = torch.randn(y.shape, generator=torch.Generator().manual_seed(2))
        y.backward(gradient)
    parameters = [p for conv in convs for p in (conv.weight, conv.bias)]
    found = [y.detach(), *[p.grad for p in parameters]]
    for ours, exact in zip(found, of_double(convs, x, scale, gradient), strict=True):
        assert ours is not None
        assert (ours.double() - exact).norm() <= error * exact.norm()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in parameters)


def test_forward_alone_is_the_same_to_the_last_bit_or_nearly() -> None:
    convs, x = layers(), images()
    with torch.no_grad():
        alone = convolved(x, convs, 1 / 255)
    torch.testing.assert_close(alone, convolved(x, convs, 1 / 255).detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("channels", [1, 3, 4])
def test_images_keep_their_values_when_their_channels_come_last(channels: int) -> None:
    x = images(channels)
    found = channels_last(x)
    assert torch.equal(found, x)
    assert found.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(channels_last(x.float()), x.float())
    turned = x.transpose(2, 3)
    assert torch.equal(channels_last(turned), turned)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("learns", [True, False])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_what_is_not_a_number_stays_so(precision: str, learns: bool, sign: float) -> None:
    for i in range(3):
        convs = layers()
        with torch.no_grad():
            convs[i].weight[0, 0, 0, 0] = sign * torch.nan
        with learning_in(precision), torch.set_grad_enabled(learns):
            assert convolved(images(), convs, 1 / 255).isnan().any(), i
    pixels = images().float()
    pixels[0, 0, 0, 0] = sign * torch.nan
    with learning_in(precision), torch.set_grad_enabled(learns):
        assert convolved(pixels, layers()).isnan().any()


def test_layers_may_lack_a_bias() -> None:
    convs = [nn.Conv2d(4, 8, 8, 4, bias=False), nn.Conv2d(8, 4, 3)]
    convolved(images(), convs).sum().backward()
    assert convs[0].weight.grad is not None
    assert convs[0].bias is None


def test_it_is_for_learning_on_a_cpu_and_not_for_gradients_of_pixels() -> None:
    assert writes_out(images())
    assert not writes_out(images().float().requires_grad_())
    assert not writes_out(images().to("meta"))
    with torch.inference_mode():
        assert not writes_out(images())


def test_bfloat16_has_all_bytes() -> None:
    every = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16)
    with learning_in("bf16"):
        assert as_floats(every).dtype == torch.bfloat16
        assert torch.equal(as_floats(every).long(), every.long())
