"""Actor-critic network of PPO, A2C and the other policy-gradient algorithms; `Trunk` also serves the Q-network."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from gymnasium import Space
from torch import Tensor, nn

from rlframe.core.errors import ConfigError
from rlframe.core.spaces import PRIVILEGED, action_parts
from rlframe.core.struct import Tree, leaves
from rlframe.core.types import AgentInputs
from rlframe.distributions import Categorical, Distribution
from rlframe.models import numpy_inference
from rlframe.models.base import ModelConfig, NumpyForward, PolicyModel
from rlframe.models.encoders import Vector, feature_size, has_images, make_encoder
from rlframe.models.heads import policy_head, value_head
from rlframe.models.memory import Memory, Transformer
from rlframe.models.normalize import normalization_of
from rlframe.models.views import ActionOutputs, View, has_privileged, special_entries

TrunkForward = Callable[[Tree, AgentInputs, Tree], tuple[np.ndarray, Tree]]


class Trunk(nn.Module):
    """Encoder, optionally followed by the previous action and reward, and by memory; gives `size` features."""

    def __init__(self, view: View, action_space: Space, config: ModelConfig) -> None:
        super().__init__()
        self.view = view
        self.encoder = encoder = make_encoder(view.space, config)
        self.size = feature_size(encoder)
        previous = [Vector(space) for _, space in action_parts(action_space)] if config.feed_back else []
        self.feedback = nn.ModuleList(previous)
        if config.feed_back:
            self.size += 1 + sum(part.size for part in previous)
        self.memory: Memory | Transformer | None = None
        if config.memory == "transformer":
            sizes = config.memory_window, config.memory_heads, config.memory_layers
            self.memory = Transformer(self.size, config.memory_size, *sizes)
        elif config.memory != "none":
            self.memory = Memory(config.memory, self.size, config.memory_size)
        if self.memory:
            self.size = config.memory_size

    def initial_state(self, n: int) -> Tree:
        """Zero memory of n environments, or ()."""
        return self.memory.initial_state(n) if self.memory else ()

    def forward(self, observation: Tree, inputs: AgentInputs, state: Tree) -> tuple[Tensor, Tree]:
        """Features [..., size] and the next state; `observation` is the normalised observation of `inputs`."""
        x = self.encoder(self.view(observation))
        if self.feedback:
            continues = (~inputs.first).float().unsqueeze(-1)  # zero at the start of an episode
            parts = zip(self.feedback, leaves(inputs.prev_action), strict=True)
            previous = [continues * encode(action) for encode, action in parts]
            x = torch.cat([x, *previous, continues * inputs.prev_reward.unsqueeze(-1)], -1)
        return self.memory(x, inputs.first, state) if self.memory else (x, state)

    def numpy_forward(self, n: int) -> TrunkForward | None:
        """`forward` in NumPy for n rows in blocks; None if the encoder or the memory does not support NumPy."""
        encode = numpy_inference.encoder(self.encoder, n)
        if encode is None or isinstance(self.memory, Transformer):
            return None
        feedback = numpy_inference.feedback(self.feedback) if self.feedback else None
        memory, view = numpy_inference.memory(self.memory) if self.memory else None, self.view

        def forward(observation: Tree, inputs: AgentInputs, state: Tree) -> tuple[np.ndarray, Tree]:
            x = encode(view(observation))
            if feedback:
                x = np.concatenate([x, feedback(inputs)], -1)
            return memory(x, inputs.first, state) if memory else (x, state)

        return forward


class ActorCritic(PolicyModel):
    """Policy and value on a shared trunk or on two, with one normaliser."""

    def __init__(
        self,
        observation_space: Space,
        action_space: Space,
        distribution: Distribution,
        config: ModelConfig,
        make_head: Callable[[int], nn.Module] | None = None,
    ) -> None:
        """`make_head`: from the number of features to the policy's last layers, if not those of the distribution."""
        super().__init__()
        self.uses_previous = config.feed_back or config.memory != "none"
        special = special_entries(observation_space, action_space, config)
        self.observation_norm = normalization_of(observation_space, config.normalize_observation, special)
        seen, view = View(observation_space, *special, PRIVILEGED), View(observation_space, *special)
        self.actor = Trunk(seen, action_space, config)
        shared = has_images(seen.space) if config.shared == "auto" else config.shared
        if shared:
            why = "policy and value share theirs (set model.shared=false; auto shares for images)"
            config.check_no_critic(why)
            if has_privileged(observation_space):
                raise ConfigError(f"observation['privileged'] is for a value network of its own, but {why}")
        self.critic = None if shared else Trunk(view, action_space, config.of_value())
        if config.action_embedding:
            distribution = Categorical(config.action_embedding)
        size, std = self.actor.size, (config.log_std, config.state_dependent_std)
        self.policy_head = make_head(size) if make_head else policy_head(distribution, size, *std)
        self.value_head = value_head(self.critic.size if self.critic else size)
        self.outputs = ActionOutputs(observation_space, action_space, config)

    def initial_state(self, n: int) -> Tree:
        state = self.actor.initial_state(n)
        return (state, self.critic.initial_state(n)) if self.critic and state else state

    def forward(self, inputs: AgentInputs, state: Tree) -> tuple[Tensor, Tensor, Tree]:
        params, _, value, state = self.with_features(inputs, state)
        return params, value, state

    @property
    def head(self) -> nn.Module:
        """What maps features to the parameters."""
        return self.policy_head

    def with_features(self, inputs: AgentInputs, state: Tree) -> tuple[Tensor, Tensor, Tensor, Tree]:
        """As `forward`, with the features [..., F] that the policy's head maps to its parameters in second place."""
        observation = self.normalized(inputs.observation)
        features, value_features, state = _through(self.actor, self.critic, observation, inputs, state)
        params = self.outputs.logits(self.policy_head(features), inputs.observation)
        return params, features, self.value_head(value_features).squeeze(-1), state

    def numpy_forward(self, n: int) -> NumpyForward | None:
        evaluate = self.numpy_with_features(n)
        if evaluate is None:
            return None

        def forward(inputs: AgentInputs, state: Tree) -> tuple[np.ndarray, np.ndarray, Tree]:
            params, _, value, state = evaluate(inputs, state)
            return params, value, state

        return forward

    def numpy_with_features(
        self, n: int
    ) -> Callable[[AgentInputs, Tree], tuple[np.ndarray, np.ndarray, np.ndarray, Tree]] | None:
        """`with_features` in NumPy, as `numpy_forward`."""
        actor, critic = self.actor.numpy_forward(n), self.critic.numpy_forward(n) if self.critic else None
        if actor is None or (self.critic and critic is None):
            return None
        norm = numpy_inference.normalizer(self.observation_norm) if self.observation_norm else None
        policy_head, value_head = map(numpy_inference.head, (self.policy_head, self.value_head))
        logits = self.outputs.numpy_logits() if self.outputs.changes_logits else None

        def forward(inputs: AgentInputs, state: Tree) -> tuple[np.ndarray, np.ndarray, np.ndarray, Tree]:
            observation, state = numpy_inference.in_blocks(inputs.observation, n), numpy_inference.in_blocks(state, n)
            if norm:
                observation = norm(observation)
            features, value_features, state = _through(actor, critic, observation, inputs, state)
            params, value = policy_head(features).reshape(n, -1), value_head(value_features).reshape(n)
            params = logits(params, inputs.observation) if logits else params
            return params, features.reshape(n, -1), value, numpy_inference.in_rows(state, n)

        return forward


def _through(actor: Any, critic: Any, observation: Tree, inputs: AgentInputs, state: Tree) -> tuple[Any, Any, Tree]:
    """The features of policy and value and the next state, by trunks in torch or NumPy; `critic` None: the actor's."""
    if critic is None:
        features, state = actor(observation, inputs, state)
        return features, features, state
    actor_state, critic_state = state or ((), ())
    features, actor_state = actor(observation, inputs, actor_state)
    value_features, critic_state = critic(observation, inputs, critic_state)
    return features, value_features, (actor_state, critic_state) if state else ()
