"""Optimizers, one file each: `algo.optimizer=NAME` names one, and `algo.optimizer.FIELD` sets its fields."""

from rlframe.optimizers.base import Optimizer, OptimizerConfig, optimizer

__all__ = ["Optimizer", "OptimizerConfig", "optimizer"]
