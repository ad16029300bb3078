"""Agents: act for the samplers on inputs and noise, and evaluate training rows for the algorithms."""

from rlframe.agents.actor import ActorAgent, Choice, Deterministic, SquashedGaussian, make_actor_agent
from rlframe.agents.base import Agent
from rlframe.agents.policy import PolicyAgent, PolicyInfo, make_policy_agent
from rlframe.agents.q import QAgent, QInfo, make_q_agent

__all__ = [
    "ActorAgent",
    "Agent",
    "Choice",
    "Deterministic",
    "PolicyAgent",
    "PolicyInfo",
    "QAgent",
    "QInfo",
    "SquashedGaussian",
    "make_actor_agent",
    "make_policy_agent",
    "make_q_agent",
]
