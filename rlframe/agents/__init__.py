"""Agents: what maps inputs and noise to actions, and rows of training data to what the loss needs."""

from rlframe.agents.base import Agent
from rlframe.agents.policy import PolicyAgent, PolicyInfo, make_policy_agent

__all__ = ["Agent", "PolicyAgent", "PolicyInfo", "make_policy_agent"]
