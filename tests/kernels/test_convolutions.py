"""Convolutions with their gradient written out are torch's own in bfloat16, for pictures of any size and kind."""

import pytest
import torch
from torch import Tensor, nn

from rlframe.kernels import convolutions
from rlframe.kernels.device import learning_in
from rlframe.models.encoders import ConvNet, FirstConv2d

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch has no oneDNN here")


def network(channels: int, stride: int = 4) -> ConvNet:
    torch.manual_seed(0)
    first = FirstConv2d(channels, 32, 2 * stride, stride, scale=1 / 255)
    return ConvNet(first, nn.ReLU(), nn.Conv2d(32, 64, 4, 2), nn.ReLU(), nn.Conv2d(64, 64, 3, 1), nn.ReLU())


def found_by(net: ConvNet, x: Tensor) -> list[Tensor]:
    """The result and all gradients, in bfloat16."""
    with learning_in("bf16"), torch.autocast("cpu", torch.bfloat16):
        y = net(x).float()
    direction = torch.randn(y.shape, generator=torch.Generator().manual_seed(1))
    return [y.detach(), *torch.autograd.grad((y * direction).sum(), list(net.parameters()))]


_RNG = torch.Generator().manual_seed(0)  # in a few others a relu's input is nearly 0, and its sign another in bfloat16
PICTURES = {
    "frames": torch.randint(0, 256, (3, 4, 84, 84), generator=_RNG, dtype=torch.uint8),
    "sizes that are no multiple": torch.randint(0, 256, (2, 3, 50, 59), generator=_RNG, dtype=torch.uint8),
    "a view of longer stacks": torch.randint(0, 256, (2, 5, 44, 44), generator=_RNG, dtype=torch.uint8)[:, 1:],
    "colours last": torch.randint(0, 256, (2, 44, 48, 3), generator=_RNG, dtype=torch.uint8).movedim(-1, 1),
    "floats": torch.rand(2, 1, 44, 44, generator=_RNG) * 255,
    "one": torch.randint(0, 256, (1, 4, 36, 36), generator=_RNG, dtype=torch.uint8),
}


@pytest.mark.parametrize("x", PICTURES.values(), ids=PICTURES)
def test_results_and_gradients_are_torchs(x: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    net = network(x.shape[1])
    found = found_by(net, x)
    monkeypatch.setattr(convolutions, "supports", lambda x: False)
    for one, other in zip(found, found_by(net, x), strict=True):
        assert one.shape == other.shape
        assert (one - other).norm() <= 0.02 * other.norm()


def test_without_a_gradient_the_result_is_the_same() -> None:
    net, x = network(4), PICTURES["frames"]
    expected, *_ = found_by(net, x)
    with torch.no_grad(), learning_in("bf16"), torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(net(x).float(), expected)


@pytest.mark.parametrize("stride", [1, 2, 3, 8])
def test_any_stride_of_the_first_one(stride: int, monkeypatch: pytest.MonkeyPatch) -> None:
    net, x = network(2, stride), torch.randint(0, 256, (2, 2, 97, 90), dtype=torch.uint8)
    found = found_by(net, x)
    monkeypatch.setattr(convolutions, "supports", lambda x: False)
    for one, other in zip(found, found_by(net, x), strict=True):
        assert (one - other).norm() <= 0.02 * other.norm()


def test_nan_stays_nan() -> None:
    x = torch.rand(2, 4, 84, 84)
    x[0, 0, 40, 40] = torch.nan
    y = found_by(network(4), x)[0]
    assert y[0].isnan().any()
    assert y[1].isfinite().all()


def test_it_is_for_learning_in_bfloat16_alone() -> None:
    x = PICTURES["frames"]
    assert not convolutions.supports(x)
    with learning_in("bf16"):
        assert convolutions.supports(x)
        assert not convolutions.supports(torch.rand(1, 4, 84, 84, requires_grad=True)), "it gives no dL/dx"
        with torch.inference_mode():
            assert not convolutions.supports(x)
