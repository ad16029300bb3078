"""Expectile loss, advantage weights and CQL's gap against numbers worked out by hand."""

import math

import pytest
import torch

from rlframe.ops.offline import advantage_weight, conservative_gap, expectile_loss


def test_the_expectile_loss_weighs_squares_by_their_sign() -> None:
    error = torch.tensor([2.0, -2.0, 0.0], requires_grad=True)
    loss = expectile_loss(error, 0.7)
    torch.testing.assert_close(loss.detach(), torch.tensor([0.7 * 4, 0.3 * 4, 0.0]))
    (gradient,) = torch.autograd.grad(loss.sum(), error)
    torch.testing.assert_close(gradient, torch.tensor([0.7 * 4, -0.3 * 4, 0.0]))


@pytest.mark.parametrize(("expectile", "least"), [(0.5, 2.0), (0.9, 4.2)])
def test_its_minimum_is_the_expectile(expectile: float, least: float) -> None:
    # of 0, 1 and 5: 0.9 (5 - m) = 0.1 (m + m - 1), so m = 4.6 / 1.1
    least = 4.6 / 1.1 if expectile == 0.9 else least
    m = torch.linspace(0, 5, 5001)
    loss = expectile_loss(torch.tensor([0.0, 1.0, 5.0])[:, None] - m, expectile).mean(0)
    assert m[loss.argmin()].item() == pytest.approx(least, abs=1e-3)


def test_weights_grow_with_the_advantage_up_to_the_most() -> None:
    advantage = torch.tensor([-1.0, 0.0, 0.5, 1e6])
    found = advantage_weight(advantage, 2.0, 100.0).tolist()
    assert found == pytest.approx([math.exp(-2), 1.0, math.e, 100.0])
    assert advantage_weight(advantage, 0.0).tolist() == [1.0] * 4


def test_the_gap_is_of_the_sum_over_actions_and_of_drawn_ones_by_their_density() -> None:
    q = torch.tensor([[0.0, math.log(2), -math.inf]])
    assert conservative_gap(q, torch.tensor([1.0])).item() == pytest.approx(math.log(3) - 1)
    density = torch.tensor([[math.log(0.5), math.log(0.25), 0.0]])
    assert conservative_gap(q, torch.tensor([0.0]), density).item() == pytest.approx(math.log(1 / 0.5 + 2 / 0.25))


def test_the_gap_has_no_gradient_where_all_actions_are_equal_but_that_of_the_softmax() -> None:
    q = torch.zeros(1, 4, requires_grad=True)
    (gradient,) = torch.autograd.grad(conservative_gap(q, q[:, 0]).sum(), q)
    assert gradient[0].tolist() == pytest.approx([-0.75, 0.25, 0.25, 0.25])
