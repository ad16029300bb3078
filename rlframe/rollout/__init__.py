"""One batch being filled: its memory, the steps of environments, the agent's actions, worker processes."""

from rlframe.rollout.env_pool import EnvPool

__all__ = ["EnvPool"]
