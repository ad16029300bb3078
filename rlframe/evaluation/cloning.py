"""Behavioural cloning: the policy that played a dataset without log-probabilities, fitted by maximum likelihood."""

from __future__ import annotations

import copy

import chz
import numpy as np
import torch
from gymnasium import Space
from torch import Tensor, nn

from rlframe.core.config import count, number, sizes
from rlframe.core.seeding import Role, generator, seed_int
from rlframe.core.struct import Tree, map_tree
from rlframe.distributions import Distribution, make_distribution
from rlframe.evaluation.episode_rows import EpisodeRows
from rlframe.models import ModelConfig
from rlframe.models.encoders import feature_size, make_encoder
from rlframe.models.heads import policy_head
from rlframe.models.network import Network, initial_weights
from rlframe.models.normalize import ObservationNorm
from rlframe.optimizers.moments import Adam

_CHUNK = 8192  # rows of a network's input at once


@chz.chz
class CloneConfig:
    """How the behaviour policy is fitted."""

    hidden: tuple[int, ...] = sizes((64, 64), "widths of the fully connected layers")
    n_updates: int = count(2_000, "updates at most")
    batch_size: int = count(256, "rows of an update")
    learning_rate: float = number(1e-3, "of Adam; falls to 0 linearly")
    check_updates: int = count(100, "updates between checks on the episodes held out; the best network is kept")


class Clone(nn.Module):
    """Parameters [n, P] of a distribution over actions, of observations [n, *obs]."""

    def __init__(self, observation_space: Space, distribution: Distribution, hidden: tuple[int, ...]) -> None:
        super().__init__()
        self.norm = ObservationNorm(observation_space)
        self.encoder = make_encoder(observation_space, ModelConfig(hidden=(), activation="relu"))
        self.network = Network([feature_size(self.encoder), *hidden], "tanh", "tanh")
        self.head = policy_head(distribution, self.network.size, 0.0, state_dependent_std=True)

    def forward(self, observation: Tree) -> Tensor:
        return self.head(self.network(self.encoder(self.norm(observation))))


def cloned_log_prob(
    rows: EpisodeRows, observation_space: Space, action_space: Space, config: CloneConfig, seed: int
) -> np.ndarray:
    """Log-probabilities [N] of the actions taken, by a policy fitted to them; a Gaussian for Box actions.

    A tenth of the episodes, at least one, is held out, and decides which of the networks on the way is taken.
    """
    rng, distribution = generator(seed, Role.ESTIMATE, 2), make_distribution(action_space)
    with initial_weights(seed_int(seed, Role.ESTIMATE, 2)):
        network = Clone(observation_space, distribution, config.hidden)
    network.norm.update(rows.observation)
    held_out = np.zeros(len(rows.length), bool)
    held_out[rng.permutation(len(held_out))[: max(1, len(held_out) // 10)]] = True
    held_out = np.repeat(held_out, rows.length)
    checked, learned = torch.from_numpy(np.flatnonzero(held_out)), np.flatnonzero(~held_out)
    optimizer = Adam(list(network.parameters()), (0.9, 0.999), 1e-8)
    best, kept = -np.inf, copy.deepcopy(network.state_dict())
    for update in range(1, config.n_updates + 1):
        index = torch.from_numpy(rng.choice(learned, config.batch_size))
        loss = -_log_prob(network, distribution, rows, index).mean()
        network.zero_grad()
        loss.backward()
        optimizer.step(config.learning_rate * (1 - (update - 1) / config.n_updates))
        if update % config.check_updates == 0 or update == config.n_updates:
            found = _all(network, distribution, rows, checked).mean()
            if found > best:
                best, kept = found, copy.deepcopy(network.state_dict())
    network.load_state_dict(kept)
    return _all(network, distribution, rows, torch.arange(len(rows.row)))


@torch.no_grad()
def _all(network: Clone, distribution: Distribution, rows: EpisodeRows, index: Tensor) -> np.ndarray:
    parts = [_log_prob(network, distribution, rows, part) for part in index.split(_CHUNK)]
    return torch.cat(parts).double().numpy()


def _log_prob(network: Clone, distribution: Distribution, rows: EpisodeRows, index: Tensor) -> Tensor:
    """Of the actions of rows with these numbers [n], with gradient."""
    observation = map_tree(lambda x: x[rows.row[index]], rows.observation)
    return distribution.log_prob(network(observation), map_tree(lambda x: x[index], rows.action))
