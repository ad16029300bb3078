"""Batches of environments that speak NEXT_STEP autoreset, whatever is behind them."""

from rlframe.envs.base import EnvConfig, EnvError, Envs, EnvStep
from rlframe.envs.make import make_envs

__all__ = ["EnvConfig", "EnvError", "EnvStep", "Envs", "make_envs"]
