"""Interface of the models of agents, train and eval mode of users' networks, and the config of every network."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, TypeVar

import chz
import numpy as np
import torch
from torch import Tensor, nn

from rlframe.core.config import below_one, choice, count, number, option, sizes, true_or_auto
from rlframe.core.errors import ConfigError, warn_once
from rlframe.core.field_effects import idle_while
from rlframe.core.objects import is_own
from rlframe.core.struct import Tree
from rlframe.core.types import AgentInputs
from rlframe.models.convolutions import spectral_vectors
from rlframe.models.initial import INITS
from rlframe.models.network import NORMS, LayerOptions, batch_statistics

Module = TypeVar("Module", bound=nn.Module)
ACTIVATIONS = ("tanh", "relu", "elu", "silu", "gelu")
OF_NORMS = ("norm_after", "norm_input", "unit_gains")  # keys of what `norm` makes
OF_ACTORS = (  # keys of actors and their critics alone
    *(*OF_NORMS, "unit_rows", "blocks", "expansion", "block"),
    *("least_log_std", "log_std_bound"),
)
LEAST_LOG_STD = -20.0  # the code of Haarnoja et al. 2018
NumpyForward = Callable[[AgentInputs, Tree], tuple[np.ndarray, np.ndarray, Tree]]


def has_own(network: nn.Module) -> bool:
    """Whether a network is the user's, or around one as its `network`."""
    return is_own(network) or is_own(getattr(network, "network", network))


def with_modes(network: Module) -> Module:
    """A user's network, from now on in train mode where its gradient is recorded, and in eval mode elsewhere.

    So dropout is not active in acting, targets, exports, and where parameters are frozen. Its parts follow too, as an
    algorithm may call them one by one. rlframe's networks need no mode.
    """
    if is_own(network) and not _has_hook(network):
        _check_observe(network)
        _warn_of_unregistered(network)
        for part in network.eval().modules():
            if part is network or _follows_alone(part):
                part.register_forward_pre_hook(_follow_gradient)
    return network


def _check_observe(network: nn.Module) -> None:
    if hasattr(network, "observe") and not isinstance(network, Model):
        raise ConfigError(
            f"{type(network).__name__}.observe is called only of a PolicyModel; move running statistics in forward, "
            f"if self.training, as batch normalisation does"
        )


def _warn_of_unregistered(network: nn.Module) -> None:
    """Parameters that learn, in plain lists and dicts, are unknown to torch."""
    known = {id(each) for each in network.parameters()}
    for part in network.modules():
        for name, value in vars(part).items():
            inside = [*value.values()] if isinstance(value, dict) else value
            if name.startswith("_") or not isinstance(inside, list | tuple) or not inside:
                continue
            if not isinstance(inside[0], nn.Module | nn.Parameter):  # of one kind, as lists are
                continue
            own = [p for x in inside for p in (x.parameters() if isinstance(x, nn.Module) else (x,))]
            if any(p.requires_grad and id(p) not in known for p in own):
                kind = "Module" if isinstance(inside[0], nn.Module) else "Parameter"
                where, remedy = f"{type(part).__name__}.{name}", "Dict" if isinstance(value, dict) else "List"
                warn_once(f"what {where} holds is neither learned nor saved; make it an nn.{kind}{remedy}")


def _follows_alone(part: nn.Module) -> bool:
    """Whether a part has parameters, and may have a mode: a linear layer, for example, has none."""
    inside = next(part.children(), None) is not None or next(part.buffers(), None) is not None
    return inside and next(part.parameters(), None) is not None


def _has_hook(network: nn.Module) -> bool:
    return _follow_gradient in network._forward_pre_hooks.values()


def has_modes(network: nn.Module) -> bool:
    """Whether learning may compute something else, or change buffers: a user's network, or some normalisations."""
    return any(map(_has_hook, network.modules())) or bool(batch_statistics(network) or spectral_vectors(network))


def _follow_gradient(network: nn.Module, _: object) -> None:
    if torch.compiler.is_compiling():  # exports trace it as it was last, in eval mode
        return
    learns = torch.is_grad_enabled() and any(parameter.requires_grad for parameter in network.parameters())
    if network.training != learns:
        network.train(learns)


def statistics(network: nn.Module) -> list[Tensor]:
    """Running statistics of normalisations, and all buffers of the users' networks in it."""
    of_users = [x for module in network.modules() if _has_hook(module) for x in module.buffers()]
    buffers = {id(x): x for x in (*batch_statistics(network), *spectral_vectors(network), *of_users)}
    return [buffer for buffer in buffers.values() if buffer.is_floating_point()]


def averaged(*networks: nn.Module) -> list[Tensor]:
    """What target networks follow: parameters and running statistics."""
    return [x for network in networks for x in (*network.parameters(), *statistics(network))]


class Model(nn.Module, ABC):
    """A network that an agent acts with."""

    uses_previous: bool = False  # whether it reads the previous action, the reward or `first`

    def __init__(self) -> None:
        super().__init__()
        self.observation_norm: Any = None  # an ObservationNorm: the running normalisation of observations; or none

    def initial_state(self, n: int) -> Tree:
        """Zero state of n environments, leaves [n, ...]; () without memory."""
        return ()

    def observe(self, observation: Tree) -> None:
        """Update running statistics from observations [..., *obs]; called once per batch, by the learner."""
        if self.observation_norm is not None:
            self.observation_norm.update(observation)

    def normalized(self, observation: Tree) -> Tree:
        """The observation as this network and those beside it, such as critics, see it."""
        return observation if self.observation_norm is None else self.observation_norm(observation)

    def numpy_forward(self, n: int) -> Callable[..., Any] | None:
        """What acting needs of it for n rows of NumPy arrays, with the current parameters; None if not implemented.

        Acting on a CPU prefers it, so its results must equal those of torch up to rounding.
        """
        return None


class PolicyModel(Model):
    """Maps agent inputs to action-distribution parameters and a state value."""

    @abstractmethod
    def forward(self, inputs: AgentInputs, state: Tree) -> tuple[Tensor, Tensor, Tree]:
        """Parameters [..., param_size], value [...] and the next state, for inputs [B, ...] or [T, B, ...].

        `state` [B] is the state before the first row; it counts as zero where `inputs.first` is set.
        """


@chz.chz
class CriticConfig:
    """What the networks of critics, or of the state value beside a policy, have of their own."""

    hidden: tuple[int, ...] = sizes((), "widths of the fully connected layers; []: those of the policy")
    activation: str = choice("auto", ("auto", *ACTIVATIONS), "auto: that of the policy")
    norm: str = choice("auto", ("auto", *NORMS), "normalisation; auto: that of the policy")
    blocks: int = count(0, "residual blocks; 0: as many as the policy", low=0, high=1_000)
    dropout: float = below_one(0.0, "probability that a number is dropped, in learning, before normalisation")


@chz.chz
class ModelConfig:
    """A network: encoder, memory, normalisation. Heads follow from the agent and the action space."""

    IDLE = idle_while("memory_size", memory="none") | idle_while(
        "memory_window", "memory_heads", "memory_layers", memory=("none", "lstm", "gru")
    )

    encoder: str = option(
        "auto", "auto | mlp | nature | impala | hadamax | module:Class or ./file.py:Class, your own nn.Module"
    )
    channels: tuple[int, ...] = sizes((), "of each convolution, or stage of impala and hadamax; []: the encoder's own")
    kernels: tuple[int, ...] = sizes(
        (), "sides of the convolutions' kernels, in pixels; []: [8,4,3]; with encoder=nature for boards too"
    )
    strides: tuple[int, ...] = sizes((), "of the convolutions; []: [4,2,1]")
    pools: tuple[int, ...] = sizes((), "sides of the squares of max pooling after each convolution; []: none")
    hidden: tuple[int, ...] = sizes((64, 64), "widths of the fully connected layers of vectors")
    image_hidden: tuple[int, ...] = sizes((512,), "widths of the fully connected layers after an image encoder")
    activation: str = choice("tanh", ACTIVATIONS, "between fully connected layers")
    norm: str = choice("none", NORMS, "normalisation of each row, or over the batch, at these activations")
    norm_after: bool = option(False, "it follows the activations; else they follow it. Of actors and their critics")
    norm_input: bool = option(False, "the first layer's input is normalised so too. Of actors and their critics")
    init: str = choice(
        "auto", INITS, "initial weights of agents and critics, by the rule of that name; auto: their own"
    )
    unit_rows: bool = option(
        False, "weights of length 1 for each output, at first and after each step. Of actors and their critics"
    )
    unit_gains: bool = option(
        False, "gain and shift of each normalisation, of mean square 1, at first and after each step. Of the same"
    )
    blocks: int = count(
        0, "residual blocks of the width that hidden=[W] gives, in place of its layers. Of the same", low=0, high=1_000
    )
    expansion: int = count(4, "times this width, inside a block", high=1_000)
    block: str = choice("residual", ("residual", "sphere"), "adds to its input, or moves it along the unit sphere")
    critic: CriticConfig = chz.field(default=CriticConfig(), doc="networks of critics or state values, if separate")
    image_norm: str = choice("none", ("none", "layer"), "normalisation of a pixel's channels, after each convolution")
    image_pool: int = count(
        0, "side to which the convolutions' output is pooled by its maxima, in equal parts; 0: as it is", high=2**10
    )
    spectral_norm: bool = option(
        False, "impala: weights of the residual convolutions divided by their largest singular value"
    )
    memory: str = choice("none", ("none", "lstm", "gru", "transformer"), "what follows the encoder")
    memory_size: int = count(64, "width of the memory")
    memory_window: int = count(32, "rows that a transformer attends to: a row and those before it", low=2, high=2**16)
    memory_heads: int = count(4, "attention heads of a transformer; divides memory_size")
    memory_layers: int = count(1, "blocks of a transformer", high=2**10)
    feed_back: bool = option(False, "also feed the previous action and reward to the network")
    shared: bool | str = true_or_auto("one encoder and memory for policy and value; auto: for images alone")
    action_embedding: int = count(
        0, "width of the embeddings of state and available_actions, whose products are Q-values or logits; 0: none"
    )
    normalize_observation: bool = option(False, "running mean and variance of float vectors, saved with the model")
    distribution: str = option(
        "auto", "of Box actions: auto | gaussian | squashed_gaussian (tanh; as sac) | beta | module:Class, your own"
    )
    state_dependent_std: bool = option(False, "Gaussian policies: the standard deviation is an output; sac always")
    log_std: float = number(
        0.0, "initial log standard deviation of Gaussian policies, not of td3, ddpg", low=-20.0, high=10.0
    )

    least_log_std: float = number(
        LEAST_LOG_STD, "least log standard deviation of sac's policy; the largest is 2", low=-20.0, high=1.0
    )
    log_std_bound: str = choice("clip", ("clip", "tanh"), "what keeps it in that range")

    def of_critic(self) -> ModelConfig:
        """This config with what critics, or the network of the state's value, have of their own."""
        own = self.critic
        norm = self.norm if own.norm == "auto" else own.norm
        of_norms = {name: getattr(self, name) and norm != "none" for name in OF_NORMS}  # perhaps of the policy alone
        return chz.replace(
            self,
            hidden=own.hidden or self.hidden,
            activation=self.activation if own.activation == "auto" else own.activation,
            norm=norm,
            blocks=own.blocks or self.blocks,
            critic=CriticConfig(),
            **of_norms,
        )

    def of_value(self) -> ModelConfig:
        """`of_critic`, for a network that is an encoder and its head alone: its widths come after images too."""
        return chz.replace(self.of_critic(), image_hidden=self.critic.hidden or self.image_hidden)

    def of_team(self) -> ModelConfig:
        """For a network that sees all agents at once: an encoder of the user's is for what one of them observes."""
        return chz.replace(self, encoder="auto") if ":" in self.encoder else self

    def options(self, dropout: float = 0.0) -> LayerOptions:
        """What the layers of actors and critics have."""
        return LayerOptions(self.norm_input, self.norm_after, dropout, self.unit_rows, self.unit_gains)

    def check_plain_layers(self) -> None:
        """Raise ConfigError if layers have something that only those of actors and their critics support."""
        default = ModelConfig()
        given = {name: (getattr(self, name), getattr(default, name)) for name in OF_ACTORS}
        given |= {"critic.dropout": (self.critic.dropout, 0.0), "critic.blocks": (self.critic.blocks, 0)}
        for name, (value, usual) in given.items():
            if value != usual:
                raise ConfigError(
                    f"model.{name}={value} is for actors and their critics (algo=sac, td3, ddpg, cql, td3_bc, maddpg); "
                    f"leave it out"
                )

    def check_no_critic(self, why: str) -> None:
        """Raise ConfigError if networks of critics have something of their own, where there are none."""
        if self.critic != CriticConfig():
            raise ConfigError(f"model.critic is for separate networks of critics or values, but {why}; leave it out")

    def _check_blocks(self) -> None:
        """Raise ConfigError if residual blocks do not fit the layers that they replace."""
        if not (self.blocks or self.critic.blocks):
            if self.block == "sphere":
                raise ConfigError("model.block=sphere is for residual blocks; add model.blocks=2, or leave it out")
            return
        widths = {"model.hidden": self.hidden} if self.blocks else {}
        for key, hidden in (widths | {"model.critic.hidden": self.critic.hidden or self.hidden}).items():
            if len(hidden) != 1:
                raise ConfigError(
                    f"{key}={list(hidden)} must be one width, that of all residual blocks; give {key}=[256]"
                )
        for name, given in {"norm_after": self.norm_after, "critic.dropout": self.critic.dropout}.items():
            if given:
                raise ConfigError(f"model.{name}={given} is not for residual blocks; leave it out")
        if self.block == "sphere" and (self.norm != "none" or self.critic.norm not in ("auto", "none")):
            raise ConfigError("model.block=sphere has a normalisation of its own; leave model.norm out")

    @chz.validate
    def _check(self) -> None:
        self._check_blocks()
        for name in OF_NORMS:
            if getattr(self, name) and self.norm == "none" and self.critic.norm in ("auto", "none"):
                raise ConfigError(f"model.{name}=true needs model.norm or model.critic.norm; give one, or leave it out")
        gaussian = self.distribution in ("auto", "gaussian", "squashed_gaussian")
        if not gaussian and (self.log_std or self.state_dependent_std):
            raise ConfigError(
                f"model.log_std and model.state_dependent_std are for Gaussian policies; leave them out with "
                f"model.distribution={self.distribution}"
            )
        if self.memory == "transformer" and self.memory_size % self.memory_heads:
            raise ConfigError(
                f"model.memory_heads={self.memory_heads} must divide model.memory_size={self.memory_size}; use "
                f"memory_size={-(-self.memory_size // self.memory_heads) * self.memory_heads}"
            )
