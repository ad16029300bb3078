"""The interface of exploration bonuses; the running deviation of discounted sums; and the config `reward`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import chz
import numpy as np
import torch
from gymnasium import Space, spaces
from torch import Tensor, nn

from rlframe.algos import Algorithm
from rlframe.core.parts import part
from rlframe.core.ranks import current_ranks
from rlframe.core.struct import Struct, Tree, as_numpy, map_tree
from rlframe.core.types import Array, Samples
from rlframe.models.base import ModelConfig
from rlframe.models.encoders import Encoder
from rlframe.models.normalize import ObservationNorm, RunningNorm

PACKAGE = "rlframe.rewards"
_EPSILON = 1e-8  # of the variance


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


class RunningDeviation:
    """The deviation of discounted sums of a number, over all steps, environments and ranks so far.

    It counts one sum of 0 at the start, so that the first numbers divided by it are not huge. All is computed on the
    device of the numbers.
    """

    def __init__(self, discount: float) -> None:
        self.discount = discount
        self.sums: dict[int, Array] = {}  # [B] float64 of each stream, of its environments' newest rows
        self.statistics = RunningNorm(())  # of all sums
        self.statistics.variance.zero_()
        self.statistics.count.fill_(1.0)

    @property
    def value(self) -> Tensor:
        """Float64 []."""
        return (self.statistics.variance + _EPSILON).sqrt()

    def update(self, x: Tensor, samples: Samples, over_ends: bool) -> None:
        """Add the numbers [T, B] of a batch; with `over_ends`, sums go on from one episode to the next."""
        found, valid = self._discounted(x, samples, over_ends), samples.valid.to(x.device)
        self.statistics.to(x.device)
        n = valid.sum().clamp(min=1)
        mean = found.where(valid, 0.0).sum() / n
        variance = (found - mean).where(valid, 0.0).square().sum() / n
        for of_rank in current_ranks().stack(torch.stack([valid.sum().double(), mean, variance])):
            self.statistics.merge(*of_rank)

    def _discounted(self, x: Tensor, samples: Samples, over_ends: bool) -> Tensor:
        """The sums [T, B] float64 up to each row."""
        tensors = x.double(), samples.valid.to(x.device), (samples.terminated | samples.truncated).to(x.device)
        on_host = x.is_cpu  # where NumPy takes a third of the time
        numbers, valid, ends = map(as_numpy, tensors) if on_host else tensors
        xp: Any = np if on_host else torch
        running = self.sums.get(samples.stream, 0 * numbers[0])
        running, found = running if on_host else torch.as_tensor(running, device=x.device), xp.empty_like(numbers)
        for t in range(len(numbers)):
            found[t] = running = xp.where(valid[t], self.discount * running + numbers[t], running)
            if not over_ends:
                running = xp.where(ends[t], 0.0, running)
        self.sums[samples.stream] = running
        return torch.as_tensor(found)

    def state_dict(self) -> dict[str, Any]:
        sums = {stream: as_numpy(each).copy() for stream, each in self.sums.items()}
        return {"sums": sums, "statistics": self.statistics.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any], reasons: Sequence[str] = ()) -> None:
        """Continue from a saved state; from 0 in environments that were restarted for a reason, if they are given."""
        self.sums = {stream: np.array(each) for stream, each in state["sums"].items()}
        restarted = np.array([bool(reason) for reason in reasons])
        if len(self.sums) == 1 and reasons:
            self.sums = {stream: np.where(restarted, 0.0, each) for stream, each in self.sums.items()}
        self.statistics.load_state_dict(state["statistics"])


def rows_of(tree: Tree) -> Tree:
    """[T, B, ...] as [T * B, ...]."""
    return map_tree(lambda x: x.flatten(0, 1), tree)


def encoder_of(space: Space, hidden: tuple[int, ...], image_hidden: tuple[int, ...] = ()) -> Encoder:
    """An encoder with relu; for images of convolutions and `image_hidden`, else of `hidden`."""
    return Encoder(space, ModelConfig(hidden=hidden, image_hidden=image_hidden, activation="relu"))


def normalizer(space: Space, normalizes: bool, clip: float) -> tuple[ObservationNorm, Space]:
    """A normaliser of all Boxes of a space, images included, or of nothing; and the space of what it returns."""
    norm = ObservationNorm(space, clip, lambda part: normalizes and isinstance(part, spaces.Box))
    return norm, unbounded(space) if normalizes else space


def unbounded(space: Space) -> Space:
    """The space of normalised observations: Boxes of any float numbers."""
    match space:
        case spaces.Dict():
            return spaces.Dict({key: unbounded(sub) for key, sub in space.spaces.items()})
        case spaces.Tuple():
            return spaces.Tuple([unbounded(sub) for sub in space.spaces])
        case spaces.Box():
            return spaces.Box(-np.inf, np.inf, space.shape, np.float32)
    return space


@chz.chz
class BonusConfig:
    """Base class of the Configs of bonuses."""

    def add_to(
        self, algo: Algorithm, observation_space: Space, action_space: Space, n_steps: int, seed: int = 0
    ) -> Algorithm:
        """The algorithm with the bonus added to the rewards that it learns from.

        Args:
            n_steps: env_steps of the run, over which schedules go.    seed: the run's root seed.
        """
        raise NotImplementedError


@chz.chz
class NoBonus(BonusConfig):
    """No bonus: algorithms learn from the environment's rewards alone. The default."""

    def add_to(
        self, algo: Algorithm, observation_space: Space, action_space: Space, n_steps: int, seed: int = 0
    ) -> Algorithm:
        return algo


@chz.chz
class RewardConfig:
    """The rewards that algorithms learn from, beside the environment's."""

    bonus: Any = part(PACKAGE, "none", "exploration bonus that is added to the rewards that are learned from")
