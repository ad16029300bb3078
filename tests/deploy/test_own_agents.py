"""Agents of a user's own that are exported."""

import pytest
import torch
from gymnasium import spaces

from rlframe.agents import PolicyAgent, make_policy_agent
from rlframe.core.struct import Tree
from rlframe.core.types import AgentInputs
from rlframe.deploy.export import ExportError, FlatGreedy, compare
from rlframe.evaluation.policy import Policy
from rlframe.models import ModelConfig


class _Off(PolicyAgent):
    """Says of its greedy action what `step` does not do."""

    def greedy(self, inputs: AgentInputs, memory: Tree) -> tuple[Tree, Tree]:
        action, memory = super().greedy(inputs, memory)
        return 1 - action, memory


def test_an_agent_whose_greedy_is_not_its_step_is_told_so() -> None:
    space, actions = spaces.Box(-1, 1, (3,)), spaces.Discrete(2)
    made = make_policy_agent(space, actions, ModelConfig(hidden=(4,)))
    flat = FlatGreedy(Policy(_Off(made.model, made.distribution), space, actions).greedy)
    with pytest.raises(
        ExportError, match=r"_Off.greedy, acts otherwise than _Off.step with noise of zeros, by 1; both"
    ):
        compare(flat, lambda arrays: [x.numpy() for x in flat(*map(torch.from_numpy, arrays))])
