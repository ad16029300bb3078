"""Evolution Strategies as a Scalable Alternative to Reinforcement Learning. Salimans et al., 2017. arXiv 1703.03864.

A gradient step is read here and in `evolution`, `ops.evolution`, `updates.optimizer_step` and `optimizers.moments`;
`evaluation.players` plays the episodes.
"""

from __future__ import annotations

import chz
import numpy as np
from torch import Tensor

from rlframe.agents import ActorAgent
from rlframe.algos.evolution import Evolution, EvolutionConfig
from rlframe.core.schedule import Scheduled, scheduled
from rlframe.core.types import BatchSpec
from rlframe.ops.evolution import centered_ranks
from rlframe.optimizers import OptimizerConfig, optimizer


@chz.chz
class Config(EvolutionConfig):
    """Observation statistics are those of model.normalize_observation=true."""

    learning_rate: Scheduled = scheduled(0.02, "of the optimizer")
    optimizer: OptimizerConfig | str = optimizer("adam")
    weight_decay: Scheduled = scheduled(0.005, "of the parameters' squared norm")

    def make_algorithm(self, agent: ActorAgent, batch_spec: BatchSpec, n_steps: int, seed: int = 0) -> ES:
        return ES(agent, n_steps, self, seed)


class ES(Evolution):
    """θ <- θ + Adam(1 / (n σ) Σ F_i ε_i - λ θ), with centred ranks F of the returns and mirrored ε (section 2.1)."""

    config: Config

    def __init__(self, agent: ActorAgent, n_steps: int, config: Config | None = None, seed: int = 0) -> None:
        super().__init__(agent, n_steps, config or Config(), seed)

    def weights(self, returns: np.ndarray) -> tuple[np.ndarray, dict[str, float]]:
        fitness = centered_ranks(returns)
        return (fitness[:, 0] - fitness[:, 1]) / (returns.size * self.now.noise_std), {}

    def _loss(self, gradient: np.ndarray) -> Tensor:
        decay = sum(p.square().sum() for p in self.agent.parameters())
        return super()._loss(gradient) + 0.5 * self.now.weight_decay * decay
