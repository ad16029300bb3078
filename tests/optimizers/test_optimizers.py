"""Optimizers: the steps of torch.optim, none where they are refused, and saved states that go on anywhere."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from rlframe.algos import dqn
from rlframe.core.errors import ConfigError
from rlframe.experiment.settings import from_flat
from rlframe.models.network import Linear, Norm
from rlframe.optimizers import (
    AdamConfig,
    AdamWConfig,
    MuonConfig,
    Optimizer,
    OwnConfig,
    RAdamConfig,
    RMSPropConfig,
    SGDConfig,
)
from rlframe.record.codec import decode, encode

RATE = torch.tensor(0.1)
YES, NO = torch.tensor(1.0), torch.tensor(0.0)
GRADIENTS = (1.0, -3.0, 0.5, 2.0)
CASES: dict[str, tuple[Any, Any, dict[str, Any]]] = {  # config, torch's class, its arguments
    "adam": (AdamConfig(epsilon=1e-5), torch.optim.Adam, {"eps": 1e-5}),
    "adam_decay": (
        AdamConfig(epsilon=1e-3, betas=(0.8, 0.95), weight_decay=0.1),
        torch.optim.Adam,
        {"eps": 1e-3, "betas": (0.8, 0.95), "weight_decay": 0.1},
    ),
    "adam_without_memory": (
        AdamConfig(epsilon=1e-5, betas=(0.0, 0.0)),
        torch.optim.Adam,
        {"eps": 1e-5, "betas": (0.0, 0.0)},
    ),
    "adamw": (AdamWConfig(epsilon=1e-5, weight_decay=0.3), torch.optim.AdamW, {"eps": 1e-5, "weight_decay": 0.3}),
    "radam": (RAdamConfig(epsilon=1e-5), torch.optim.RAdam, {"eps": 1e-5}),
    "rmsprop": (RMSPropConfig(epsilon=1e-5), torch.optim.RMSprop, {"eps": 1e-5}),
    "rmsprop_momentum": (
        RMSPropConfig(epsilon=1e-2, decay=0.9, momentum=0.5, weight_decay=0.1),
        torch.optim.RMSprop,
        {"eps": 1e-2, "alpha": 0.9, "momentum": 0.5, "weight_decay": 0.1},
    ),
    "sgd": (SGDConfig(), torch.optim.SGD, {}),
    "sgd_momentum": (
        SGDConfig(momentum=0.9, weight_decay=0.1),
        torch.optim.SGD,
        {"momentum": 0.9, "weight_decay": 0.1},
    ),
    "sgd_nesterov": (SGDConfig(momentum=0.9, nesterov=True), torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
}
MUON = MuonConfig(smallest=2, epsilon=1e-5, weight_decay=0.1)
OWN = OwnConfig(name="torch.optim:NAdam", kwargs={"momentum_decay": 0.01})
like_torchs = pytest.mark.parametrize("name", CASES)
moments = pytest.mark.parametrize("name", [*CASES, "muon"])
every = pytest.mark.parametrize("name", [*CASES, "muon", "own"])


def parameters() -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.arange(1.0, 4.0)), nn.Parameter(torch.randn(3, 4))]


def config_of(name: str) -> Any:
    return {"muon": MUON, "own": OWN}[name] if name in ("muon", "own") else CASES[name][0]


def made(name: str) -> Optimizer:
    return config_of(name).make(parameters())


def set_gradients(to: list[nn.Parameter], gradient: float, n: int = 2) -> None:
    for parameter in to:
        parameter.grad = None
    for parameter in to[:n]:
        parameter.grad = (gradient * parameter).detach()


def advance(optimizer: Optimizer, gradient: float, refused: Tensor | None = None, n: int = 2) -> None:
    set_gradients(optimizer.parameters, gradient, n)
    optimizer.step(0.1 if refused is None else RATE, refused)


def kept(state: Any) -> tuple[Any, dict[str, Any]]:
    """A state as a snapshot has it."""
    arrays: dict[str, Any] = {}
    return copy.deepcopy((encode(state, arrays), arrays))


def assert_same(one: Optimizer, other: Any) -> None:
    torch.testing.assert_close(tensors(one.state_dict()), tensors(other), rtol=0, atol=0)


def tensors(state: Any) -> list[Tensor]:
    return [x for x in tree_leaves(state) if isinstance(x, Tensor)]


@like_torchs
@pytest.mark.parametrize("launched", [True, False])
def test_steps_are_those_of_torch_optim_also_of_parameters_without_a_gradient(name: str, launched: bool) -> None:
    ours, same = made(name), parameters()
    torchs = CASES[name][1](same, 0.1, **CASES[name][2])
    for n, gradient in zip((1, 2, 1, 2), GRADIENTS, strict=True):
        advance(ours, gradient, NO if launched else None, n)
        set_gradients(same, gradient, n)
        torchs.step()
        torch.testing.assert_close(ours.parameters, same, rtol=1e-5, atol=1e-6)
    found, expected = ours.state_dict()["state"], torchs.state_dict()["state"]
    for i, state in expected.items():
        held = {key: x for key, x in found[i].items() if key in state}  # torch's SGD counts no steps
        assert {*held} >= {key for key, x in state.items() if x is not None}
        torch.testing.assert_close(held, {key: state[key] for key in held}, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("beta2", [0.9, 0.9999])
def test_radam_is_torchs_also_when_it_becomes_adaptive_after_some_steps(beta2: float) -> None:
    ours = RAdamConfig(betas=(0.8, beta2), epsilon=1e-3, weight_decay=0.1).make(parameters())
    same = parameters()
    torchs = torch.optim.RAdam(same, 0.1, betas=(0.8, beta2), eps=1e-3, weight_decay=0.1)
    for step in range(9):
        advance(ours, 1.0 - step, NO if step % 2 else None)
        set_gradients(same, 1.0 - step)
        torchs.step()
        torch.testing.assert_close(ours.parameters, same, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["adam", "adamw", "radam", "rmsprop_momentum"])
@pytest.mark.parametrize("n_before", [0, 2])
def test_states_of_torch_optim_are_gone_on_from(name: str, n_before: int) -> None:
    ours, same = made(name), parameters()
    torchs = CASES[name][1](same, 0.1, **CASES[name][2])
    for gradient in GRADIENTS[:n_before]:
        set_gradients(same, gradient)
        torchs.step()
    with torch.no_grad():
        torch._foreach_copy_(ours.parameters, same)
    ours.load_state_dict(torchs.state_dict())
    for gradient in GRADIENTS[n_before:]:
        advance(ours, gradient)
        set_gradients(same, gradient)
        torchs.step()
    torch.testing.assert_close(ours.parameters, same, rtol=1e-5, atol=1e-6)


@every
def test_a_loaded_state_is_copied_and_goes_on_to_the_bit(name: str) -> None:
    ours, other = made(name), made(name)
    advance(ours, 1.0)
    saved = decode(*kept(ours.state_dict()))
    with torch.no_grad():
        torch._foreach_copy_(other.parameters, ours.parameters)
    other.load_state_dict(saved)
    for _ in range(2):
        for each in (ours, other):
            advance(each, -3.0)
        torch.testing.assert_close(other.parameters, ours.parameters, rtol=0, atol=0)


@moments
def test_a_state_of_other_parameters_is_refused(name: str) -> None:
    ours = made(name)
    one = config_of(name).make([nn.Parameter(torch.ones(3))])
    with pytest.raises(ValueError, match="has 1 parameters, this one 2; load the state of the same model"):
        ours.load_state_dict(one.state_dict())
    if name == "sgd":
        return  # it has no moments
    wide = config_of(name).make([nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(5, 5))])
    advance(wide, 1.0)
    before = copy.deepcopy(ours.state_dict())
    with pytest.raises(ValueError, match=r"is \[5, 5\], not \[3, 4\]; load a state of the same model"):
        ours.load_state_dict(wide.state_dict())
    assert_same(ours, before)


@pytest.mark.parametrize(
    ("name", "other", "message"),
    [
        ("adam", "rmsprop", "has no exp_avg of parameter 0, only step, square_avg: it is not this Adam"),
        ("sgd", "adam", "has exp_avg of parameter 0: it is not this SGD"),
        ("adam", "own", "has mu_product of parameter 0: it is not this Adam"),
        ("muon", "adamw", "is not Muon"),
        ("adam", "muon", "is not Adam"),
        ("own", "sgd", "is not OwnOptimizer"),
    ],
)
def test_a_state_of_another_optimizer_is_refused(name: str, other: str, message: str) -> None:
    ours, its = made(name), made(other)
    advance(its, 1.0)
    with pytest.raises(ValueError, match=f"the saved optimizer {message}; load a state of the same optimizer"):
        ours.load_state_dict(its.state_dict())


@every
def test_an_optimizer_of_nothing_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="got no parameters"):
        config_of(name).make([])


@moments
@pytest.mark.parametrize("at", [0, 2])
def test_a_step_that_is_refused_is_as_if_it_were_not_made(name: str, at: int) -> None:
    ours, other = made(name), made(name)
    for i in range(4):
        if i == at:
            advance(ours, torch.nan, YES)
        advance(ours, i - 1.5, NO)
        advance(other, i - 1.5, NO)
    torch.testing.assert_close(ours.parameters, other.parameters, rtol=0, atol=0)
    assert_same(ours, other.state_dict())


def reference(weights: np.ndarray, gradients: list[np.ndarray], rate: float, nesterov: bool, scale: str) -> np.ndarray:
    """Muon, written out for one matrix, with momentum 0.9 and weight decay 0.1."""
    mean, (rows, columns) = np.zeros_like(weights), weights.shape
    factor = 0.2 * math.sqrt(max(rows, columns)) if scale == "adam" else math.sqrt(max(1, rows / columns))
    for gradient in gradients:
        mean = 0.9 * mean + 0.1 * gradient
        followed = 0.1 * gradient + 0.9 * mean if nesterov else mean
        u, s, vt = np.linalg.svd(followed, full_matrices=False)
        s = s / np.sqrt((s * s).sum())
        for _ in range(5):  # Newton-Schulz acts on the singular values alone
            s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
        weights = (1 - rate * 0.1) * weights - rate * factor * (u * s) @ vt
    return weights


@pytest.mark.parametrize("scale", ["adam", "original"])
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("shape", [(6, 4), (4, 6), (5, 5)])
def test_muon_is_the_written_out_reference(shape: tuple[int, int], nesterov: bool, scale: str) -> None:
    rng = np.random.default_rng(0)
    start, gradients = rng.normal(size=shape), [rng.normal(size=shape) for _ in range(4)]
    config = MuonConfig(momentum=0.9, nesterov=nesterov, scale=scale, smallest=2, weight_decay=0.1, epsilon=1e-8)
    weight = nn.Parameter(torch.tensor(start, dtype=torch.float32))
    optimizer = config.make([weight])
    for gradient in gradients:
        weight.grad = torch.tensor(gradient, dtype=torch.float32)
        optimizer.step(0.05)
    expected = reference(start, gradients, 0.05, nesterov, scale)
    np.testing.assert_allclose(weight.detach().numpy(), expected, rtol=1e-4, atol=1e-5)


def test_muon_is_that_of_torch_optim_but_for_its_bfloat16() -> None:
    torch.manual_seed(0)
    one, same = (nn.Parameter(torch.ones(6, 4)) for _ in range(2))
    ours = MuonConfig(smallest=2, epsilon=1e-8).make([one])
    torchs = torch.optim.Muon([same], 0.1, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
    for _ in range(3):
        one.grad = torch.randn(6, 4)
        same.grad = one.grad.clone()
        ours.step(0.1)
        torchs.step()
    torch.testing.assert_close(one, same, rtol=0, atol=3e-3)


def test_muon_flattens_kernels_and_takes_networks_side_by_side_one_by_one() -> None:
    torch.manual_seed(0)
    kernel, pair = torch.randn(4, 3, 2, 2), torch.randn(2, 5, 3)
    both = [nn.Parameter(torch.zeros_like(x)) for x in (kernel, pair)]
    alone = [nn.Parameter(torch.zeros(4, 12)), nn.Parameter(torch.zeros(5, 3)), nn.Parameter(torch.zeros(5, 3))]
    for parameters_, gradients in ((both, (kernel, pair)), (alone, (kernel.flatten(1), pair[0], pair[1]))):
        for parameter, gradient in zip(parameters_, gradients, strict=True):
            parameter.grad = gradient.clone()
        MuonConfig(smallest=2, epsilon=1e-8).make(parameters_).step(0.1)
    torch.testing.assert_close(both[0].flatten(1), alone[0])
    torch.testing.assert_close(both[1], torch.stack(alone[1:]))


def test_adam_moves_what_is_no_large_matrix() -> None:
    shapes = [(64, 64), (64,), (64, 4), (2, 64), (), (32, 4, 8, 8), (2, 1, 64)]
    stacked = nn.ModuleList([Linear([nn.Linear(64, 64) for _ in range(40)], 40), Norm("layer", 64, 40)])
    biases = stacked.to(torch.float64).parameters()
    others = [nn.Parameter(torch.zeros(shape)) for shape in (*shapes, (40, 64))]
    found = MuonConfig(epsilon=1e-8).make([*others, *biases])
    its = [[tuple(p.shape) for p in part.parameters] for part in found.parts]
    assert its[0] == [(64, 64), (32, 4, 8, 8), (40, 64), (40, 64, 64)], "whatever the shapes of biases are"
    assert its[1] == [(64,), (64, 4), (2, 64), (), (2, 1, 64), *[(40, 64)] * 3]


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"algo.optimizer": "adm"}, "'adm' is not in rlframe.optimizers .*did you mean adam"),
        ({"algo.optimizer": "sgd", "algo.optimizer.betas": "[0.9,0.99]"}, "unknown key algo.optimizer.betas"),
        ({"algo.optimizer.beta": "[0.9,0.99]"}, "did you mean algo.optimizer.betas"),
        ({"algo.optimizer.betas": "[0.9]"}, r"algo.optimizer.betas=\[0.9\] must be 2 numbers"),
        ({"algo.optimizer.betas": "[0.9,1]"}, r"algo.optimizer.betas=\[0.9, 1.0\] must be at least 0 and below 1"),
        ({"algo.optimizer.epsilon": "-1"}, "algo.optimizer.epsilon=-1.0 must be at least 0"),
        ({"algo.optimizer": "sgd", "algo.optimizer.nesterov": "true"}, "needs algo.optimizer.momentum above 0"),
        ({"algo.optimizer": "muon", "algo.optimizer.smallest": "0"}, "algo.optimizer.smallest=0 must be at least 1"),
        ({"algo.optimizer": "muon", "algo.optimizer.scale": "adan"}, "did you mean adam"),
        ({"init_with": "optimizers"}, "init_with=optimizers needs init=RUN_DIR"),
    ],
)
def test_wrong_keys_are_refused_in_one_line(keys: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        from_flat(keys)
    assert "\n" not in str(error.value)


def test_an_optimizer_that_is_neither_a_name_nor_a_config_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"algo.optimizer=<class .*Adam'> must be a name such as adam"):
        dqn.Config(optimizer=torch.optim.Adam)  # type: ignore[arg-type]


def test_muon_moves_vectors_alone_where_no_matrix_has_a_gradient() -> None:
    optimizer, (vector, matrix) = made("muon"), parameters()
    advance(optimizer, 1.0, n=1)
    assert not torch.equal(optimizer.parameters[0], vector)
    assert torch.equal(optimizer.parameters[1], matrix)
