"""Defaults: the network, the batch and the numbers that an algorithm brings, by kind of observation and action."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

import chz
from gymnasium import Space
from gymnasium.spaces import Box

from rlframe.core.types import BatchSpec
from rlframe.models import ModelConfig
from rlframe.models.encoders import has_images


@dataclass(frozen=True)
class Defaults:
    """What a run has where no key is given: `for_images`, `for_vectors` and `for_continuous` of an algorithm's Config.

    The fields of a Config are one setting, usually the paper's; `own` has what another kind of spaces wants.
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    batch: BatchSpec = field(default_factory=lambda: BatchSpec(T=128, B=8))
    own: Mapping[str, Any] = field(default_factory=dict)  # fields of the algorithm's Config, also explore.std
    normalize_reward: bool = False

    def keys(self) -> dict[str, Any]:
        """As keys of the command line."""
        plain, given = ModelConfig(), {name: getattr(self.model, name) for name in chz.chz_fields(ModelConfig)}
        model = {f"model.{name}": value for name, value in given.items() if value != getattr(plain, name)}
        batch = {"sampler.batch_T": self.batch.T, "sampler.batch_B": self.batch.B}
        rewards = {"env.normalize_reward": True} if self.normalize_reward else {}
        return {**model, **batch, **rewards, **{f"algo.{name}": value for name, value in self.own.items()}}


_NONE = Defaults()


def learns_from(config: Any) -> str:
    """What an algorithm learns from, by its Config.

    batches: those of a sampler, as they arrive; replay: rows that it keeps; episodes: whole ones, of runner=evolution.
    """
    return getattr(config, "learns_from", "batches")


def learns_jointly(config: Any) -> bool:
    """Whether an algorithm learns from all agents' rows of a time step together, by its Config (see core.multi_agent).

    Its Config then has make_joint(agent, n_agents, batch_spec, n_steps, seed), for batches of `joint_of`.
    """
    return getattr(config, "joint", False)


class Kind(Enum):
    """Of spaces, as far as defaults depend on them; `continuous` are actions of a Box, with vectors."""

    IMAGES = "for_images"
    VECTORS = "for_vectors"
    CONTINUOUS = "for_continuous"


def kind_of(observation_space: Space, action_space: Space) -> Kind:
    """The kind of spaces."""
    if has_images(observation_space):
        return Kind.IMAGES
    return Kind.CONTINUOUS if isinstance(action_space, Box) else Kind.VECTORS


def defaults_of(config: Any, kind: Kind) -> Defaults:
    """The defaults of an algorithm by its Config, or the class of it; those of all runs if it brings none.

    One that has none for continuous actions has those of vectors. A field that a subclass states anew has its default.
    """
    cls = config if isinstance(config, type) else type(config)
    name = Kind.VECTORS.value if kind is Kind.CONTINUOUS and not hasattr(cls, kind.value) else kind.value
    restated: set[str] = set()
    for each in cls.__mro__:
        if name in vars(each):
            found: Defaults = vars(each)[name]
            own = {key: value for key, value in found.own.items() if key.partition(".")[0] not in restated}
            return replace(found, own=own)
        restated |= vars(each).get("__annotations__", {}).keys()
    return _NONE


def default_model(config: Any, observation_space: Space, action_space: Space) -> ModelConfig:
    """The network that an algorithm brings for these spaces."""
    return defaults_of(config, kind_of(observation_space, action_space)).model
