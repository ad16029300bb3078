"""A policy and value in a table, and batches written by hand: losses whose numbers fit on paper."""

from typing import Any

import torch
from torch import Tensor, nn

from rlframe.agents import PolicyAgent, PolicyInfo
from rlframe.core.types import AgentInputs, Samples
from rlframe.distributions import Categorical
from rlframe.models import PolicyModel


class Table(PolicyModel):
    """Logits of two actions and a value for each of n states, all zero at first."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.logits, self.value = nn.Parameter(torch.zeros(n, 2)), nn.Parameter(torch.zeros(n))

    def forward(self, inputs: AgentInputs, state: Any) -> tuple[Tensor, Tensor, Any]:
        return self.logits[inputs.observation], self.value[inputs.observation], state


def table_agent(n: int) -> PolicyAgent:
    return PolicyAgent(Table(n), Categorical(2))


def one_step_episodes(
    reward: list[float], value: list[float], log_prob: list[float], valid: list[bool] | None = None
) -> Samples:
    """T=1: environment b is in state b, takes action 0 and terminates. So advantage = reward - value."""
    n = len(reward)

    def zeros(dtype: torch.dtype, T: int = 1) -> Tensor:
        return torch.zeros(T, n, dtype=dtype)

    kept = torch.tensor([valid or [True] * n])
    inputs = AgentInputs(
        observation=torch.arange(n).expand(2, n),
        prev_action=zeros(torch.int64, 2),
        prev_reward=zeros(torch.float32, 2),
        first=zeros(torch.bool, 2),
    )
    return Samples(
        inputs=inputs,
        action=zeros(torch.int64),
        reward=torch.tensor([reward]),
        terminated=kept.clone(),
        truncated=zeros(torch.bool),
        valid=kept,
        info=PolicyInfo(log_prob=torch.tensor([log_prob]), value=torch.tensor([value])),
        state=(),
        final_state=(),
        n_env_steps=int(kept.sum()),
        start=0,
    )
