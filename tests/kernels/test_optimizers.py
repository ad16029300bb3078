"""Optimizers: the steps of torch.optim, none where they are refused, and saved states that go on anywhere."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rlframe.kernels.optimizers import OPTIMIZERS, Optimizer

RATE = torch.tensor(0.1)
YES, NO = torch.tensor(1.0), torch.tensor(0.0)
GRADIENTS = (1.0, -3.0, 0.5, 2.0)
TORCHS: dict[str, Any] = {"adam": torch.optim.Adam, "rmsprop": torch.optim.RMSprop}
either = pytest.mark.parametrize("name", ["adam", "rmsprop"])


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.arange(1.0, 4.0)), nn.Parameter(torch.ones(2, 2))]


def made(name: str) -> Optimizer:
    return OPTIMIZERS[name](parameters(), 1e-5)


def set_gradients(to: list[nn.Parameter], gradient: float, n: int = 2) -> None:
    for parameter in to:
        parameter.grad = None
    for parameter in to[:n]:
        parameter.grad = (gradient * parameter).detach()


def advance(optimizer: Optimizer, gradient: float, refused: Tensor | None = None, n: int = 2) -> None:
    set_gradients(optimizer.parameters, gradient, n)
    optimizer.advance(0.1 if refused is None else RATE, refused)


@either
@pytest.mark.parametrize("launched", [True, False])
def test_steps_are_those_of_torch_optim_also_of_parameters_without_a_gradient(name: str, launched: bool) -> None:
    ours, same = made(name), parameters()
    torchs = TORCHS[name](same, 0.1, eps=1e-5)
    for n, gradient in zip((1, 2, 1, 2), GRADIENTS, strict=True):
        advance(ours, gradient, NO if launched else None, n)
        set_gradients(same, gradient, n)
        torchs.step()
        torch.testing.assert_close(ours.parameters, same, rtol=1e-5, atol=1e-6)
    found, expected = ours.state_dict()["state"], torchs.state_dict()["state"]
    assert found.keys() == expected.keys()
    for i, state in expected.items():
        torch.testing.assert_close(found[i], {key: state[key] for key in found[i]}, rtol=1e-5, atol=1e-6)


@either
@pytest.mark.parametrize("n_before", [0, 2])
def test_states_of_torch_optim_are_gone_on_from(name: str, n_before: int) -> None:
    ours, same = made(name), parameters()
    torchs = TORCHS[name](same, 0.1, eps=1e-5)
    for gradient in GRADIENTS[:n_before]:
        set_gradients(same, gradient)
        torchs.step()
    with torch.no_grad():
        torch._foreach_copy_(ours.parameters, same)
    advance(made(name), 1.0)
    ours.load_state_dict(torchs.state_dict())
    for gradient in GRADIENTS[n_before:]:
        advance(ours, gradient)
        set_gradients(same, gradient)
        torchs.step()
    torch.testing.assert_close(ours.parameters, same, rtol=1e-5, atol=1e-6)


@either
def test_a_loaded_state_is_copied_and_goes_on_to_the_bit(name: str) -> None:
    ours, other = made(name), made(name)
    advance(ours, 1.0)
    saved = copy.deepcopy(ours.state_dict())
    before = copy.deepcopy(saved)
    with torch.no_grad():
        torch._foreach_copy_(other.parameters, ours.parameters)
    other.load_state_dict(saved)
    for each in (ours, other):
        advance(each, -3.0)
    torch.testing.assert_close(other.parameters, ours.parameters, rtol=0, atol=0)
    torch.testing.assert_close(saved["state"], before["state"], rtol=0, atol=0)


@either
def test_a_state_of_other_parameters_is_refused(name: str) -> None:
    ours = made(name)
    one = OPTIMIZERS[name]([nn.Parameter(torch.ones(3))], 1e-5)
    with pytest.raises(ValueError, match="has 1 parameters, this one 2; load the state of the same model"):
        ours.load_state_dict(one.state_dict())
    wide = OPTIMIZERS[name]([nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(5))], 1e-5)
    advance(wide, 1.0)
    before = copy.deepcopy(ours.state_dict())
    with pytest.raises(ValueError, match=r"of parameter 1 is \[5\], not \[2, 2\]; load a state of the same model"):
        ours.load_state_dict(wide.state_dict())
    torch.testing.assert_close(ours.state_dict(), before, rtol=0, atol=0)


def test_a_state_of_another_optimizer_is_refused() -> None:
    other = made("rmsprop")
    advance(other, 1.0)
    with pytest.raises(ValueError, match="no exp_avg of parameter 0, only step, square_avg: it is not Adam"):
        made("adam").load_state_dict(other.state_dict())


def test_an_optimizer_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="Adam got no parameters"):
        OPTIMIZERS["adam"]([], 1e-5)


@either
@pytest.mark.parametrize("at", [0, 2])
def test_a_step_that_is_refused_is_as_if_it_were_not_made(name: str, at: int) -> None:
    ours, other = made(name), made(name)
    for i in range(4):
        if i == at:
            advance(ours, torch.nan, YES)
        advance(ours, i - 1.5, NO)
        advance(other, i - 1.5, NO)
    torch.testing.assert_close(ours.parameters, other.parameters, rtol=0, atol=0)
    torch.testing.assert_close(ours.state_dict()["state"], other.state_dict()["state"], rtol=0, atol=0)
