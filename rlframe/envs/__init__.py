"""Batches of environments that speak NEXT_STEP autoreset, whatever is behind them."""

from rlframe.envs.base import EnvConfig, EnvError, Envs, EnvStep
from rlframe.envs.make import make_envs
from rlframe.envs.workers import EnvWorkers

__all__ = ["EnvConfig", "EnvError", "EnvStep", "EnvWorkers", "Envs", "make_envs"]
