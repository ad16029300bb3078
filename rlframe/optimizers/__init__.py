"""Optimizers: `algo.optimizer=NAME` names one, and `algo.optimizer.FIELD` sets its fields."""

from rlframe.optimizers.base import Optimizer, OptimizerConfig, optimizer
from rlframe.optimizers.moments import AdamConfig, AdamWConfig, RAdamConfig, RMSPropConfig, SGDConfig
from rlframe.optimizers.muon import MuonConfig
from rlframe.optimizers.own import OwnConfig

KINDS = {
    "adam": AdamConfig,
    "adamw": AdamWConfig,
    "muon": MuonConfig,
    "own": OwnConfig,
    "radam": RAdamConfig,
    "rmsprop": RMSPropConfig,
    "sgd": SGDConfig,
}

__all__ = [
    "KINDS",
    "AdamConfig",
    "AdamWConfig",
    "MuonConfig",
    "Optimizer",
    "OptimizerConfig",
    "OwnConfig",
    "RAdamConfig",
    "RMSPropConfig",
    "SGDConfig",
    "optimizer",
]
