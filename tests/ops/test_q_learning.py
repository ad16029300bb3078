"""Losses of Q-learning against numbers worked out by hand, and against their definitions by brute force."""

import math

import pytest
import torch

from rlframe.ops.q_learning import (
    categorical_loss,
    expected_loss,
    log_policy_bonus,
    project,
    quantile_loss,
    rescale,
    soft_values,
    unscale,
)


def t(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers)


def test_the_td_loss_is_quadratic_within_one_and_linear_beyond() -> None:
    q, target_q = t(1.0, 1.0, 1.0), t(2.0, 10.0, 10.0)
    values, action = torch.stack([q, q + 7], -1).requires_grad_(), torch.zeros(3, dtype=torch.int64)
    loss, error, taken = expected_loss(values, action, target_q, t(0.5, 1.0, 1.0), t(0.5, 0.5, 0.0))  # to 1.5, 6, 1
    (gradients,) = torch.autograd.grad(loss.sum(), values)
    gradient = gradients[:, 0]
    assert torch.equal(taken, q)
    assert not gradients[:, 1].any()
    torch.testing.assert_close(loss.detach(), t(0.125, 4.5, 0.0))
    torch.testing.assert_close(error, t(0.5, 5.0, 0.0))
    torch.testing.assert_close(gradient, t(-0.5, -1.0, 0.0))  # a large error has a gradient, of size 1


def test_no_gradient_flows_into_the_target() -> None:
    q, target = t(1.0)[None].requires_grad_(), t(2.0).requires_grad_()
    expected_loss(q, torch.tensor([0]), target, t(0.0), t(1.0))[0].sum().backward()
    assert target.grad is None


def test_a_return_between_two_atoms_is_shared_by_distance() -> None:
    # z = 0, 1, 2; all mass on z = 1; G + γ z = 0.5 + 0.9 = 1.4: 0.6 to atom 1 and 0.4 to atom 2
    projected = project(t(0.0, 1.0, 0.0)[None], t(0.5), t(0.9), 0.0, 2.0)
    torch.testing.assert_close(projected, t(0.0, 0.6, 0.4)[None])


def test_a_return_on_an_atom_stays_whole_and_beyond_the_range_goes_to_its_end() -> None:
    p = t(0.2, 0.3, 0.5)[None].expand(4, 3)
    projected = project(p, t(0.0, 1.0, 9.0, -9.0), t(1.0, 0.0, 1.0, 1.0), 0.0, 2.0)
    expected = [[0.2, 0.3, 0.5], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0], [1.0, 0.0, 0.0]]
    torch.testing.assert_close(projected, torch.tensor(expected))


def test_rounding_puts_no_mass_beyond_the_last_atom() -> None:
    wrong = []
    for n_atoms in (11, 51, 101):
        for v_max in range(1, 400):
            logits = torch.full((1, n_atoms), 0.0)
            _, error = categorical_loss(logits, logits, t(float(v_max)), t(0.0), -v_max, v_max)
            if not abs(float(error) - math.log(n_atoms)) < 1e-4:  # all mass at the last atom, against 1 / n
                wrong.append((n_atoms, v_max, float(error)))
    assert not wrong


def test_a_return_that_is_nan_makes_its_own_row_nan_and_no_other() -> None:
    logits, target = torch.zeros(2, 3, requires_grad=True), torch.zeros(2, 3)
    loss, _ = categorical_loss(logits, target, t(math.nan, 1.0), t(0.9, 0.0), 0.0, 2.0)
    assert loss.isnan().tolist() == [True, False], "the update is then skipped"


def test_projection_keeps_all_mass_and_the_mean_within_the_range() -> None:
    generator = torch.Generator().manual_seed(0)
    p = torch.rand(100, 51, generator=generator).softmax(-1)
    return_, bootstrap = torch.rand(100, generator=generator), torch.full((100,), 0.9)
    projected = project(p, return_, bootstrap, -10.0, 10.0)
    support = torch.linspace(-10, 10, 51)
    torch.testing.assert_close(projected.sum(-1), torch.ones(100))
    torch.testing.assert_close(projected @ support, return_ + 0.9 * (p @ support), rtol=0, atol=1e-4)


def test_the_categorical_loss_is_cross_entropy_and_its_error_the_divergence() -> None:
    logits = t(0.0, math.log(3.0))[None]  # probabilities 1/4, 3/4
    loss, error = categorical_loss(
        logits.requires_grad_(), t(5.0, 1.0)[None], t(0.5), t(0.0), 0.0, 1.0
    )  # target 1/2, 1/2
    cross_entropy = -0.5 * math.log(0.25) - 0.5 * math.log(0.75)
    (gradient,) = torch.autograd.grad(loss.sum(), logits)
    torch.testing.assert_close(loss.detach(), t(cross_entropy))
    torch.testing.assert_close(error, t(cross_entropy - math.log(2)))
    torch.testing.assert_close(gradient, t(0.25 - 0.5, 0.75 - 0.5)[None])  # p - target


def test_the_quantile_loss_by_hand() -> None:
    # θ = 0, 2 at τ = 1/4, 3/4; one target sample 1 (after termination: G): u = 1 and -1, Huber 1/2 each.
    loss, error = quantile_loss(t(0.0, 2.0)[None], t(7.0, 9.0)[None], t(1.0), t(0.0))
    torch.testing.assert_close(loss, t(0.25 * 0.5 + 0.25 * 0.5))
    torch.testing.assert_close(error, t(0.0))


def test_the_quantile_loss_is_least_at_the_quantiles() -> None:
    samples = torch.linspace(0, 100, 1001)
    theta = torch.zeros(1, 4, requires_grad=True)
    optimizer = torch.optim.SGD([theta], 50.0)
    for _ in range(600):
        optimizer.zero_grad()
        quantile_loss(theta, samples[None], t(0.0), t(1.0))[0].sum().backward()
        optimizer.step()
    torch.testing.assert_close(theta.detach(), t(12.5, 37.5, 62.5, 87.5)[None], rtol=0, atol=0.5)


@pytest.mark.parametrize("x", [0.0, 0.5, -0.5, 3.0, -100.0, 1e4])
def test_unscaling_undoes_rescaling(x: float) -> None:
    torch.testing.assert_close(unscale(rescale(t(x))), t(x), rtol=1e-4, atol=1e-5)


def test_rescaling_by_hand() -> None:
    torch.testing.assert_close(rescale(t(3.0, -8.0)), t(1.003, -2.008))


def test_soft_values_of_two_actions_are_those_worked_out_by_hand() -> None:
    # Q = 0, τ ln 3 and τ = 1/2: π = 1/4, 3/4; τ logsumexp(Q / τ) = τ ln 4, and so with quantiles around the same means
    tau = 0.5
    q = t(0.0, tau * math.log(3))[None]
    torch.testing.assert_close(soft_values(q.unsqueeze(-1), q, tau), t(tau * math.log(4))[None])
    quantiles = torch.stack([q - 1, q + 1], -1)
    expected = tau * math.log(4) + t(-1.0, 1.0)[None]
    torch.testing.assert_close(soft_values(quantiles, q, tau), expected)
    bonus = log_policy_bonus(q.expand(2, 2), torch.tensor([0, 1]), tau, -0.2)
    torch.testing.assert_close(bonus, t(-0.2, tau * math.log(0.75)))  # τ ln 1/4 = -0.69 is clipped


def test_a_forbidden_action_has_no_part_in_soft_values() -> None:
    values = t(1.0, 2.0, 7.0)[None]
    allowed = values.masked_fill(torch.tensor([False, False, True]), -math.inf)
    found = soft_values(values.unsqueeze(-1), allowed, 0.03)
    torch.testing.assert_close(found, soft_values(values[:, :2].unsqueeze(-1), values[:, :2], 0.03))


def test_the_loss_of_quantiles_at_drawn_fractions_is_that_worked_out_by_hand() -> None:
    # targets 1 + 0.5 (0, 4) = 1, 3; θ = 2 at τ = 0.9 and 3 at 0.25, in two rows of which the second has other fractions
    theta, tau = t(2.0, 3.0).expand(2, 2).requires_grad_(), torch.tensor([[0.9, 0.25], [0.5, 0.5]])
    loss, error = quantile_loss(theta, t(0.0, 4.0).expand(2, 2), t(1.0, 1.0), t(0.5, 0.5), tau=tau)
    # u = -1, 1 and -2, 0; L = 0.5, 0.5 and 1.5, 0; the weights are 1 - τ below and τ above
    first = (0.1 * 0.5 + 0.9 * 0.5) / 2 + 0.75 * 1.5 / 2
    torch.testing.assert_close(loss.detach(), t(first, (0.25 + 0.25) / 2 + 0.75 / 2))
    torch.testing.assert_close(error, t((1.0 + 1.0 + 2.0 + 0.0) / 4, 1.0))
