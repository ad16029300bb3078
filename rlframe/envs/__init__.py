"""Environments: `make_envs` makes a batch that steps under NEXT_STEP autoreset, with the fastest backend available."""

from rlframe.envs.base import EnvConfig, EnvError, Envs, EnvStep
from rlframe.envs.make import make_envs
from rlframe.envs.options import EnvOptions

__all__ = ["EnvConfig", "EnvError", "EnvOptions", "EnvStep", "Envs", "make_envs"]
