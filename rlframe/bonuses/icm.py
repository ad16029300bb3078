"""Curiosity-driven Exploration by Self-supervised Prediction. Pathak, Agrawal, Efros, Darrell, 2017. arXiv 1705.05363.

ICM, the intrinsic curiosity module.
"""

from __future__ import annotations

import chz
import torch
from gymnasium import Space
from torch import Tensor, nn

from rlframe.bonuses.base import Bonus, Steps, encoder_of, normalizer, rows_of
from rlframe.bonuses.curiosity import CuriosityConfig
from rlframe.core.config import below_one, count
from rlframe.core.spaces import zeros
from rlframe.core.types import Samples
from rlframe.distributions import make_distribution
from rlframe.models.encoders import HiddenLayers, orthogonal
from rlframe.models.mlp import GaussianHead, policy_head


@chz.chz
class Config(CuriosityConfig):
    """Observations and bonus are normalised as in RND's paper, which ICM's does not do."""

    beta: float = below_one(0.2, "weight of the forward model's loss, of 1 with the inverse model's")
    model_hidden: int = count(256, "width of the hidden layer of both models")

    def make_bonus(self, observation_space: Space, action_space: Space) -> ICM:
        return ICM(observation_space, action_space, self)


class ICM(Bonus):
    """|φ^(s') - φ(s')|² / 2 (eq. 6): how wrong a forward model is in features φ that an inverse model learns.

    The inverse model tells the action from φ(s) and φ(s') (eq. 2), so φ has what actions change. The forward model
    predicts φ(s') from φ(s) and the action (eq. 4). Of Box actions the inverse model's error is the squared distance.
    """

    def __init__(self, observation_space: Space, action_space: Space, config: Config) -> None:
        super().__init__()
        self.norm, space = normalizer(observation_space, config.normalize_observation, config.clip)
        observation = zeros(observation_space)
        self.example, self.beta = Steps(observation, zeros(action_space), observation), config.beta
        size, width = config.embedding, config.model_hidden
        encoder, self.action = encoder_of(space, config.hidden), encoder_of(action_space, ())
        self.features = nn.Sequential(encoder, orthogonal(nn.Linear(encoder.size, size)))
        self.distribution = make_distribution(action_space)
        head = policy_head(self.distribution, width, log_std=0.0)
        for part in head.modules():
            if isinstance(part, GaussianHead):
                part.log_std.requires_grad_(False)
        self.inverse = nn.Sequential(HiddenLayers(2 * size, (width,), "relu"), head)
        last = orthogonal(nn.Linear(width, size))
        self.forward_model = nn.Sequential(HiddenLayers(size + self.action.size, (width,), "relu"), last)

    def steps(self, samples: Samples) -> Steps:
        after = samples.inputs[1:].observation
        return Steps(rows_of(samples.observation), rows_of(samples.action), rows_of(after))

    def novelty(self, steps: Steps) -> Tensor:
        return self._surprise(steps, *self._features(steps))

    def loss(self, steps: Steps) -> Tensor:
        """Eq. 7 without the policy: (1 - β) L_I + β L_F."""
        before, after = self._features(steps)
        inverse = -self.distribution.log_prob(self.inverse(torch.cat([before, after], -1)), steps.action)
        return (1 - self.beta) * inverse + self.beta * self._surprise(steps, before, after)

    def _features(self, steps: Steps) -> tuple[Tensor, Tensor]:
        """φ(s) and φ(s'), [n, embedding] each."""
        return self.features(self.norm(steps.observation)), self.features(self.norm(steps.next_observation))

    def _surprise(self, steps: Steps, before: Tensor, after: Tensor) -> Tensor:
        predicted = self.forward_model(torch.cat([before, self.action(steps.action)], -1))
        return 0.5 * (predicted - after).square().sum(-1)
