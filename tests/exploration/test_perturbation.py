"""Noise in the parameters of linear layers: what a row sees, by its scale."""

import copy

import numpy as np
import pytest
import torch

from rlframe.exploration.parameter_noise import Perturbation
from rlframe.models.network import Network


def made(activation: str = "relu", norm: str = "none") -> tuple[Network, Perturbation]:
    torch.manual_seed(0)
    mlp = Network([3, 8, 6, 2], activation, norm=norm)
    perturbation = Perturbation(mlp.layers)
    perturbation.resample(np.random.default_rng(0))
    return mlp, perturbation


@pytest.mark.parametrize(("activation", "norm"), [("tanh", "layer"), ("relu", "none"), ("elu", "layer")])
def test_each_row_sees_the_parameters_perturbed_by_its_scale(activation: str, norm: str) -> None:
    mlp, perturbation = made(activation, norm)
    x, scales = torch.randn(4, 3), [0.0, 0.1, 0.5, 2.0]
    with torch.inference_mode():
        found = perturbation(mlp.layers, x, torch.tensor(scales).unsqueeze(-1))
        for row, scale in enumerate(scales):
            perturbed = copy.deepcopy(mlp)
            for parameter, noise in zip(perturbed.layers.flat, perturbation.buffers(), strict=True):
                parameter.data += scale * noise
            torch.testing.assert_close(found[row], perturbed(x)[row], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(found[0], mlp(x)[0], rtol=1e-6, atol=1e-6)  # scale 0 is the clean network


def test_the_learned_parameters_stay_clean_and_may_change() -> None:
    mlp, perturbation = made()
    before = [parameter.clone() for parameter in mlp.parameters()]
    perturbation.resample(np.random.default_rng(1))
    assert all(torch.equal(a, b) for a, b in zip(before, mlp.parameters(), strict=True))
    assert not list(perturbation.parameters())
    x, scale = torch.ones(1, 3), torch.full((1, 1), 0.1)
    with torch.inference_mode():
        one = perturbation(mlp.layers, x, scale)
        mlp.layers.flat[0].data += 1.0
        assert not torch.equal(perturbation(mlp.layers, x, scale), one)


def test_noise_is_standard_normal_in_every_parameter() -> None:
    torch.manual_seed(0)
    perturbation = Perturbation(Network([50, 60, 40], "relu").layers)
    perturbation.resample(np.random.default_rng(0))
    drawn = torch.cat([noise.flatten() for noise in perturbation.buffers()])
    assert drawn.mean().item() == pytest.approx(0.0, abs=0.05)
    assert drawn.std().item() == pytest.approx(1.0, rel=0.03)


@pytest.mark.parametrize("norm", ["none", "layer", "batch"])
def test_numpy_evaluates_as_torch(norm: str) -> None:
    mlp, perturbation = made(norm=norm)
    x, scale = torch.randn(4, 3), torch.tensor([[0.0], [0.1], [0.2], [0.3]])
    with torch.inference_mode():
        expected = perturbation(mlp.layers, x, scale)
    found = perturbation.numpy_forward(mlp.layers)(x.numpy(), scale.numpy())
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
