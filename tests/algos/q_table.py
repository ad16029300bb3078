"""A Q-function in a table and transitions written by hand: losses whose numbers fit on paper."""

from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

from rlframe.agents import QAgent
from rlframe.core.struct import Tree
from rlframe.core.types import AgentInputs
from rlframe.critics import ExpectedValue, Value
from rlframe.exploration.q import Epsilon
from rlframe.models.q_network import QModel
from rlframe.replay import Transitions


class QTable(QModel):
    """Numbers of two actions in each of n states, all zero at first."""

    def __init__(self, n: int, n_atoms: int = 1) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(n, 2, n_atoms))

    def forward(self, inputs: AgentInputs, state: Tree, noisy: Any = 1.0, *tau: Tensor) -> tuple[Tensor, Tree]:
        return self.table[inputs.observation], state


def table_agent(n: int, kind: Value | None = None) -> QAgent:
    kind = kind or ExpectedValue()
    return QAgent(QTable(n, kind.n_atoms), kind, Epsilon(2, False), spaces.Discrete(n), spaces.Discrete(2))


def inputs_at(states: list[int]) -> AgentInputs:
    n = len(states)
    nothing = torch.zeros(n)
    return AgentInputs(torch.tensor(states), nothing.long(), nothing, nothing.bool())


def transitions(
    states: list[int], actions: list[int], return_: list[float], bootstrap: list[float], next_states: list[int]
) -> Transitions:
    return Transitions(
        inputs=inputs_at(states),
        action=torch.tensor(actions),
        return_=torch.tensor(return_),
        bootstrap=torch.tensor(bootstrap),
        next_inputs=inputs_at(next_states),
        weight=torch.ones(len(states)),
        index=np.arange(len(states)),
    )
