"""Heads of state-dependent exploration: the marginal that losses see is that of the noise matrices."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from rlframe.models import numpy_inference
from rlframe.models.heads import StateDependentHead

F, D = 5, 2


def head_for(learn_features: bool = False, log_std: float = -1.0) -> StateDependentHead:
    torch.manual_seed(0)
    head = StateDependentHead(nn.Linear(F, D), log_std, learn_features)
    with torch.no_grad():
        head.log_std += 0.3 * torch.randn(F, D)
    return head


def features(n: int = 3) -> Tensor:
    return torch.randn(n, F, generator=torch.Generator().manual_seed(1))


def test_the_marginal_is_that_of_many_noise_matrices() -> None:
    head, phi = head_for(), features()
    mean, log_std = head(phi).chunk(2, -1)
    torch.testing.assert_close(mean, head.mean(phi))
    sigma = head.log_std.exp()
    for row in range(len(phi)):
        for j in range(D):
            exact = math.sqrt(sum((phi[row, i] * sigma[i, j]).item() ** 2 for i in range(F)) + 1e-6)
            assert log_std[row, j].item() == pytest.approx(math.log(exact), rel=1e-4)
    matrices = torch.randn(40_000, F, D, generator=torch.Generator().manual_seed(2))
    drawn = phi @ (sigma * matrices)
    torch.testing.assert_close(drawn.std(0), log_std.exp(), rtol=0.02, atol=0)


@pytest.mark.parametrize("learn_features", [False, True])
def test_the_standard_deviation_moves_features_only_if_asked(learn_features: bool) -> None:
    head, phi = head_for(learn_features), features().requires_grad_()
    head(phi)[:, D:].sum().backward()
    assert phi.grad is not None
    assert bool(phi.grad.any()) is learn_features
    assert head.log_std.grad is not None


def test_features_of_zero_have_a_finite_gradient() -> None:
    head, phi = head_for(True), torch.zeros(1, F, requires_grad=True)
    head(phi).sum().backward()
    assert head.log_std.grad is not None
    assert head.log_std.grad.isfinite().all()


def test_the_head_in_numpy_is_that_in_torch() -> None:
    head, phi = head_for(), features(4)
    found = numpy_inference.head(head)(phi.numpy())
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, head(phi).detach(), rtol=2e-5, atol=2e-6)
