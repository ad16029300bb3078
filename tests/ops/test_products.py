"""Matrix products: what torch computes, forwards and backwards, by whichever library."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from rlframe.ops import products
from rlframe.ops.precision import learning_in
from rlframe.ops.products import affine, as_multiplied, linear, product, weight_gradient

SIZES = [(256, 256, 256), (300, 17, 260), (260, 70, 256), (4, 8, 3), (1, 64, 64), (1024, 64, 64)]
needs_one_dnn = pytest.mark.skipif(products._LINEAR is None, reason="torch was built without oneDNN")


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("n", "i", "o"), SIZES)
def test_products_are_those_of_double_precision(n: int, i: int, o: int) -> None:
    x, weight, bias, gradient = numbers(n, i), numbers(o, i, seed=1), numbers(o, seed=2), numbers(n, o, seed=3)
    found = [affine(x, weight, bias), product(gradient, weight), weight_gradient(gradient, x)]
    x, weight, bias, gradient = x.double(), weight.double(), bias.double(), gradient.double()
    for ours, exact in zip(found, [x @ weight.t() + bias, gradient @ weight, gradient.t() @ x], strict=True):
        torch.testing.assert_close(ours.double(), exact, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("lead", [(256,), (32, 8)])
def test_linear_has_the_gradients_of_torch(lead: tuple[int, ...]) -> None:
    gradients = []
    for function in (linear, F.linear):
        x, weight, bias = (each.requires_grad_() for each in (numbers(*lead, 128), numbers(96, 128), numbers(96)))
        function(x, weight, bias).square().mean().backward()
        gradients.append([x.grad, weight.grad, bias.grad])
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-4, atol=1e-5)


@needs_one_dnn
def test_large_float32_products_take_the_fast_library(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    fast = products._LINEAR
    assert fast is not None
    monkeypatch.setattr(products, "_LINEAR", lambda *arguments: calls.append(1) or fast(*arguments))
    product(numbers(256, 256), numbers(256, 256))
    assert len(calls) == 1
    product(numbers(8, 256), numbers(256, 8))  # small
    product(numbers(256, 256).double(), numbers(256, 256).double())
    assert len(calls) == 1


def test_rows_acted_for_keep_their_bits_however_many_there_are() -> None:
    weight, bias, x = numbers(256, 256), numbers(256), numbers(256, 256)
    with torch.inference_mode():
        together = linear(x, weight, bias)
        apart = torch.cat([linear(part, weight, bias) for part in x.split(4)])
    assert torch.equal(together, apart)


def test_without_gradients_the_result_is_the_same_as_with() -> None:
    x, weight, bias = numbers(256, 256), numbers(256, 256).requires_grad_(), numbers(256)
    with torch.no_grad():
        without = linear(x, weight, bias)
    assert torch.equal(without, linear(x, weight, bias).detach())


def test_a_weight_that_does_not_learn_is_rounded_again_only_when_it_changes() -> None:
    x, weight = numbers(256, 256), numbers(256, 256)
    with learning_in("bf16"):
        _, first = as_multiplied(x, weight)
        assert as_multiplied(x, weight)[1] is first
        torch._foreach_copy_([weight], [numbers(256, 256, seed=1)])
        _, second = as_multiplied(x, weight)
        torch.testing.assert_close(second, numbers(256, 256, seed=1).bfloat16(), rtol=0, atol=0)
        learns = weight.clone().requires_grad_()
        assert as_multiplied(x, learns)[1] is not as_multiplied(x, learns)[1]
