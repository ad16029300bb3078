"""Your own environment, model and algorithm in one file: REINFORCE learns to catch a falling ball.

    python examples/example_3.py n_steps=50_000 seed=0 run_ID=0 log_dir=data/catch

All arguments are optional. Random play catches one ball in five, a mean return of -0.6; the best return is 1.
"""

from typing import Any

import gymnasium
import numpy as np
import torch
from torch import Tensor, nn

import rlframe
from rlframe.agents import PolicyAgent
from rlframe.algos import Algorithm, Progress, UpdateMetrics
from rlframe.core.seeding import Role, env_seeds
from rlframe.core.types import AgentInputs, Samples
from rlframe.distributions import Categorical
from rlframe.envs import EnvConfig, make_envs
from rlframe.models import PolicyModel
from rlframe.ops.policy_gradient import masked_mean
from rlframe.ops.returns import discounted_return
from rlframe.record import logger_context
from rlframe.runners import Learner, MinibatchRl, RunnerConfig
from rlframe.samplers import SerialSampler


class Catch(gymnasium.Env):
    """Catch a falling ball with the paddle in the last row: move left, stay, move right. Caught 1, missed -1."""

    rows, columns = 6, 5
    observation_space = gymnasium.spaces.Box(0.0, 1.0, (rows, columns), np.float32)
    action_space = gymnasium.spaces.Discrete(3)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        self.row, self.ball, self.paddle = 0, int(self.np_random.integers(self.columns)), self.columns // 2
        return self.grid(), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        self.row, self.paddle = self.row + 1, min(max(self.paddle + action - 1, 0), self.columns - 1)
        landed = self.row == self.rows - 1
        reward = (1.0 if self.ball == self.paddle else -1.0) if landed else 0.0
        return self.grid(), reward, landed, False, {}

    def grid(self) -> np.ndarray:
        grid = np.zeros((self.rows, self.columns), np.float32)
        grid[self.row, self.ball] = grid[-1, self.paddle] = 1.0
        return grid


class Network(PolicyModel):
    """One hidden layer, then the logits of the actions and the baseline."""

    def __init__(self, n_inputs: int, n_actions: int) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(-2), nn.Linear(n_inputs, 64), nn.ReLU(), nn.Linear(64, n_actions + 1))

    def forward(self, inputs: AgentInputs, state: Any) -> tuple[Tensor, Tensor, Any]:
        out = self.net(inputs.observation)
        return out[..., :-1], out[..., -1], state  # without memory the state is ()


class Reinforce(Algorithm):
    """Simple Statistical Gradient-Following Algorithms for Connectionist RL. Williams, 1992. Machine Learning 8.

    Δw = α (r - b) ∂ ln g / ∂w: r is the return after the action, g its probability, b a learned baseline.
    """

    def __init__(self, agent: PolicyAgent, learning_rate: float, discount: float) -> None:
        self.agent, self.discount, self.progress = agent, discount, Progress()
        self.optimizer = torch.optim.Adam(agent.parameters(), learning_rate)
        self.samples: list[Samples] = []  # at most one: the batch to learn from

    def receive(self, samples: Samples) -> None:
        self.progress.count(samples)
        self.samples.append(samples)

    def updates_due(self) -> int:
        return len(self.samples)

    def update(self) -> UpdateMetrics:
        s = self.samples.pop()
        params, b, _ = self.agent(s.inputs, s.state)  # [T+1, B]; row T bootstraps unfinished episodes
        r = discounted_return(s.reward, b.detach(), s.terminated, s.truncated, s.valid, self.discount)
        ln_g = self.agent.distribution.log_prob(params[:-1], s.action)
        policy_loss = -masked_mean((r - b[:-1].detach()) * ln_g, s.valid)
        value_loss = masked_mean((r - b[:-1]).square(), s.valid)
        self.optimizer.zero_grad()
        (policy_loss + value_loss).backward()
        self.optimizer.step()
        self.progress.updates += 1
        return {"policy_loss": policy_loss, "value_loss": value_loss}

    def state_dict(self) -> dict[str, Any]:
        return {"optimizer": self.optimizer.state_dict(), "progress": self.progress.state_dict()}

    def load_state_dict(self, state: Any) -> None:
        self.optimizer.load_state_dict(state["optimizer"])
        self.progress.load_state_dict(state["progress"])


def train(n_steps: int = 50_000, seed: int = 0, log_dir: str = "", run_ID: int = 0) -> None:
    """Train REINFORCE on Catch for `n_steps` env steps."""
    torch.manual_seed(seed)  # for the agent's initial weights
    envs = make_envs(EnvConfig(Catch), 8, env_seeds(seed, Role.ENV, 8))
    agent = PolicyAgent(Network(Catch.rows * Catch.columns, 3), Categorical(3))
    sampler = SerialSampler(envs, agent, batch_T=30, seed=seed)
    options = RunnerConfig(n_steps=n_steps, log_interval_steps=max(1, n_steps // 10))
    runner = MinibatchRl(sampler, Learner(agent, Reinforce(agent, 1e-2, 0.99)), options)
    with runner, logger_context(log_dir, run_ID, "reinforce_catch", {"seed": seed}) as run:
        runner.train()
    print(f"run: {run.directory}")


if __name__ == "__main__":
    rlframe.entrypoint(train)
