"""Optimizers of torch's kind: stepped with the rate of now, without decay where that is wrong, refused in one line."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from rlframe.core.errors import ConfigError
from rlframe.optimizers import MuonConfig, OwnConfig
from tests.optimizers.test_optimizers import GRADIENTS, made, parameters, set_gradients


def test_an_own_optimizer_is_stepped_with_the_rate_of_now() -> None:
    ours, same = made("own"), parameters()
    torchs = torch.optim.NAdam(same, 7.0, momentum_decay=0.01)
    for rate, gradient in zip((0.1, 0.3, 0.0, 0.2), GRADIENTS, strict=True):
        set_gradients(ours.parameters, gradient)
        set_gradients(same, gradient)
        ours.step(rate)
        torchs.param_groups[0]["lr"] = rate
        torchs.step()
        torch.testing.assert_close(ours.parameters, same)


class PassesOn(torch.optim.AdamW):
    """Its signature does not say that it decays."""

    def __init__(self, params: Any, **others: Any) -> None:
        super().__init__(params, **others)


class Counting(torch.optim.SGD):
    """Counts its steps in its group, as some optimizers do."""

    def __init__(self, params: Any, lr: float, momentum: float = 0.0) -> None:
        super().__init__(params, lr, momentum)
        self.param_groups[0]["n"] = 0

    def step(self, closure: Any = None) -> Any:
        self.param_groups[0]["n"] += 1
        return super().step(closure)


def test_a_loaded_own_optimizer_counts_on_with_the_arguments_of_its_config() -> None:
    before, after = (
        OwnConfig(name=f"{__name__}:Counting", kwargs=kwargs).make(parameters()) for kwargs in ({"momentum": 0.9}, {})
    )
    for gradient in GRADIENTS:
        set_gradients(before.parameters, gradient)
        before.step(0.1)
    after.load_state_dict(before.state_dict())
    group = after.optimizer.param_groups[0]
    assert (group["n"], group["momentum"]) == (len(GRADIENTS), 0.0)


@pytest.mark.parametrize(
    "config",
    [
        MuonConfig(weight_decay=0.5, epsilon=1e-8),
        OwnConfig(name="torch.optim:AdamW"),
        OwnConfig(name="torch.optim:SGD", kwargs={"weight_decay": 0.5}),
        OwnConfig(name="torch.optim:Rprop"),  # has none
        OwnConfig(name=f"{__name__}:PassesOn"),
    ],
    ids=str,
)
def test_without_decay_a_parameter_without_gradient_stays(config: Any) -> None:
    made = config.make_without_decay(one := [nn.Parameter(torch.ones(2, 2))])
    set_gradients(one, 0.0)
    made.step(0.1)
    assert torch.equal(one[0], torch.ones(2, 2))


@pytest.mark.parametrize(
    ("name", "kwargs", "message"),
    [
        ("", {}, "needs algo.optimizer.name=module:Class"),
        ("torch.optim:Adm", {}, "has no Adm; did you mean Adam"),
        ("torch.optm:Adam", {}, "No module named 'torch.optm'"),
        ("math:pi", {}, "is no subclass of torch.optim.Optimizer"),
        ("torch.optim:LBFGS", {}, "computes the loss several times a step"),
        ("torch.optim:SparseAdam", {}, "is for sparse gradients"),
        ("torch.optim:NAdam", {"beta": 1}, "unexpected keyword argument 'beta'.*algo.optimizer.kwargs.name=value"),
        ("torch.optim:NAdam", {"eps": -1.0}, "Invalid epsilon value: -1.0"),
        ("torch.optim:Adam", {"lr": 5}, "kwargs.lr=5: the learning rate is set at each step; use algo.learning_rate"),
        ("torch.optim:Adam", {"params": []}, r"kwargs.params=\[\]: the parameters are those of the networks"),
        ("torch.optim:Adam", {"capturable": True}, "kwargs.capturable=True: steps of .* not part of CUDA graphs"),
        ("torch.optim:SGD", {"maximize": True}, "kwargs.maximize=True: losses are minimized"),
        ("torch.optim:SGD", {"differentiable": True}, "kwargs.differentiable=True: no gradient passes through a step"),
        ("torch.optim:SGD", {"momentum": math.nan}, "kwargs.momentum=nan: it is not a number"),
        ("torch.optim:SGD", {"fused": True, "foreach": True}, "`fused` and `foreach` cannot be `True` together"),
        ("torch.optim:Adam", {"betas": [0.9]}, "torch.optim:Adam: list index out of range; its arguments are"),
        ("torch.optim:Adam", {"betas": [0.9, 0.9, 0.9]}, "too many values to unpack"),
        ("torch.optim:Adam", {"weight_decay": True}, "Boolean alpha only supported"),
        ("torch.optim:Muon", {}, "Muon only supports 2D parameters"),
    ],
)
def test_an_own_optimizer_that_cannot_be_made_is_refused(name: str, kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        OwnConfig(name=name, kwargs=kwargs).make(parameters())
    assert "\n" not in str(error.value)
    assert "algo.optimizer" in str(error.value)
