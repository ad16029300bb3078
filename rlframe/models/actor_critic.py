"""The actor-critic network: observation normalisation, encoder, memory, and the policy's and the value's head."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from gymnasium import Space
from torch import Tensor, nn

from rlframe.core.spaces import action_parts
from rlframe.core.struct import Tree, leaves
from rlframe.core.types import AgentInputs
from rlframe.distributions import Distribution
from rlframe.kernels.mlp import parameters
from rlframe.models import numpy_inference
from rlframe.models.base import ModelConfig, NumpyForward, PolicyModel, Run
from rlframe.models.encoders import Encoder, Vector, has_images, make_encoder
from rlframe.models.heads import GaussianHead, policy_head, value_head
from rlframe.models.memory import Memory
from rlframe.models.normalize import ObservationNorm
from rlframe.models.perceptron import Stack
from rlframe.models.small import evaluate

TrunkForward = Callable[[Tree, AgentInputs, Tree], tuple[np.ndarray, Tree]]


class Trunk(nn.Module):
    """Encoder, then the previous action and reward if asked for, then memory if asked for. `size` features."""

    def __init__(self, observation_space: Space, action_space: Space, config: ModelConfig) -> None:
        super().__init__()
        self.encoder = encoder = make_encoder(observation_space, config)
        self.size = int(encoder.size)  # type: ignore[arg-type]  # every encoder states it
        previous = [Vector(space) for _, space in action_parts(action_space)] if config.feed_back else []
        self.feedback = nn.ModuleList(previous)
        if config.feed_back:
            self.size += 1 + sum(part.size for part in previous)
        self.memory: Memory | None = None
        if config.memory != "none":
            self.memory = Memory(config.memory, self.size, config.memory_size)
            self.size = config.memory_size
        plain = isinstance(encoder, Encoder) and not any(encoder.order) and not self.memory and not self.feedback
        # All from vectors to features, where that is linear layers and no more:
        self.stack: Stack | None = encoder.mlp.stack if plain else None  # type: ignore[union-attr,assignment]

    def initial_state(self, n: int) -> Tree:
        """Zero memory of n environments, or ()."""
        return self.memory.initial_state(n) if self.memory else ()

    def forward(self, observation: Tree, inputs: AgentInputs, state: Tree) -> tuple[Tensor, Tree]:
        """Features [..., size] and the next state; `observation` is that of `inputs`, normalised."""
        x = self.encoder(observation)
        if self.feedback:
            x = torch.cat([x, *self._previous(inputs)], -1)
        return self.memory(x, inputs.first, state) if self.memory else (x, state)

    def vectors(self, observation: Tree) -> Tensor:
        """What `stack` sees of an observation, normalised."""
        return self.encoder.features(observation)  # type: ignore[operator]  # an Encoder, where there is a stack

    def numpy_forward(self, n: int) -> TrunkForward | None:
        """The same in NumPy, in blocks of n rows; None where the encoder is not for that."""
        encode = numpy_inference.encoder(self.encoder, n)
        if encode is None:
            return None
        feedback = numpy_inference.feedback(self.feedback) if self.feedback else None
        memory = numpy_inference.memory(self.memory) if self.memory else None

        def forward(observation: Tree, inputs: AgentInputs, state: Tree) -> tuple[np.ndarray, Tree]:
            x = encode(observation)
            if feedback:
                x = np.concatenate([x, feedback(inputs)], -1)
            return memory(x, inputs.first, state) if memory else (x, state)

        return forward

    def _previous(self, inputs: AgentInputs) -> list[Tensor]:
        goes_on = (~inputs.first).float().unsqueeze(-1)  # what preceded the episode is null
        parts = zip(self.feedback, leaves(inputs.prev_action), strict=True)
        return [goes_on * encode(x) for encode, x in parts] + [goes_on * inputs.prev_reward.unsqueeze(-1)]


class ActorCritic(PolicyModel):
    """Policy and value, on one trunk or on two of the same shape; the normaliser is common to both."""

    def __init__(
        self, observation_space: Space, action_space: Space, distribution: Distribution, config: ModelConfig
    ) -> None:
        super().__init__()
        self.uses_previous = config.feed_back or config.memory != "none"
        self.norm = ObservationNorm(observation_space) if config.normalize_observation else None
        self.actor = Trunk(observation_space, action_space, config)
        shared = config.shared or has_images(observation_space)
        self.critic = None if shared else Trunk(observation_space, action_space, config)
        self.policy_head = policy_head(distribution, self.actor.size, config.log_std)
        self.value_head = value_head(self.actor.size)
        stacks = [_stack(self.actor, self.policy_head), _stack(self.critic, self.value_head)]
        self._stacks = [stack for stack in stacks if stack] if all(stacks) else []  # of policy and value, or none

    def initial_state(self, n: int) -> Tree:
        state = self.actor.initial_state(n)
        return (state, self.critic.initial_state(n)) if self.critic and state else state

    def forward(self, inputs: AgentInputs, state: Tree) -> tuple[Tensor, Tensor, Tree]:
        observation = self.norm(inputs.observation) if self.norm else inputs.observation
        if self.critic is None:
            features, state = self.actor(observation, inputs, state)
            return self.policy_head(features), self.value_head(features).squeeze(-1), state
        actor_state, critic_state = state or ((), ())
        features, actor_state = self.actor(observation, inputs, actor_state)
        value_features, critic_state = self.critic(observation, inputs, critic_state)
        state = (actor_state, critic_state) if state else ()
        return self.policy_head(features), self.value_head(value_features).squeeze(-1), state

    @torch.no_grad()
    def run(self, inputs: AgentInputs) -> Run | None:
        stacks, head = self._stacks, self.policy_head
        if not stacks or not stacks[0].on_cpu:
            return None
        x = self.actor.vectors(self.norm(inputs.observation) if self.norm else inputs.observation)
        lead, rows = x.shape[:-1], x.reshape(-1, x.shape[-1])
        policy, value = (evaluate(stack, rows) for stack in stacks)

        @torch.no_grad()
        def back(of_params: Tensor, of_value: Tensor) -> None:
            of_params = of_params.reshape(len(rows), -1)
            if isinstance(head, GaussianHead):
                of_params = head.back(of_params)
            policy.to_parameters(of_params)
            value.to_parameters(of_value.reshape(-1, 1))

        params = head.complete(policy.output) if isinstance(head, GaussianHead) else policy.output
        return Run(params.view(*lead, -1), value.output.view(lead), back)

    def numpy_forward(self, n: int) -> NumpyForward | None:
        actor, critic = self.actor.numpy_forward(n), self.critic.numpy_forward(n) if self.critic else None
        if actor is None:
            return None
        norm = numpy_inference.normalizer(self.norm) if self.norm else None
        policy_head, value_head = numpy_inference.head(self.policy_head), numpy_inference.head(self.value_head)

        def forward(inputs: AgentInputs, state: Tree) -> tuple[np.ndarray, np.ndarray, Tree]:
            observation, state = numpy_inference.in_blocks(inputs.observation, n), numpy_inference.in_blocks(state, n)
            if norm:
                observation = norm(observation)
            if critic is None:
                features, state = actor(observation, inputs, state)
                value_features = features
            else:
                actor_state, critic_state = state or ((), ())
                features, actor_state = actor(observation, inputs, actor_state)
                value_features, critic_state = critic(observation, inputs, critic_state)
                state = (actor_state, critic_state) if state else ()
            params, value = policy_head(features), value_head(value_features)
            return params.reshape(n, -1), value.reshape(n), numpy_inference.in_rows(state, n)

        return forward

    def observe(self, observation: Tree) -> None:
        if self.norm:
            self.norm.update(observation)


def _stack(trunk: Trunk | None, head: nn.Module) -> Stack | None:
    """All from vectors to a head's numbers, where that is linear layers and no more."""
    last = head.mean if isinstance(head, GaussianHead) else head
    body = trunk.stack if trunk else None
    return body.then(Stack(parameters([last]), ("none",))) if body and isinstance(last, nn.Linear) else None
