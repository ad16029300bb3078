"""Critics: independent action values Q(s, a) of one shape, and those of all actions Q(s, ·) of a Discrete space.

Their gradients are asked for one by one, as the losses of DDPG, TD3 and SAC need them (see perceptron).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from gymnasium import Space
from torch import Tensor, nn

from rlframe.core.seeding import Role, seed_int
from rlframe.core.struct import Tree
from rlframe.models.actor import EncodedPass, encode, features_of, size_of
from rlframe.models.base import ModelConfig
from rlframe.models.encoders import Vector, has_images
from rlframe.models.perceptron import Pass, Perceptron, Perceptrons, least, least_to_input


class Critics(nn.Module):
    """`n` networks with weights of their own; with images each has its own encoder, after which the action joins.

    Observations are [rows, *obs], as the actor normalises them; actions are [rows, *act], canonical.
    """

    def __init__(self, observation_space: Space, action_space: Space, config: ModelConfig, n: int) -> None:
        super().__init__()
        self.action = Vector(action_space)
        self.action_shape = tuple(action_space.shape or ())
        # Nothing is learned by an encoder that only puts vectors side by side, so one does for all.
        apart = has_images(observation_space) or config.encoder not in ("auto", "mlp")
        encoders = [features_of(observation_space, config) for _ in range(n if apart else 1)]
        self.n_features = size_of(encoders[0])
        self.encoders = nn.ModuleList(encoders)
        self.perceptrons = Perceptrons(n, self.n_features + self.action.size, config.hidden, 1, config.activation)

    def forward(self, observation: Tree, action: Tensor) -> Tensor:
        """Q(s, a) [n, rows]."""
        features = [encoder(observation) for encoder in self.encoders]
        return self.perceptrons(self._inputs(features, action, len(self.perceptrons))).squeeze(-1)

    def moments(self, saved: dict[str, Any]) -> dict[str, Any]:
        """The state of an Adam for all parameters, also one of when each network had parameters of its own."""
        k, n, first = len(self.perceptrons), len(self.perceptrons.joined), len(list(self.encoders.parameters()))
        states, group = saved["state"], saved["param_groups"][0]
        if first not in states or states[first]["exp_avg"].dim() == 3:  # it has made no step, or [k, out, in]
            return {**saved, "param_groups": [{**group, "params": list(range(first + n))}]}
        joined = {i: states[i] for i in range(first)}
        for j in range(n):
            apart = [states[first + i * n + j] for i in range(k)]
            both = {name: torch.stack([each[name] for each in apart]) for name in ("exp_avg", "exp_avg_sq")}
            joined[first + j] = {"step": apart[0]["step"], **both}
        return {"state": joined, "param_groups": [{**group, "params": list(joined)}]}

    def _inputs(self, features: list[Tensor], action: Tensor, n: int) -> Tensor:
        flat = self.action(action)
        inputs = [torch.cat([each, flat], -1) for each in features]
        return torch.stack(inputs) if len(inputs) > 1 else inputs[0].expand(n, -1, -1)

    def make_target(self) -> Critics:
        """A copy that nothing descends for, to be evaluated beside these."""
        target = copy.deepcopy(self).requires_grad_(False)
        self.perceptrons.beside(target.perceptrons)
        return target

    def run_beside(
        self, target: Critics, observation: Tree, action: Tensor, next_observation: Tree, next_action: Tensor
    ) -> tuple[CriticPasses, Tensor]:
        """Q(s, a), to be followed by its gradient with respect to the parameters, and Q'(s', a') [n, rows] of `target`.

        The perceptrons of both are evaluated at once.
        """
        features, k = [encode(encoder, observation) for encoder in self.encoders], len(self.perceptrons)
        with torch.no_grad():
            next_features = [encoder(next_observation) for encoder in target.encoders]
            inputs = [
                self._inputs([each.detach() for each in features], action, k),
                target._inputs(next_features, next_action, k),
            ]
            run, next_q = self.perceptrons.run_beside(target.perceptrons, torch.cat(inputs))
        return CriticPasses(self.encoders, features, run), next_q.squeeze(-1)

    @torch.no_grad()
    def least(self, observation: Tree, action: Tensor) -> ActionPass:
        """min_i Q_i(s, a), to be followed by its gradient with respect to the action; the critics are constant."""
        features = [encoder(observation) for encoder in self.encoders]
        run = self.perceptrons.run(self._inputs(features, action, len(self.perceptrons)))
        q, which = least(run)
        return ActionPass(q, partial(least_to_input, run, which), self.n_features, self.action_shape)

    @torch.no_grad()
    def first(self, observation: Tree, action: Tensor) -> ActionPass:
        """Q_1(s, a), likewise."""
        run = self.perceptrons[0].run(torch.cat([self.encoders[0](observation), self.action(action)], -1))
        q = run.output.squeeze(-1)
        return ActionPass(q, lambda of_q: run.to_input(of_q.unsqueeze(-1)), self.n_features, self.action_shape)


@dataclass(frozen=True)
class CriticPasses:
    """One evaluation of critics."""

    encoders: nn.ModuleList
    features: list[Tensor]  # of each encoder, with autograd where it has parameters
    run: Pass

    @property
    def q(self) -> Tensor:
        """[n, rows], without autograd."""
        return self.run.output.squeeze(-1)

    def to_parameters(self, gradient: Tensor) -> None:
        """Set the gradient of every parameter from dL/dq [n, rows]."""
        if self.features[0].grad_fn is None:
            self.run.to_parameters(gradient.unsqueeze(-1))
            return
        for parameter in self.encoders.parameters():
            parameter.grad = None
        for features, of_input in zip(self.features, self.run.to_all(gradient.unsqueeze(-1)), strict=True):
            features.backward(of_input[:, : features.shape[-1]])


@dataclass(frozen=True)
class ActionPass:
    """One evaluation of constant critics, for the gradient of their value with respect to the action."""

    q: Tensor  # [rows]
    to_input: Callable[[Tensor], Tensor]  # from dL/dq [rows] to dL/d features and action [rows, n]
    n_features: int
    action_shape: tuple[int, ...]

    def to_action(self, gradient: Tensor) -> Tensor:
        """The action's gradient [rows, *act] from dL/dq [rows]."""
        return self.to_input(gradient)[:, self.n_features :].reshape(-1, *self.action_shape)


class DiscreteCritics(nn.Module):
    """`n` networks with weights of their own, each for the values of all actions of a Discrete space."""

    def __init__(self, observation_space: Space, n_actions: int, config: ModelConfig, n: int) -> None:
        super().__init__()
        encoders = [features_of(observation_space, config) for _ in range(n)]
        perceptrons = [Perceptron(size_of(e), config.hidden, n_actions, config.activation) for e in encoders]
        self.encoders, self.perceptrons = nn.ModuleList(encoders), nn.ModuleList(perceptrons)
        self._networks = list(zip(encoders, perceptrons, strict=True))

    def moments(self, saved: dict[str, Any]) -> dict[str, Any]:
        """The state of an Adam for all parameters."""
        return saved

    def forward(self, observation: Tree) -> Tensor:
        """Q(s, ·) [n, rows, n_actions]."""
        return torch.stack([perceptron(encoder(observation)) for encoder, perceptron in self._networks])

    def run(self, observation: Tree) -> list[EncodedPass]:
        """The same of every critic, to be followed by its gradient."""
        features = [encode(encoder, observation) for encoder, _ in self._networks]
        return [
            EncodedPass(encoder, x, perceptron.run(x.detach()))
            for (encoder, perceptron), x in zip(self._networks, features, strict=True)
        ]


def make_critics(observation_space: Space, action_space: Space, config: ModelConfig, n: int, seed: int) -> Critics:
    """Critics whose first weights `seed`, the run's root seed, decides."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed_int(seed, Role.CRITIC))
        return Critics(observation_space, action_space, config, n)


def make_discrete_critics(
    observation_space: Space, n_actions: int, config: ModelConfig, n: int, seed: int
) -> DiscreteCritics:
    """The same for all actions of a Discrete space."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed_int(seed, Role.CRITIC))
        return DiscreteCritics(observation_space, n_actions, config, n)
