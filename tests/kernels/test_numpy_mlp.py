"""Layers in NumPy compute what those in torch do, forwards and backwards."""

import numpy as np
import pytest
import torch

from rlframe.kernels import mlp, numpy_mlp

SIZES = [(7, 5), (5, 4), (4, 2)]


def network() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(o, i, generator=generator), torch.randn(o, generator=generator)) for i, o in SIZES]


def test_the_activations_are_the_same() -> None:
    assert set(numpy_mlp.ACTIVATIONS) == set(mlp.ACTIVATIONS)


@pytest.mark.parametrize("name", sorted(mlp.ACTIVATIONS))
def test_output_and_gradients_are_those_of_autograd(name: str) -> None:
    activations, parts = (name, name, name), network()
    x = torch.randn(6, 7, generator=torch.Generator().manual_seed(1), requires_grad=True)
    for parameter in (p for pair in parts for p in pair):
        parameter.requires_grad_()
    expected = x
    for (weight, bias), activation in zip(parts, activations, strict=True):
        expected = mlp.ACTIVATIONS[activation].plain(expected @ weight.t() + bias)
    gradient = torch.randn(6, 2, generator=torch.Generator().manual_seed(2))
    expected.backward(gradient)
    in_numpy = [(weight.detach().numpy(), bias.detach().numpy()) for weight, bias in parts]
    y, trace = numpy_mlp.forward(x.detach().numpy(), in_numpy, activations)
    torch.testing.assert_close(torch.from_numpy(y), expected.detach())
    for i, of_affine in numpy_mlp.backward(gradient.numpy().copy(), activations, trace):
        assert of_affine.dtype == np.float32
        torch.testing.assert_close(torch.from_numpy(of_affine.T @ trace.seen[i]), parts[i][0].grad)
        torch.testing.assert_close(torch.from_numpy(of_affine.sum(0)), parts[i][1].grad)
    torch.testing.assert_close(torch.from_numpy(of_affine @ trace.weights[0]), x.grad)
