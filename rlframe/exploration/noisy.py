"""Noisy networks (Fortunato et al. 2018): the head's weights carry learned noise; random actions only if asked for."""

from __future__ import annotations

import chz

from rlframe.core.schedule import Scheduled, scheduled
from rlframe.exploration.base import ExploreConfig, last
from rlframe.exploration.epsilon import Epsilon


@chz.chz
class Config(ExploreConfig):
    """For the DQN family; both networks draw new noise at every update."""

    epsilon: Scheduled = scheduled(0.0, "rate of random actions besides", high=1)
    epsilon_last: Scheduled = last("rate", high=1)

    def make_q(self, n_actions: int, masked: bool) -> Epsilon:
        return Epsilon(n_actions, masked, self.graded)

    def levels(self) -> tuple[Scheduled, Scheduled]:
        return self.epsilon, self.epsilon_last

    @property
    def noisy_layers(self) -> bool:
        return True
