"""Fitted Q evaluation: the worth of a policy from its Q-function, which is learned from episodes of other policies.

Batch Policy Learning under Constraints. Le, Voloshin, Yue, 2019. ICML, arXiv 1903.08738 (algorithm 3, FQE).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import chz
import numpy as np
import torch
import torch.nn.functional as F
from gymnasium import Space
from torch import Tensor, nn

from rlframe.core.config import count, number, sizes
from rlframe.core.seeding import Role, generator, seed_int
from rlframe.core.spaces import action_parts
from rlframe.core.struct import Tree, leaves, map_tree
from rlframe.distributions import executed
from rlframe.evaluation.episode_rows import EpisodeRows
from rlframe.evaluation.target_policy import TargetPolicy
from rlframe.models import ModelConfig
from rlframe.models.encoders import Vector, feature_size, make_encoder
from rlframe.models.network import Network, initial_weights
from rlframe.models.normalize import ObservationNorm
from rlframe.ops.off_policy_estimates import Terms
from rlframe.optimizers.moments import Adam

_CHUNK = 8192  # rows of a network's input at once
_RIDGE = 1e-7  # of the last layer's equations, times the mean of their diagonal


@chz.chz
class FittedQConfig:
    """How a Q-function is fitted."""

    hidden: tuple[int, ...] = sizes((128,), "widths of the fully connected layers")
    n_networks: int = count(3, "networks whose mean is taken; 1: the interval knows nothing of their differences")
    n_rounds: int = count(6, "fixed points that the network learns from, one after another")
    n_updates: int = count(200, "updates of the network in a round")
    batch_size: int = count(256, "rows of an update")
    learning_rate: float = number(3e-3, "of Adam; falls to 0 linearly")


class Features(nn.Module):
    """The hidden layers of Q(s, a): [n, K, F] of observations [n, *obs] and K actions of each [n, K, *act]."""

    def __init__(self, observation_space: Space, action_space: Space, hidden: tuple[int, ...]) -> None:
        super().__init__()
        self.norm = ObservationNorm(observation_space)
        self.encoder = make_encoder(observation_space, ModelConfig(hidden=(), activation="relu"))
        self.actions = nn.ModuleList(Vector(space) for _, space in action_parts(action_space))
        size = feature_size(self.encoder) + sum(map(feature_size, self.actions))
        self.network = Network([size, *hidden], "relu", "relu")
        self.size = self.network.size + 1

    def forward(self, observation: Tree, action: Tree) -> Tensor:
        parts = [part(x) for part, x in zip(self.actions, leaves(action), strict=True)]
        state = self.encoder(self.norm(observation)).unsqueeze(1)
        hidden = self.network(torch.cat([state.expand(-1, parts[0].shape[1], -1), *parts], -1))
        return F.pad(hidden, (0, 1), value=1.0)


@dataclass(frozen=True, eq=False)
class FittedQ:
    """The Q-function of a policy at the rows of its data, and what the policy is worth by it."""

    theta: Tensor  # [1, F] the last layer
    q: np.ndarray  # [N] of the actions taken
    v: np.ndarray  # [M] of all observations
    terms: Terms
    spread: float = 0.0  # variance of the estimates of several networks


@dataclass(frozen=True, eq=False)
class Problem:
    """What is fitted: a policy's Q-function on rows."""

    rows: EpisodeRows
    params: Tensor  # [M, P] of the policy
    target: TargetPolicy
    observation_space: Space  # of the rows
    discount: float
    time_limit: int  # steps after which episodes end; 0: none

    def choices(self, at: Tensor, rng: np.random.Generator) -> tuple[Tree, Tree, Tensor]:
        """Observations [n, *obs] of rows `at` [n], actions of the policy there [n, K, *act] and their weights."""
        observation = map_tree(lambda x: x[at].to(self.params.device), self.rows.observation)
        return observation, *self.target.choices(self.params[at.to(self.params.device)], rng)

    def taken(self, index: Tensor) -> tuple[Tree, Tree]:
        """Observations [n, *obs] and actions [n, 1, *act] of the rows with these numbers [n] among those with one."""
        device = self.params.device
        observation = map_tree(lambda x: x[self.rows.row[index]].to(device), self.rows.observation)
        action = map_tree(lambda x: x[index].to(device).unsqueeze(1), self.rows.action)
        return observation, executed(self.target.action_space, action)


def fitted_q(problem: Problem, config: FittedQConfig, seed: int) -> FittedQ:
    """Fit Q and estimate by it; the same again for the same seed.

    Q is the mean of several networks, each learned from episodes drawn with replacement. How far their estimates are
    apart is what the choice of the features adds to the error, which the episodes' influence does not have.
    """
    found = []
    for network in range(config.n_networks):
        rng = generator(seed, Role.ESTIMATE, 0, network)
        features = _learned(problem, config, seed_int(seed, Role.ESTIMATE, network), rng)
        found.append(solve(problem, features, torch.ones(len(problem.rows.row)), rng))
    x = np.mean([each.terms.numerator for each in found], 0)
    spread = np.var([each.terms.value() for each in found], ddof=1) if len(found) > 1 else 0.0
    q, v = np.mean([each.q for each in found], 0), np.mean([each.v for each in found], 0)
    return FittedQ(found[0].theta, q, v, Terms(x, np.ones_like(x)), float(spread))


def _learned(problem: Problem, config: FittedQConfig, network_seed: int, rng: np.random.Generator) -> Features:
    """Hidden layers, learned from as many episodes, drawn with replacement.

    In each round the network regresses on r + γ E_π Q'(s', a'). The paper's Q' is that of the round before, so K rounds
    look K steps ahead. Here Q' is the fixed point on the features of the round before, and a few rounds are enough.
    """
    rows, device = problem.rows, problem.params.device
    (low, high), scale = _bounds(problem), _scale(problem)
    with initial_weights(network_seed):
        features = Features(problem.observation_space, problem.target.action_space, config.hidden)
        head = nn.Linear(features.size, 1, bias=False).to(device)
    features.norm.update(rows.observation)
    features.to(device)
    learned = [*features.network.parameters(), *features.encoder.parameters(), *head.parameters()]
    optimizer, n_updates = Adam(learned, (0.9, 0.999), 1e-8), config.n_rounds * config.n_updates
    n = len(rows.length)
    counts = np.repeat(rng.multinomial(n, np.full(n, 1 / n)) if config.n_networks > 1 else np.ones(n, int), rows.length)
    drawn = np.repeat(np.arange(len(counts)), counts)
    for update in range(n_updates):
        if update % config.n_updates == 0:
            found = solve(problem, features, torch.from_numpy(counts).float(), rng)
            y = torch.from_numpy(_backup(problem, found.v.clip(low, high)) / scale).float()
            with torch.no_grad():
                head.weight.copy_(found.theta / scale)
        index = torch.from_numpy(rng.choice(drawn, config.batch_size))
        loss = F.mse_loss(head(features(*problem.taken(index))).view(-1), y[index].to(device))
        features.zero_grad()
        head.zero_grad()
        loss.backward()
        optimizer.step(config.learning_rate * (1 - update / n_updates))
    return features


@torch.no_grad()
def solve(problem: Problem, features: Features, counts: Tensor, rng: np.random.Generator) -> FittedQ:
    """The fixed point of fitted Q evaluation on features φ, of rows that count so often [N], and its estimate.

    A θ = b with A = Σ φ(s,a) (φ(s,a) - γ E_π φ(s',a'))ᵀ, b = Σ φ(s,a) r   (LSTD-Q, Lagoudakis & Parr 2003, eq. 5.1).
    The estimate is mean_i V(s_i0) with V = θᵀ E_π φ. Episode i adds V(s_i0) + Σ_t ω(s_t,a_t) δ_t to it, where δ is the
    error of Q and ω = νᵀ A⁻¹ φ, ν = Σ_i E_π φ(s_i0, .): the mean of the second part is 0 at the fixed point, and its
    variance is what the errors of Q add to the interval (Hao et al. 2021, arXiv 2102.03607, theorem 5.1; by episode).
    """
    rows, row, gamma = problem.rows, problem.rows.row, problem.discount
    phi, psi = _taken(problem, features), _expected(problem, features, rng)
    A = torch.zeros(features.size, features.size, dtype=torch.float64)
    b = torch.zeros(features.size, 1, dtype=torch.float64)
    for at in torch.arange(len(row)).split(_CHUNK):
        own, following = phi[at].double(), psi[row[at] + 1].double()
        own_T = own.T * counts[at]
        A += own_T @ (own - gamma * rows.bootstraps[at, None] * following)
        b += own_T @ rows.reward[at, None].double()
    A += torch.eye(len(A)) * _RIDGE * phi.square().sum() / len(A)
    theta = torch.linalg.solve(A, b).float()
    q, v = (phi @ theta).view(-1).double().numpy(), (psi @ theta).view(-1).double().numpy()
    nu = psi[torch.from_numpy(rows.start)].double().sum(0)
    omega = (phi @ torch.linalg.solve(A.T, nu).float()).double().numpy()
    x = v[rows.start] + rows.padded(omega * (_backup(problem, v) - q)).sum(-1)
    return FittedQ(theta.view(1, -1), q, v, Terms(x[:, None], np.ones((len(x), 1))))


def _taken(problem: Problem, features: Features) -> Tensor:
    """φ(s, a) [N, F] of the actions taken."""
    parts = torch.arange(len(problem.rows.row)).split(_CHUNK)
    return torch.cat([features(*problem.taken(index))[:, 0].cpu() for index in parts])


def _expected(problem: Problem, features: Features, rng: np.random.Generator) -> Tensor:
    """E_π φ(s, .) [M, F] of all observations."""
    found = []
    for at in torch.arange(len(leaves(problem.rows.observation)[0])).split(_CHUNK):
        observation, action, weight = problem.choices(at, rng)
        found.append(torch.einsum("nk,nkf->nf", weight, features(observation, action)).cpu())
    return torch.cat(found)


def _backup(problem: Problem, v: np.ndarray) -> np.ndarray:
    """r + γ V(s') [N], of V of all observations [M]."""
    rows = problem.rows
    following = rows.bootstraps.double().numpy() * problem.discount * v[rows.row.numpy() + 1]
    return rows.reward.double().numpy() + following


def _bounds(problem: Problem) -> tuple[float, float]:
    """The least and the largest value of a state that these rewards allow."""
    gamma, limit = problem.discount, problem.time_limit or math.inf
    horizon = limit if gamma == 1 else (1 - gamma**limit) / (1 - gamma)
    reward = problem.rows.reward
    return min(float(reward.min()), 0.0) * horizon, max(float(reward.max()), 0.0) * horizon


def _scale(problem: Problem) -> float:
    """About the size of a value: root mean square of the rewards, over an episode or 1 / (1 - γ) steps."""
    steps = min(1 / max(1 - problem.discount, 1e-9), float(problem.rows.length.mean()))
    return max(float(problem.rows.reward.square().mean().sqrt()) * steps, 1e-8)
