"""Exploration by Random Network Distillation. Burda, Edwards, Storkey, Klimov, 2018. arXiv 1810.12894."""

from __future__ import annotations

import chz
import torch
from gymnasium import Space
from torch import Tensor, nn

from rlframe.bonuses.base import Bonus, Steps, encoder_of, normalizer, rows_of
from rlframe.bonuses.curiosity import CuriosityConfig
from rlframe.core.spaces import zeros
from rlframe.core.types import Samples
from rlframe.models.encoders import HiddenLayers, orthogonal


@chz.chz
class Config(CuriosityConfig):
    """The paper's networks see the last frame of a stack; these see the whole observation."""

    def make_bonus(self, observation_space: Space, action_space: Space) -> RND:
        return RND(observation_space, self)


class RND(Bonus):
    """|f^(s') - f(s')|², how far a predictor f^ is from a fixed random network f, of the next observation s'.

    f^ learns to imitate f on the observations that were seen (section 2.2); it has two layers more (appendix A.4).
    """

    def __init__(self, observation_space: Space, config: Config) -> None:
        super().__init__()
        self.norm, space = normalizer(observation_space, config.normalize_observation, config.clip)
        self.example = Steps((), (), zeros(observation_space))
        size = config.embedding
        target, predictor = encoder_of(space, config.hidden), encoder_of(space, config.hidden)
        self.target = nn.Sequential(target, orthogonal(nn.Linear(target.size, size))).requires_grad_(False)
        layers = HiddenLayers(predictor.size, (size, size), "relu")
        self.predictor = nn.Sequential(predictor, layers, orthogonal(nn.Linear(size, size)))

    def steps(self, samples: Samples) -> Steps:
        return Steps((), (), rows_of(samples.inputs[1:].observation))

    def novelty(self, steps: Steps) -> Tensor:
        return self._difference(steps).sum(-1)

    def loss(self, steps: Steps) -> Tensor:
        return self._difference(steps).mean(-1)

    def _difference(self, steps: Steps) -> Tensor:
        """Squares [n, embedding]."""
        observation = self.norm(steps.next_observation)
        with torch.no_grad():
            target = self.target(observation)
        return (self.predictor(observation) - target).square()
