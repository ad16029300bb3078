"""Residual blocks: by hand, in NumPy, k at once, of unit length; and SimbaV2's on a sphere."""

import math

import pytest
import torch
from torch import Tensor

from rlframe.core.errors import ConfigError
from rlframe.models import ModelConfig, numpy_inference
from rlframe.models.base import CriticConfig
from rlframe.models.network import BATCH_EPSILON, RMS_EPSILON, Units
from rlframe.models.residual import SHIFT, ResidualNetwork, SphereNetwork, make_body
from tests.models.compared import close

X = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
FLASH = {"hidden": (4,), "activation": "relu", "norm": "batch", "norm_input": True, "blocks": 2, "expansion": 3}
SPHERE = {"hidden": (4,), "activation": "relu", "unit_rows": True, "blocks": 2, "block": "sphere"}


def shuffled(network: torch.nn.Module) -> torch.nn.Module:
    generator = torch.Generator().manual_seed(1)
    for x in network.parameters():
        x.data += 0.3 * torch.randn(x.shape, generator=generator)
    return network


def test_residual_blocks_are_flashsacs() -> None:
    """Linear of BN(x); two of x + relu BN W₂ relu BN W₁ x; RMSNorm; and the only bias, of the last layer."""
    network = shuffled(make_body(3, 2, ModelConfig(**FLASH)))
    assert isinstance(network, ResidualNetwork)
    p = dict(network.named_parameters())
    assert sorted(name for name in p if "linears" in name and name.endswith("bias")) == ["linears.1.bias"]

    def normal(x: Tensor, name: str) -> Tensor:
        hat = (x - x.mean(0)) / (x.var(0, correction=0) + BATCH_EPSILON).sqrt()
        return hat * p[f"{name}.weight"] + p[f"{name}.bias"]

    x = normal(X, "norms.0") @ p["linears.0.weight"].T
    for i in range(2):
        y = normal(x @ p[f"blocks.{i}.linears.0.weight"].T, f"blocks.{i}.norms.0").relu()
        x = x + normal(y @ p[f"blocks.{i}.linears.1.weight"].T, f"blocks.{i}.norms.1").relu()
    x = x / (x.square().mean(-1, keepdim=True) + RMS_EPSILON).sqrt() * p["norms.1.weight"]
    close(network(X), x @ p["linears.1.weight"].T + p["linears.1.bias"], 1e-4)
    with torch.no_grad():
        forward = numpy_inference.body(network)
        assert forward is not None
        close(torch.from_numpy(forward(X.numpy())), network(X), 1e-5)


def test_gains_and_shifts_have_mean_square_one_together_and_rows_length_one() -> None:
    network = shuffled(make_body(3, 2, ModelConfig(**FLASH, unit_rows=True, unit_gains=True), k=2))
    units = Units.of(network)
    assert (len(units.rows), len(units.gains)) == (6, 6)
    before = [[x.clone() for x in each] for each in units.gains]
    units.project(torch.tensor(1.0))  # a step that is skipped
    assert all(
        torch.equal(x, y) for each, old in zip(units.gains, before, strict=True) for x, y in zip(each, old, strict=True)
    )
    units.project()
    for each, old in zip(units.gains, before, strict=True):
        square = sum(x.square().mean(-1) for x in each)
        close(square, torch.ones(2))
        close(each[0] / old[0], (each[-1] / old[-1]).mean(-1, keepdim=True).expand_as(each[0]), 1e-4)  # jointly
    assert all(torch.allclose(x.norm(dim=-1), torch.ones(()), atol=1e-6) for x in units.rows)


@pytest.mark.parametrize("settings", [FLASH, SPHERE], ids=["residual", "sphere"])
def test_k_networks_are_each_the_same_as_one(settings: dict[str, object]) -> None:
    both, one = (shuffled(make_body(3, 2, ModelConfig(**settings), k=k)) for k in (2, 0))
    with torch.no_grad():
        found = both(X.expand(2, 6, 3))
        for i in (0, 1):
            for x, of_both in zip(
                (*one.parameters(), *one.buffers()), (*both.parameters(), *both.buffers()), strict=True
            ):
                x.copy_(of_both[i].view_as(x))
            close(one(X), found[i])
    assert not torch.allclose(found[0], found[1])


def test_features_stay_on_the_sphere_and_steps_begin_as_in_simbav2() -> None:
    """embed: unit(s W unit[x, 3]); blocks: unit(x + α (unit(W₂ relu(s W₁ x)) - x)); s = √(2/d), α = 1 / (L + 1)."""
    network = make_body(3, 4, ModelConfig(**SPHERE), parts=2)
    assert isinstance(network, SphereNetwork)
    p = dict(network.named_parameters())

    def unit(x: Tensor) -> Tensor:
        return x / x.norm(dim=-1, keepdim=True)

    x = unit(unit(torch.cat([X, torch.full((6, 1), SHIFT)], -1)) @ p["embed.linear.weight"].T * math.sqrt(2 / 4))
    for i in range(2):
        inside = (x @ p[f"blocks.{i}.inner.linear.weight"].T * math.sqrt(2 / 4) / 2).relu() + 1e-8
        x = unit(x + (unit(inside @ p[f"blocks.{i}.outer.weight"].T) - x) / 3)
    hidden = [x @ each.T for each in p["hidden.linear.weight"]]
    expected = torch.cat([h @ w.T for h, w in zip(hidden, p["out.weight"], strict=True)], -1)
    close(network(X), expected, 1e-5)
    assert all(torch.allclose(w.norm(dim=-1), torch.ones(()), atol=1e-6) for w in Units.of(network).rows)
    network.last.bias.data.view(-1)[2:] += 1.0  # of the second part
    close(network(X), expected + torch.tensor([0.0, 0.0, 1.0, 1.0]), 1e-5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"blocks": 2}, r"model.hidden=\[64, 64\] must be one width"),
        ({"critic": CriticConfig(blocks=1)}, r"model.critic.hidden=\[64, 64\] must be one width"),
        ({"block": "sphere"}, r"model.block=sphere is for residual blocks; add model.blocks=2"),
        ({**SPHERE, "norm": "batch"}, r"model.block=sphere has a normalisation of its own"),
        ({**FLASH, "norm_after": True}, r"model.norm_after=True is not for residual blocks"),
        ({"unit_gains": True}, r"model.unit_gains=true needs model.norm"),
    ],
)
def test_blocks_that_do_not_fit_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ModelConfig(**settings)
