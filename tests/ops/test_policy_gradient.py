"""Statistics over valid rows only."""

import math

import pytest
import torch

from rlframe.ops.policy_gradient import explained_variance, masked_mean, masked_normalize, mean_weights

X = torch.tensor([[1.0, 5.0], [3.0, 1000.0]])
VALID = torch.tensor([[True, True], [True, False]])


def test_mean_ignores_rows_that_are_not_valid() -> None:
    assert masked_mean(X, VALID) == 3


def test_mean_of_no_rows_is_zero() -> None:
    assert masked_mean(X, torch.zeros_like(VALID)) == 0


def test_mean_sends_no_gradient_to_rows_that_are_not_valid() -> None:
    x = torch.tensor([[1.0, 5.0], [3.0, math.nan]], requires_grad=True)
    masked_mean(x, VALID).backward()
    assert torch.allclose(x.grad, torch.tensor([[1 / 3, 1 / 3], [1 / 3, 0.0]]))


def test_normalize_has_zero_mean_and_unit_variance_over_valid_rows() -> None:
    scale = (8 / 3) ** 0.5
    assert torch.allclose(masked_normalize(X, VALID), torch.tensor([[-2.0, 2.0], [0.0, 0.0]]) / scale)


def test_normalize_over_one_dimension_treats_each_row_alone() -> None:
    x, valid = torch.randn(3, 9), torch.rand(3, 9) > 0.3
    apart = torch.stack([masked_normalize(row, marks) for row, marks in zip(x, valid, strict=True)])
    assert torch.allclose(masked_normalize(x, valid, dim=1), apart, atol=1e-6)


def test_mean_weights_give_the_masked_mean() -> None:
    weights = mean_weights(VALID.flatten())
    assert torch.dot(X.flatten(), weights) == masked_mean(X, VALID)
    assert not mean_weights(torch.zeros(4, dtype=torch.bool)).any()


def test_normalize_of_a_constant_is_zero() -> None:
    assert torch.equal(masked_normalize(torch.full((2, 2), 7.0), VALID), torch.zeros(2, 2))


def test_explained_variance_of_a_perfect_prediction_is_one() -> None:
    assert explained_variance(X, X, VALID) == 1


def test_explained_variance_of_a_constant_prediction_is_zero() -> None:
    assert explained_variance(torch.zeros_like(X), X, VALID).abs() < 1e-6


def test_explained_variance_of_a_constant_target_is_zero() -> None:
    assert explained_variance(X, torch.ones_like(X), VALID) == 0


def test_explained_variance_by_hand() -> None:
    prediction = torch.tensor([[2.0, 4.0], [3.0, 0.0]])
    assert torch.allclose(explained_variance(prediction, X, VALID), torch.tensor(1 - 2 / 8))


def test_different_shapes_raise_an_error() -> None:
    with pytest.raises(ValueError, match="same shape"):
        masked_mean(X, VALID[0])
