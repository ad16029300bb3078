"""The interfaces of rewards and of exploration bonuses, and the config `reward`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import chz
import numpy as np
from gymnasium import Space, spaces
from torch import Tensor, nn

from rlframe.algos import Algorithm
from rlframe.core.parts import part
from rlframe.core.spaces import ordered_dict
from rlframe.core.struct import Struct, Tree, map_tree
from rlframe.core.types import Samples
from rlframe.models.base import ModelConfig
from rlframe.models.encoders import Encoder
from rlframe.models.normalize import ObservationNorm

PACKAGE = "rlframe.rewards"


class Rewards(ABC):
    """What becomes of a batch's rewards between the sampler and the algorithm, in the learner's process."""

    config: Any = None  # a RewardConfig, to be recorded

    @abstractmethod
    def __call__(self, samples: Samples) -> Samples:
        """The samples with the rewards to learn from; called once with each batch, before the algorithm receives it."""

    def counters(self) -> dict[str, float]:
        """Metrics of its state, named with their groups, for each row of the log."""
        return {}

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """For snapshots."""

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state."""


class UnchangedRewards(Rewards):
    """The rewards that the sampler wrote."""

    def __call__(self, samples: Samples) -> Samples:
        return samples

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """There is none."""


UNCHANGED = UnchangedRewards()


@dataclass(frozen=True, eq=False)
class Steps(Struct):
    """What a bonus reads of n steps; parts that it does not read are ()."""

    observation: Tree  # [n, *obs]
    action: Tree  # [n, *act]
    next_observation: Tree  # [n, *obs], of an episode's last step too


class Bonus(nn.Module, ABC):
    """Networks that find new steps less predictable than known ones; parameters that need a gradient are learned."""

    norm: ObservationNorm
    example: Steps  # of the structure that `steps` returns

    @abstractmethod
    def steps(self, samples: Samples) -> Steps:
        """What it reads of a batch, [T * B], as views."""

    @abstractmethod
    def novelty(self, steps: Steps) -> Tensor:
        """The bonus [n] before it is scaled, at least 0."""

    @abstractmethod
    def loss(self, steps: Steps) -> Tensor:
        """The loss [n] of each step."""

    def observe(self, observation: Tree) -> None:
        """Update the statistics of observations [n, *obs], if they are normalised."""
        self.norm.update(observation)


def rows_of(tree: Tree) -> Tree:
    """[T, B, ...] as [T * B, ...]."""
    return map_tree(lambda x: x.flatten(0, 1), tree)


def encoder_of(space: Space, hidden: tuple[int, ...]) -> Encoder:
    """An encoder with relu: of convolutions for images, else of `hidden`."""
    return Encoder(space, ModelConfig(hidden=hidden, image_hidden=(), activation="relu"))


def normalizer(space: Space, normalizes: bool, clip: float) -> tuple[ObservationNorm, Space]:
    """A normaliser of all Boxes of a space, images included, or of nothing; and the space of what it returns."""
    norm = ObservationNorm(space, clip, lambda part: normalizes and isinstance(part, spaces.Box))
    return norm, unbounded(space) if normalizes else space


def unbounded(space: Space) -> Space:
    """The space of normalised observations: Boxes of any float numbers."""
    match space:
        case spaces.Dict():
            return ordered_dict({key: unbounded(sub) for key, sub in space.spaces.items()})
        case spaces.Tuple():
            return spaces.Tuple([unbounded(sub) for sub in space.spaces])
        case spaces.Box():
            return spaces.Box(-np.inf, np.inf, space.shape, np.float32)
    return space


@chz.chz
class BonusConfig:
    """Base class of the Configs of bonuses."""

    def add_to(
        self, rewards: Rewards, algo: Algorithm, in_spaces: tuple[Space, Space], n_steps: int, seed: int = 0
    ) -> Rewards:
        """The rewards with the bonus added, if there is one, for the Learner of this algorithm.

        Args:
            in_spaces: of observations and of actions.    n_steps: env_steps of the run, over which schedules go.
            seed: the run's root seed.
        """
        return rewards

    def networks(self, observation_space: Space, action_space: Space) -> Sequence[nn.Module]:
        """New networks as those of the bonus, for their number of weights."""
        return ()


@chz.chz
class NoBonus(BonusConfig):
    """No bonus: algorithms learn from the environment's rewards alone. The default."""


@chz.chz
class RewardConfig:
    """The rewards that algorithms learn from, beside the environment's."""

    bonus: Any = part(PACKAGE, "none", "exploration bonus that is added to the rewards that are learned from")
