"""Denormals: zero inside the context and in Adam's steps on a CPU, and as they were everywhere else."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from rlframe.kernels.device import flushes_denormals, flushing_denormals
from rlframe.optimizers import AdamConfig
from rlframe.updates.optimizer_step import OptimizerStep, flushing_for, make_optimizer_step
from rlframe.updates.progress import Progress
from rlframe.updates.schedules import Schedules

LEAST_NORMAL, DENORMAL = torch.finfo(torch.float32).tiny, 1e-39


@pytest.fixture(autouse=True)
def _supported() -> None:
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor has no such setting")
    torch.set_flush_denormal(False)


def times_one(number: float) -> float:
    return float(torch.tensor(number) * torch.ones(()))


def test_denormals_are_zero_inside_and_normal_numbers_untouched() -> None:
    assert times_one(DENORMAL) != 0
    with flushing_denormals():
        assert [times_one(x) for x in (DENORMAL, -DENORMAL)] == [0.0, 0.0]
        assert [times_one(x) for x in (LEAST_NORMAL, -2 * LEAST_NORMAL)] == [LEAST_NORMAL, -2 * LEAST_NORMAL]
    assert times_one(DENORMAL) != 0


def test_an_error_inside_leaves_the_setting_as_it_was() -> None:
    with pytest.raises(ZeroDivisionError), flushing_denormals():
        raise ZeroDivisionError
    assert not flushes_denormals()
    assert times_one(DENORMAL) != 0


def test_a_user_who_flushes_denormals_still_does_after_it() -> None:
    torch.set_flush_denormal(True)
    try:
        with flushing_denormals():
            assert flushes_denormals()
        assert flushes_denormals()
    finally:
        torch.set_flush_denormal(False)


def made_with(weight: nn.Parameter, epsilon: float) -> OptimizerStep:
    config = SimpleNamespace(learning_rate=1e-3, max_grad_norm=float("inf"), optimizer=AdamConfig(epsilon=epsilon))
    return make_optimizer_step([weight], Schedules(config, 1000, Progress()))


def after_death(epsilon: float) -> tuple[Tensor, Tensor, bool]:
    """Weights and first moments of a step's network, half of which has a gradient at its first step only.

    Also whether the steps flushed denormals.
    """
    weight = nn.Parameter(torch.linspace(-1, 1, 8))
    step = made_with(weight, epsilon)
    lives = torch.arange(8) < 4
    for i in range(1000):
        step.minimize((weight * (lives | (i == 0))).square().sum())
    return weight.detach(), step.state_dict()["state"][0]["exp_avg"], step.optimizer.flushes


def test_moments_of_dead_units_do_not_become_denormal_and_no_weight_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, moment, flushes = after_death(1e-8)
    assert flushes
    assert ((moment[4:] == 0) | (moment[4:].abs() >= LEAST_NORMAL)).all(), "some kernels stop at 10 times the least"
    assert (moment[4:].abs() < 1e-36).all()
    assert not flushes_denormals()
    monkeypatch.setattr("rlframe.optimizers.moments._LEAST_EPSILON", 1.0)
    plain, decayed, flushes = after_death(1e-8)
    assert not flushes
    assert ((decayed[4:] != 0) & (decayed[4:].abs() < LEAST_NORMAL)).all()
    assert torch.equal(weight, plain)


def test_no_denormal_is_zero_where_epsilon_would_not_cover_it() -> None:
    """A root of 0 without epsilon divides by 0."""
    assert after_death(0.0)[2] is False
    covered, bare = (made_with(nn.Parameter(torch.ones(1)), epsilon) for epsilon in (1e-8, 0.0))
    for steps, flushes in (([covered], True), ([covered, bare], False), ([], True)):
        with flushing_for(steps):
            assert flushes_denormals() is flushes, "as in a compiled update that makes these steps"
