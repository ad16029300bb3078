"""Networks of all agents: encoders, memory, heads, critics and observation normalisation."""

from rlframe.models.actor_critic import ActorCritic
from rlframe.models.base import ModelConfig, PolicyModel

__all__ = ["ActorCritic", "ModelConfig", "PolicyModel"]
