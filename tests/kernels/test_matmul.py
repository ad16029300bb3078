"""Matrix products: what torch computes, forwards and backwards, by whichever library."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from rlframe.kernels import matmul
from rlframe.kernels.device import has_bf16_units, learning_in
from rlframe.kernels.matmul import linear
from rlframe.models.network import Layers

SIZES = [(256, 256, 256), (256, 70, 1), (300, 17, 260), (260, 70, 256), (4, 8, 3), (1, 64, 64), (1024, 64, 64)]
needs_units = pytest.mark.skipif(not has_bf16_units(), reason="a CPU without units for bfloat16")
needs_one_dnn = pytest.mark.skipif(matmul._LINEAR is None, reason="torch was built without oneDNN")


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("k", [(), (2,)], ids=["one", "two"])
@pytest.mark.parametrize(("n", "i", "o"), SIZES)
def test_layers_and_their_gradients_are_those_of_double_precision(n: int, i: int, o: int, k: tuple[int, ...]) -> None:
    given = numbers(*k, n, i), numbers(*k, o, i, seed=1), numbers(*k, o, seed=2)
    gradient, found = numbers(*k, n, o, seed=3), []
    for dtype in (torch.float32, torch.float64):
        x, weight, bias = (each.to(dtype, copy=True).requires_grad_() for each in given)
        y = linear(x, weight, bias)
        y.backward(gradient.to(dtype))
        found.append([each.double() for each in (y.detach(), x.grad, weight.grad, bias.grad)])  # type: ignore[union-attr]
    for ours, exact in zip(*found, strict=True):
        torch.testing.assert_close(ours, exact, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("lead", [(256,), (32, 8)])
def test_linear_has_the_gradients_of_torch(lead: tuple[int, ...]) -> None:
    gradients = []
    for function in (linear, F.linear):
        x, weight, bias = (each.requires_grad_() for each in (numbers(*lead, 128), numbers(96, 128), numbers(96)))
        function(x, weight, bias).square().mean().backward()
        gradients.append([x.grad, weight.grad, bias.grad])
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-4, atol=1e-5)


@needs_one_dnn
@pytest.mark.parametrize(("is_intel", "n_calls"), [(False, 1), (True, 0)])
def test_large_float32_products_take_the_library_that_is_fast_on_the_processor(
    monkeypatch: pytest.MonkeyPatch, is_intel: bool, n_calls: int
) -> None:
    calls = []
    monkeypatch.setattr(matmul, "_IS_INTEL", is_intel)
    fast = matmul._LINEAR
    assert fast is not None
    monkeypatch.setattr(matmul, "_LINEAR", lambda *arguments: calls.append(1) or fast(*arguments))
    linear(numbers(256, 256), numbers(256, 256), numbers(256))
    assert len(calls) == n_calls
    linear(numbers(8, 256), numbers(256, 256), numbers(256))  # small
    linear(*(numbers(*shape).double() for shape in ((256, 256), (256, 256), (256,))))
    assert len(calls) == n_calls


@pytest.mark.same_bits("transformer")
@pytest.mark.parametrize(("i", "o"), [(256, 256), (3136, 512), (512, 6), (64, 64)])
def test_rows_acted_for_keep_their_bits_however_many_there_are(i: int, o: int) -> None:
    weight, bias, x = numbers(o, i), numbers(o), numbers(256, i)
    with torch.inference_mode():
        together = linear(x, weight, bias)
        apart = torch.cat([linear(part, weight, bias) for part in x.split(4)])
    assert torch.equal(together, apart)


@needs_units
@pytest.mark.parametrize("k", [(), (2,)], ids=["one", "two"])
def test_learning_in_bf16_rounds_the_factors_of_large_products_and_acting_does_not(k: tuple[int, ...]) -> None:
    x, weight, bias = numbers(*k, 256, 96), numbers(*k, 64, 96, seed=1).requires_grad_(), numbers(*k, 64, seed=2)
    exact = linear(x, weight, bias)
    with torch.inference_mode():
        acting = linear(x, weight, bias)
    with learning_in("bf16"):
        found = linear(x, weight, bias)
        found.square().mean().backward()
        with torch.inference_mode():
            assert torch.equal(linear(x, weight, bias), acting), "acting rounds nothing"
        for small in ((numbers(512, 48), numbers(64, 48)), (numbers(128, 64), numbers(64, 64))):
            torch.testing.assert_close(linear(*small, None), F.linear(*small), rtol=1e-5, atol=1e-5)
    assert found.dtype == torch.float32
    assert not torch.equal(found, exact)
    assert (found - exact).norm() < 0.01 * exact.norm()
    assert weight.grad is not None
    expected = (2 / exact.numel()) * exact.detach().mT @ x
    assert (weight.grad - expected).norm() < 0.01 * expected.norm()


@pytest.mark.gpu
def test_a_gpu_multiplies_about_the_same_in_bf16() -> None:
    x, weight, bias = (each.cuda() for each in (numbers(1024, 512), numbers(512, 512, seed=1), numbers(512, seed=2)))
    exact = linear(x, weight, bias)
    with learning_in("bf16"):
        rounded = linear(x, weight, bias)
    assert 0 < (rounded - exact).norm() < 3e-2 * exact.norm()


def test_without_gradients_the_result_is_the_same_as_with() -> None:
    x, weight, bias = numbers(256, 256), numbers(256, 256).requires_grad_(), numbers(256)
    with torch.no_grad():
        without = linear(x, weight, bias)
    assert torch.equal(without, linear(x, weight, bias).detach())


@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=needs_units)])
@pytest.mark.parametrize("lead", [(), (2,)])
@pytest.mark.parametrize("size", [16, 256])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_what_is_not_a_number_stays_so_through_relu(
    precision: str, lead: tuple[int, ...], size: int, sign: float
) -> None:
    x, weight, bias = numbers(*lead, 256, size), numbers(*lead, size, size), numbers(*lead, size)
    nan_x, nan_weight = x.clone(), weight.clone()
    nan_x[..., 3, 3] = nan_weight[..., 3, 3] = sign * torch.nan
    with learning_in(precision), torch.no_grad():
        assert Layers([{"weight": weight, "bias": bias}] * 2, ("relu", "relu"))(nan_x)[..., 3, :].isnan().all()
        first, then = {"weight": nan_weight, "bias": bias}, {"weight": weight, "bias": bias}
        assert Layers([first, then], ("relu", "relu"))(x).isnan().all()
