"""Optimizers whose steps are launched and not waited for: torch's own steps, and none where they are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rlframe.algos.optimizers import make_optimizer

RATE = torch.tensor(0.1)
YES, NO = torch.tensor(1.0), torch.tensor(0.0)
either = pytest.mark.parametrize("name", ["adam", "rmsprop"])


def made(name: str) -> tuple[list[nn.Parameter], Any]:
    parameters = [nn.Parameter(torch.arange(1.0, 4.0)), nn.Parameter(torch.ones(2, 2))]
    return parameters, make_optimizer(name, parameters, 0.1, 1e-5)


@torch.no_grad()
def advance(parameters: list[nn.Parameter], optimizer: Any, gradient: float, refused: Tensor) -> None:
    for parameter in parameters:
        parameter.grad = gradient * parameter
    optimizer.advance(RATE, refused)


@either
def test_steps_that_are_launched_are_torchs_own(name: str) -> None:
    (parameters, optimizer), (same, torchs) = made(name), made(name)
    for gradient in (1.0, -3.0, 0.5, 2.0):
        advance(parameters, optimizer, gradient, NO)
        for parameter in same:
            parameter.grad = (gradient * parameter).detach()
        torchs.step()
        torch.testing.assert_close(parameters, same, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(optimizer.state_dict()["state"], torchs.state_dict()["state"], rtol=1e-5, atol=1e-6)


@either
@pytest.mark.parametrize("at", [0, 2])
def test_a_step_that_is_refused_is_as_if_it_were_not_made(name: str, at: int) -> None:
    (parameters, optimizer), (same, other) = made(name), made(name)
    for i in range(4):
        if i == at:
            advance(parameters, optimizer, torch.nan, YES)
        advance(parameters, optimizer, i - 1.5, NO)
        advance(same, other, i - 1.5, NO)
    torch.testing.assert_close(parameters, same, rtol=0, atol=0)
    torch.testing.assert_close(optimizer.state_dict()["state"], other.state_dict()["state"], rtol=0, atol=0)


def test_an_unknown_optimizer_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="optimizer='sgd' is unknown; use adam or rmsprop"):
        make_optimizer("sgd", [nn.Parameter(torch.zeros(1))], 0.1, 1e-5)
