"""Settings of critics and their layers, for the tests of graphs and compiled updates."""

from typing import Any

from rlframe.algos import dqn, sac, td3
from rlframe.optimizers import AdamConfig

CROSSQ = {"norm": "renorm", "norm_after": True, "norm_input": True}
# epsilon: batch normalisation leaves shifts before it gradients of mere rounding, which Adam would make steps of
UNITS = {
    "model": {"norm": "batch", "norm_input": True, "unit_rows": True},
    "optimizer": AdamConfig(epsilon=1e-3),
    "policy_interval": 2,
}
TQC = {"value": "quantile", "n_atoms": 5, "target_from": "truncated", "n_critics": 4, "n_target_critics": 2}
FLASH = {"hidden": (8,), "norm": "batch", "norm_input": True, "blocks": 1, "unit_rows": True, "unit_gains": True}
SPHERE = {"hidden": (8,), "blocks": 1, "block": "sphere", "unit_rows": True, "normalize_observation": True}
C51 = {"value": "categorical", "n_atoms": 7, "normalize_return": True, "return_limit": 5.0, "policy_first": True}
IMPLICIT = {"value": "implicit", "n_atoms": 3, "munchausen": 0.9}
CRITICS: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "crossq": (sac, "Pendulum-v1", {"target_critics": False, "policy_interval": 2, "model": CROSSQ}),
    "xqc": (sac, "Pendulum-v1", {"value": "categorical", "n_atoms": 7, "normalize_return": True, **UNITS}),
    "flashsac": (sac, "Pendulum-v1", {**C51, "model": FLASH, "policy_interval": 2, "explore": "sample_hold"}),
    "simbav2": (sac, "Pendulum-v1", {**C51, "model": SPHERE}),
    "tqc_of_some": (sac, "Pendulum-v1", {"policy_from": "mean", **TQC}),
    "implicit_munchausen": (dqn, "CartPole-v1", {"explore": "noisy", "dueling": True, "prioritized": True, **IMPLICIT}),
    "td3_batch_norm": (td3, "Pendulum-v1", {"n_critics": 3, "n_target_critics": 2, **UNITS}),
}
