"""Simple random search of static linear policies is competitive for RL. Mania, Guy, Recht, 2018. arXiv 1803.07055.

Its linear policies are model.hidden=[]. V1 sees observations as they are, V2 normalises them by running statistics:
model.normalize_observation=true.

A gradient step is read here and in `evolution`, `ops.evolution`, `updates.optimizer_step` and `optimizers.moments`;
`evaluation.players` plays the episodes.
"""

from __future__ import annotations

from typing import cast

import chz
import numpy as np
import torch
from gymnasium import Space

from rlframe.agents import ActorAgent
from rlframe.algos.defaults import Defaults
from rlframe.algos.evolution import Evolution, EvolutionConfig
from rlframe.core.config import count
from rlframe.core.errors import ConfigError
from rlframe.core.schedule import Scheduled, scheduled
from rlframe.core.types import BatchSpec
from rlframe.models import ModelConfig
from rlframe.models.actor import Actor
from rlframe.optimizers import OptimizerConfig, optimizer


@chz.chz
class Config(EvolutionConfig):
    """The paper's names: alpha, nu, N, b."""

    for_vectors = Defaults(ModelConfig(hidden=()))  # a linear policy

    learning_rate: Scheduled = scheduled(0.02, "alpha")
    optimizer: OptimizerConfig | str = optimizer("sgd")
    top_directions: int = count(0, "b: directions with the best returns, which alone decide the step; 0: all")

    @chz.validate
    def _check_top(self) -> None:
        if self.top_directions > self.directions:
            raise ConfigError(
                f"algo.top_directions={self.top_directions} must be at most algo.directions={self.directions}"
            )

    def make_agent(
        self, observation_space: Space, action_space: Space, model: ModelConfig | None = None, seed: int = 0
    ) -> ActorAgent:
        """As for all evolution strategies, but the last layer is 0: the paper starts from M = 0."""
        agent = super().make_agent(observation_space, action_space, model, seed)
        with torch.no_grad():
            for parameter in cast(Actor, agent.model).mlp.last.parameters():
                parameter.zero_()
        return agent

    def make_algorithm(self, agent: ActorAgent, batch_spec: BatchSpec, n_steps: int, seed: int = 0) -> ARS:
        return ARS(agent, n_steps, self, seed)


class ARS(Evolution):
    """θ <- θ + α / (b σ_R) Σ (r_k+ - r_k-) δ_k over the top b directions (algorithm 2, V1-t and V2-t)."""

    config: Config

    def __init__(self, agent: ActorAgent, n_steps: int, config: Config | None = None, seed: int = 0) -> None:
        super().__init__(agent, n_steps, config or Config(), seed)

    def weights(self, returns: np.ndarray) -> tuple[np.ndarray, dict[str, float]]:
        b = self.config.top_directions or len(returns)
        top = np.argsort(-returns.max(1), kind="stable")[:b]
        std = float(returns[top].std())  # σ_R
        weights = np.zeros(len(returns))
        if std > 0:  # else all returns are equal, and tell nothing
            weights[top] = (returns[top, 0] - returns[top, 1]) / (b * std)
        return weights, {"return_std": std}
