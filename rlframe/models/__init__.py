"""Networks: encoders, memory, heads and observation normalisation."""

from rlframe.models.actor_critic import ActorCritic
from rlframe.models.base import ModelConfig, PolicyModel

__all__ = ["ActorCritic", "ModelConfig", "PolicyModel"]
