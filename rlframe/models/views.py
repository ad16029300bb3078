"""What a network sees of an observation, and what masks and available actions make of its outputs.

Three entries of a Dict observation are not ordinary (see core.spaces): `action_mask` says which actions are allowed,
`available_actions` describes each of them by d numbers, and `privileged` is for critics alone.

Logits of forbidden actions become FORBIDDEN, so their probability is 0, and the greedy choice by Q-values is made among
the allowed ones. A mask that forbids everything, which only the last observation of an episode may have, counts as one
that allows everything.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from gymnasium import Space, spaces
from torch import Tensor, nn

from rlframe.core.errors import ConfigError
from rlframe.core.spaces import ACTION_MASK, AVAILABLE_ACTIONS, PRIVILEGED, action_features, mask_parts, without
from rlframe.core.struct import Tree
from rlframe.models import numpy_inference
from rlframe.models.base import ModelConfig
from rlframe.models.network import Network

# Finite, so that p log p is 0 and not NaN. Added noise disappears in it, so logits that are all forbidden are equal.
FORBIDDEN = -1e9


class View:
    """An observation without some entries: a Dict of the others, or the only other one."""

    def __init__(self, space: Space, *hidden: str) -> None:
        """Args:
            hidden: entries, of which the space need not have any.
        Raises:
            ConfigError: it has no others.
        """
        entries = space.spaces if isinstance(space, spaces.Dict) else {}
        self.hidden = tuple(key for key in hidden if key in entries)
        self.keys = tuple(key for key in entries if key not in self.hidden)
        if self.hidden and not self.keys:
            names = " and ".join(map(repr, self.hidden))
            raise ConfigError(f"observation has only {names}, which a policy does not see; add an entry that it sees")
        self.space = without(space, *self.hidden) if self.hidden else space

    def __call__(self, observation: Tree) -> Tree:
        if not self.hidden:
            return observation
        return {key: observation[key] for key in self.keys} if len(self.keys) > 1 else observation[self.keys[0]]


def mask_entries(observation_space: Space, action_space: Space) -> tuple[str, ...]:
    """The entry of an action mask, if there is one for these actions."""
    return (ACTION_MASK,) if mask_parts(observation_space, action_space) else ()


def special_entries(observation_space: Space, action_space: Space, config: ModelConfig) -> tuple[str, ...]:
    """The entries that no encoder sees, for these actions and this model.

    Raises:
        ValueError: they do not fit the actions, or there is nothing else to observe.
    """
    masks = mask_entries(observation_space, action_space)
    if not config.action_embedding:
        return masks
    action_features(View(observation_space, *masks).space, action_space)
    return *masks, AVAILABLE_ACTIONS


def has_privileged(space: Space) -> bool:
    """Whether observations have an entry for critics alone."""
    return isinstance(space, spaces.Dict) and PRIVILEGED in space.spaces


def check_not_privileged(observation_space: Space) -> None:
    """Raise ConfigError if observations have an entry that no network of the DQN family would see."""
    if has_privileged(observation_space):
        raise ConfigError(
            "observation['privileged'] is for critics alone, but a Q-network is the one that acts; leave it out, or "
            "agents.global_state, which adds it (for a team: algo=qmix)"
        )


class ActionOutputs(nn.Module):
    """From a network's outputs to one for each action: by embeddings of available actions, and by the mask.

    With an embedding u(s) of the state, which is the network's output, and w(a) of each action, both of width E, the
    logit or Q-value of a is their inner product (He et al. 2016, arXiv 1511.04636, DRRN).
    """

    def __init__(self, observation_space: Space, action_space: Space, config: ModelConfig) -> None:
        super().__init__()
        self.masked, E = bool(mask_parts(observation_space, action_space)), config.action_embedding
        if E and config.feed_back:
            raise ConfigError("model.feed_back=true feeds an action's number, not its features; use action_embedding=0")
        sizes = [action_features(observation_space, action_space), E, E] if E else []
        self.embed = Network(sizes, config.activation, norm=config.norm) if E else None
        self.changes_logits = self.masked or bool(E)

    def logits(self, outputs: Tensor, observation: Tree) -> Tensor:
        """Logits [..., A] from outputs [..., A], or [..., E] with embeddings."""
        if self.embed:
            outputs = self.values(outputs.unsqueeze(-1), observation).squeeze(-1)
        return masked_logits(outputs, observation[ACTION_MASK]) if self.masked else outputs

    def values(self, outputs: Tensor, observation: Tree) -> Tensor:
        """Values [..., A, k] from outputs [..., A, k], or [..., E, k] with embeddings; not masked."""
        return self.embed(observation[AVAILABLE_ACTIONS].float()) @ outputs if self.embed else outputs

    def numpy_values(self) -> Callable[[np.ndarray, Tree], np.ndarray]:
        """`values` in NumPy."""
        if not self.embed:
            return lambda outputs, observation: outputs
        embed = numpy_inference.mlp(self.embed.layers)
        return lambda outputs, observation: np.matmul(
            embed(observation[AVAILABLE_ACTIONS].astype(np.float32, copy=False)), outputs
        )

    def numpy_logits(self) -> Callable[[np.ndarray, Tree], np.ndarray]:
        """`logits` in NumPy."""
        values, masked = self.numpy_values(), self.masked

        def logits(outputs: np.ndarray, observation: Tree) -> np.ndarray:
            outputs = values(outputs[..., None], observation)[..., 0]
            return masked_logits_numpy(outputs, observation[ACTION_MASK]) if masked else outputs

        return logits


def masked_logits(logits: Tensor, mask: Tensor) -> Tensor:
    """The logits [..., n], FORBIDDEN where the mask [..., n] is 0."""
    return logits.masked_fill(mask == 0, FORBIDDEN)


def masked_logits_numpy(logits: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """The same in NumPy."""
    return np.where(mask != 0, logits, np.float32(FORBIDDEN))
