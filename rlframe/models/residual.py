"""Networks of residual blocks: FlashSAC's, with a normalisation over the batch or rows, and SimbaV2's on a sphere."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from rlframe.models.base import ModelConfig
from rlframe.models.network import (
    ACTIVATIONS,
    PLAIN,
    Body,
    LayerOptions,
    Layers,
    Linear,
    Network,
    Norm,
    Units,
    layers_of,
)

SHIFT = 3.0  # SimbaV2's constant input, which keeps the length of an observation (Lee et al. 2025, section 4)
LEAST_LENGTH = 1e-8  # of what is divided by its length


def make_body(n_in: int, n_out: int, config: ModelConfig, k: int = 0, dropout: float = 0.0, parts: int = 1) -> Body:
    """The fully connected layers or blocks of an actor, or of k critics; `parts`: see SphereNetwork."""
    sizes, blocks, options = (n_in, *config.hidden, n_out), (config.blocks, config.expansion), config.options(dropout)
    if not config.blocks:
        return Network(sizes, config.activation, norm=config.norm, k=k, options=options)
    if config.block == "sphere":
        return SphereNetwork(sizes, config.activation, blocks, k, options, parts)
    return ResidualNetwork(sizes, config.activation, config.norm, blocks, k, options)


class Block(nn.Module):
    """x + f(norm(W₂ f(norm(W₁ x)))), W₁ to `expansion` times the width."""

    def __init__(self, width: int, expansion: int, activation: str, norm: str, k: int, gain: float) -> None:
        super().__init__()
        wide, has_bias = expansion * width, norm == "none"
        self.linears = nn.ModuleList(layers_of(*pair, k, gain, has_bias) for pair in ((width, wide), (wide, width)))
        self.norms = nn.ModuleList(Norm(norm, size, k) for size in (wide, width) if norm != "none")
        self.layers = Layers([each._parameters for each in self.linears], [activation] * 2, list(self.norms))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layers(x)


class ResidualNetwork(Body):
    """A linear layer, residual blocks, a normalisation of each row by its root mean square, and a linear layer.

    (FlashSAC, arXiv 2604.04539.) Only the last layer has a bias, unless there is no normalisation.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        activation: str,
        norm: str,
        blocks: tuple[int, int],
        k: int = 0,
        options: LayerOptions = PLAIN,
    ) -> None:
        """Args:
        sizes: of the input, of all blocks, and of the output.    activation: in blocks.    norm: see `Norm`.
        blocks: their number, and how many times the width is inside.    k: networks; see `Body`.
        """
        n_in, width, n_out = sizes
        super().__init__(n_in, n_out, k, options)
        gain = float(options.unit_rows)
        begin = [Norm(norm, n_in, k)] if options.norm_input and norm != "none" else []
        self.norms = nn.ModuleList([*begin, Norm("rms", width, k)])
        first, last = layers_of(n_in, width, k, gain), layers_of(width, n_out, k, gain, has_bias=True)
        self.linears = nn.ModuleList([first, last])
        self.blocks = nn.ModuleList(Block(width, blocks[1], activation, norm, k, gain) for _ in range(blocks[0]))
        self.embed = Layers([first._parameters], ["none"], begin=begin)
        self.head = Layers([last._parameters], ["none"], begin=[self.norms[-1]])
        Units.of(self).project()

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def unit(x: Tensor) -> Tensor:
    """Rows [..., d] divided by their length."""
    return x / torch.linalg.vector_norm(x, dim=-1, keepdim=True).clamp(min=LEAST_LENGTH)


class Scaled(nn.Module):
    """s ⊙ W x, without bias: s starts at `scale`."""

    def __init__(self, n_in: int, n_out: int, k: int, scale: float) -> None:
        super().__init__()
        self.linear = layers_of(n_in, n_out, k, gain=1.0)
        self.scale = nn.Parameter(torch.full((k, 1, n_out) if k else (n_out,), scale))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.linear(x)


class SphereBlock(nn.Module):
    """unit(x + α ⊙ (unit(W₂ f(s ⊙ W₁ x)) - x)), a step of learned size from x along the sphere.

    α is learned as α √d / α₀, which starts at 1 / √d and so moves as entries of unit vectors do.
    """

    def __init__(self, width: int, expansion: int, activation: str, k: int, step: float) -> None:
        """`step`: α₀, what α is at first."""
        super().__init__()
        wide = expansion * width
        self.inner, self.outer = Scaled(width, wide, k, math.sqrt(2 / wide)), layers_of(wide, width, k, gain=1.0)
        self.activation, self.factor = activation, step * math.sqrt(width)
        self.step = nn.Parameter(torch.full((k, 1, width) if k else (width,), 1 / math.sqrt(width)))

    def forward(self, x: Tensor) -> Tensor:
        inside = ACTIVATIONS[self.activation](self.inner(x)) + LEAST_LENGTH  # never zero
        return unit(x + self.step * self.factor * (unit(self.outer(inside)) - x))


class SphereNetwork(Body):
    """Features of length 1 throughout, of an observation whose length a constant input keeps (SimbaV2).

    Hyperspherical Normalization for Scalable Deep Reinforcement Learning. Lee et al., 2025. arXiv 2502.15280. Weights
    are to be of unit length too: LayerOptions.unit_rows. The outputs are `parts` of a size, each of a layer of its own.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        activation: str,
        blocks: tuple[int, int],
        k: int = 0,
        options: LayerOptions = PLAIN,
        parts: int = 1,
    ) -> None:
        """Arguments as of ResidualNetwork.    parts: more than one only of a single network."""
        n_in, width, n_out = sizes
        super().__init__(n_in, n_out, k, options)
        n_blocks, expansion = blocks
        self.embed, stacked = Scaled(n_in + 1, width, k, math.sqrt(2 / width)), k or (parts if parts > 1 else 0)
        self.blocks = nn.ModuleList(
            SphereBlock(width, expansion, activation, k, 1 / (n_blocks + 1)) for _ in range(n_blocks)
        )
        self.hidden = Scaled(width, width, stacked, 1.0)
        self.out, self.parts = layers_of(width, n_out // parts, stacked, 1.0, has_bias=True), parts
        Units.of(self).project()

    @property
    def last(self) -> Linear:
        return self.out

    def forward(self, x: Tensor) -> Tensor:
        x = unit(self.embed(unit(torch.cat([x, x.new_full((*x.shape[:-1], 1), SHIFT)], -1))))
        for block in self.blocks:
            x = block(x)
        if self.parts == 1:
            return self.out(self.hidden(x))
        found = self.out(self.hidden(x.expand(self.parts, *x.shape)))
        return torch.cat(list(found.unbind(0)), -1)
