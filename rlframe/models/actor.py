"""The actor's network: observation normalisation, encoder, and a perceptron to what the policy needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import chz
import numpy as np
import torch
from gymnasium import Space
from torch import Tensor, nn

from rlframe.core.errors import ConfigError
from rlframe.core.struct import Tree
from rlframe.models import numpy_inference
from rlframe.models.base import ModelConfig
from rlframe.models.encoders import make_encoder
from rlframe.models.normalize import ObservationNorm
from rlframe.models.perceptron import Pass, Perceptron

NumpyActor = Callable[[Tree], np.ndarray]  # n observations to parameters [n, P]


class Actor(nn.Module):
    """Maps observations [n, *obs] to the policy's parameters [n, param_size]."""

    def __init__(self, observation_space: Space, param_size: int, config: ModelConfig) -> None:
        super().__init__()
        self.norm = ObservationNorm(observation_space) if config.normalize_observation else None
        self.encoder = features_of(observation_space, config)
        self.perceptron = Perceptron(size_of(self.encoder), config.hidden, param_size, config.activation)

    def normalized(self, observation: Tree) -> Tree:
        """What `parameters` takes, and critics too: the normaliser is common to all."""
        return self.norm(observation) if self.norm else observation

    def params(self, normalized: Tree) -> Tensor:
        """The policy's parameters [n, param_size] of observations that are normalised already."""
        return self.perceptron(self.encoder(normalized))

    def run(self, normalized: Tree) -> EncodedPass:
        """`params`, to be followed by its gradient."""
        features = encode(self.encoder, normalized)
        return EncodedPass(self.encoder, features, self.perceptron.run(features.detach()))

    @torch.no_grad()
    def run_beside(self, normalized: Tree, others: Tree) -> tuple[EncodedPass, Tensor]:
        """`run`, and the `params` of these and of others after them [n + m, P]; the perceptron sees all at once."""
        features = encode(self.encoder, normalized)
        run = self.perceptron.run(torch.cat([features.detach(), self.encoder(others)]))
        return EncodedPass(self.encoder, features, run.first(len(features))), run.output

    def forward(self, observation: Tree) -> Tensor:
        return self.params(self.normalized(observation))

    def numpy_forward(self, n: int) -> NumpyActor | None:
        """`forward` for n NumPy rows, with the parameters of the moment; None where the encoder is not for that."""
        encode = numpy_inference.encoder(self.encoder, n)
        if encode is None:
            return None
        norm = numpy_inference.normalizer(self.norm) if self.norm else None
        body = numpy_inference.layers(self.perceptron.stack)

        def forward(observation: Tree) -> np.ndarray:
            observation = numpy_inference.in_blocks(observation, n)
            return body(encode(norm(observation) if norm else observation)).reshape(n, -1)

        return forward


@dataclass(frozen=True)
class EncodedPass:
    """One evaluation of an encoder and a perceptron that sees its features, first of all it sees."""

    encoder: nn.Module
    features: Tensor  # with autograd, where the encoder has parameters
    run: Pass

    @property
    def output(self) -> Tensor:
        """[n, out_size], without autograd."""
        return self.run.output

    def to_parameters(self, gradient: Tensor) -> None:
        """Set the gradient of every parameter from dL/d output [n, out_size]."""
        if self.features.grad_fn is None:
            self.run.to_parameters(gradient)
            return
        for parameter in self.encoder.parameters():
            parameter.grad = None
        self.features.backward(self.run.to_all(gradient)[:, : self.features.shape[-1]])


@torch.enable_grad()
def encode(encoder: nn.Module, normalized: Tree) -> Tensor:
    """Features, with autograd where the encoder has parameters."""
    return encoder(normalized)


def features_of(observation_space: Space, config: ModelConfig) -> nn.Module:
    """What the perceptrons of actor and critics see: images encoded, vectors as they are, side by side.

    Raises:
        ConfigError: the model has memory or another part that these networks have not.
    """
    unserved = {
        "model.memory=none": config.memory != "none",
        "model.feed_back=false": config.feed_back,
        "model.shared=false": config.shared,
    }
    remedies = [remedy for remedy, asked in unserved.items() if asked]
    if remedies:
        raise ConfigError(
            f"DDPG, TD3 and SAC have an actor and critics apart, which see single observations; set "
            f"{' and '.join(remedies)} (with memory: algo=ppo, a2c or r2d1)"
        )
    return make_encoder(observation_space, chz.replace(config, hidden=()))


def size_of(encoder: nn.Module) -> int:
    """How many features an encoder gives."""
    return int(encoder.size)  # type: ignore[arg-type]  # every encoder states it
