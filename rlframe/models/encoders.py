"""Encoders: from an observation of any supported space to a feature vector; the first part of every network."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
import torch.nn.functional as F
from gymnasium import Space, spaces
from torch import Tensor, nn

from rlframe.core.config import nearest
from rlframe.core.errors import ConfigError, naming
from rlframe.core.multi_agent import JointSpace
from rlframe.core.names import made_by
from rlframe.core.spaces import action_parts, channels_last, zeros
from rlframe.core.struct import Tree, leaves, map_tree
from rlframe.kernels.device import in_bf16, learning_in
from rlframe.models.base import ModelConfig, with_modes
from rlframe.models.convolutions import AdaptiveMaxPool2d, ChannelNorm, FirstConv2d, SpectralConv2d
from rlframe.models.network import Network, orthogonal

_NATURE_MINIMUM = 36  # pixels per side, below which the Nature CNN has no output
_IMAGE_ENCODERS = ("nature", "impala", "hadamax")
_OF_CONVOLUTIONS = ("channels", "kernels", "strides", "pools", "image_pool", "spectral_norm")


class Vector(nn.Module):
    """A vector, number or class as float features [..., size]: classes one-hot, bytes in [0, 1], others unchanged."""

    def __init__(self, space: Space) -> None:
        super().__init__()
        self.classes: list[int] = []
        self.ndim = len(space.shape or ())
        self.scale = _pixel_scale(space) if isinstance(space, spaces.Box) and space.dtype == np.uint8 else 1.0
        match space:
            case spaces.Discrete():
                self.classes, self.size = [int(space.n)], int(space.n)
            case spaces.MultiDiscrete():
                self.classes = [int(n) for n in space.nvec.flatten()]
                self.size = sum(self.classes)
            case _:
                self.size = math.prod(space.shape or ())

    def forward(self, x: Tensor) -> Tensor:
        if self.ndim != 1:
            x = x.flatten(x.dim() - self.ndim) if self.ndim else x.unsqueeze(-1)
        if not self.classes:
            return x.float() * self.scale if self.scale != 1.0 else x.float()
        columns = zip(x.long().unbind(-1), self.classes, strict=True)
        return torch.cat([F.one_hot(column, n) for column, n in columns], -1).float()


class Image(nn.Module):
    """Pixels of either layout, with or without a frame stack, to channels first; times `scale` they lie in [0, 1]."""

    def __init__(self, space: spaces.Box) -> None:
        super().__init__()
        shape = space.shape
        self.ndim = len(shape)
        self.channels_last = channels_last(shape)
        height, width = shape[-3:-1] if self.channels_last else shape[-2:]
        self.shape = (math.prod(shape) // (height * width), height, width)  # channels, height, width
        self.scale = _pixel_scale(space)

    def forward(self, x: Tensor) -> Tensor:
        if self.channels_last:
            x = x.movedim(-1, -3)
        return x.reshape(*x.shape[: x.dim() - self.ndim], *self.shape)


def _pixel_scale(space: spaces.Box) -> float:
    """1 / the space's upper bound, if that is between 1 and 65,535; else 1."""
    high = float(space.high.max())
    return 1 / high if 1 < high <= 65_535 else 1.0


def is_image(space: Space) -> bool:
    """A Box of rank 3 or 4, or an integer Box of rank 2, of at least 8 x 8 pixels (smaller grids are vectors)."""
    if not isinstance(space, spaces.Box) or len(space.shape) not in (2, 3, 4):
        return False
    pixels = space.shape[-3:-1] if channels_last(space.shape) else space.shape[-2:]
    return min(pixels) >= 8 and (space.dtype.kind in "ui" or len(space.shape) > 2)


def _is_board(space: Space, config: ModelConfig) -> bool:
    """Whether it is a grid of any size for convolutions: encoder=nature with kernels of its own asks for that."""
    board = isinstance(space, spaces.Box) and len(space.shape) == 3
    return board and config.encoder == "nature" and bool(config.kernels)


class ConvNet(nn.Sequential):
    """Convolutions without padding, perhaps normalised, and a relu after each, and after that perhaps max pooling."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__(*parts)
        self.plain = all(isinstance(part, nn.Conv2d | nn.ReLU) for part in parts)

    def convolutions(self) -> list[nn.Conv2d]:
        """The convolutions; the first is a FirstConv2d."""
        return [part for part in self if isinstance(part, nn.Conv2d)]


# The convolutions of Mnih et al. 2015 (Nature 518, methods):
NATURE = {"channels": (32, 64, 64), "kernels": (8, 4, 3), "strides": (4, 2, 1)}


def conv_net(image: Image, config: ModelConfig) -> ConvNet:
    """The convolutions of the config, in what it leaves out those of Mnih et al. 2015.

    Raises:
        ConfigError: the lists have different lengths, or a layer does not fit the image.
    """
    channels, kernels, strides = (getattr(config, name) or NATURE[name] for name in NATURE)
    pools = config.pools or (1,) * len(channels)
    given = {"channels": channels, "kernels": kernels, "strides": strides, "pools": pools}
    if len({*map(len, given.values())}) > 1:
        shown = ", ".join(f"model.{name}=[{','.join(map(str, each))}]" for name, each in given.items())
        raise ConfigError(f"{shown}: each needs one number for every convolution; give as many of each")
    layers, (_, height, width) = list(zip(channels, kernels, strides, pools, strict=True)), image.shape
    size = [height, width]
    for i, (_, kernel, stride, pool) in enumerate(layers):
        seen = "x".join(map(str, size))
        for name, side in (("kernels", kernel), ("pools", pool)):
            if side > min(size):
                raise ConfigError(
                    f"model.{name}: {side}x{side} in layer {i + 1} of {len(layers)}, which sees {seen} pixels of an "
                    f"image of {height}x{width}; use a smaller one, smaller strides before it, or fewer layers"
                )
            size = [(n - side) // (stride if name == "kernels" else side) + 1 for n in size]
            seen = "x".join(map(str, size))
    parts: list[nn.Module] = []
    before = (image.shape[0], *channels)
    for n, (out, kernel, stride, pool) in zip(before, layers, strict=False):
        layer = nn.Conv2d(n, out, kernel, stride) if parts else FirstConv2d(n, out, kernel, stride, scale=image.scale)
        norms = [ChannelNorm(out)] if config.image_norm == "layer" else []
        parts += [orthogonal(layer), *norms, nn.ReLU(), *([nn.MaxPool2d(pool)] if pool > 1 else [])]
    return ConvNet(*parts)


class Residual(nn.Module):
    """Two 3x3 convolutions, perhaps normalised, with a skip connection."""

    def __init__(self, channels: int, norm: str = "none", spectral: bool = False) -> None:
        super().__init__()
        kind = SpectralConv2d if spectral else nn.Conv2d
        self.one = _normalized(orthogonal(kind(channels, channels, 3, padding=1)), channels, norm)
        self.two = _normalized(orthogonal(kind(channels, channels, 3, padding=1)), channels, norm)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.two(F.relu(self.one(F.relu(x))))


def _normalized(convolution: nn.Module, channels: int, norm: str) -> nn.Module:
    return nn.Sequential(convolution, ChannelNorm(channels)) if norm == "layer" else convolution


def impala(
    channels: int, scale: float, stages: Sequence[int] = (), norm: str = "none", spectral: bool = False
) -> nn.Sequential:
    """The deep residual network of Espeholt et al. 2018 (figure 3): stages of 16, 32, 32 channels, two blocks each."""
    layers: list[nn.Module] = []
    for out in stages or (16, 32, 32):
        layers += [
            _normalized(orthogonal(FirstConv2d(channels, out, 3, padding=1, scale=scale)), out, norm),
            nn.MaxPool2d(3, 2, 1),
            Residual(out, norm, spectral),
            Residual(out, norm, spectral),
        ]
        channels, scale = out, 1.0
    return nn.Sequential(*layers, nn.ReLU())


class Hadamax(nn.Module):
    """A stage of `hadamax`: gelu(norm(conv x)) ⊙ gelu(norm(conv' x)), then max pooling; both convolutions at once."""

    def __init__(self, channels: int, out: int, kernel: int, pool: tuple[int, int, int], scale: float) -> None:
        """`pool`: side, stride and padding."""
        super().__init__()
        self.both = orthogonal(FirstConv2d(channels, 2 * out, kernel, padding=kernel // 2, scale=scale))
        self.norms = nn.ModuleList([ChannelNorm(out), ChannelNorm(out)])
        self.pool = nn.MaxPool2d(*pool)

    def forward(self, x: Tensor) -> Tensor:
        parts = zip(self.norms, self.both(x).chunk(2, 1), strict=True)
        one, other = (F.gelu(norm(part), approximate="tanh") for norm, part in parts)
        return self.pool(one * other)


def hadamax(image: Image, stages: Sequence[int] = ()) -> nn.Sequential:
    """The encoder of Kooi et al. 2025 (arXiv 2505.15345): three stages of 32, 64, 64 channels, always normalised.

    The last pooling has the size of its input, 11 x 11 of 84 x 84 pixels, as in the authors' code.

    Raises:
        ConfigError: there are not three numbers of channels.
    """
    if len(stages) not in (0, 3):
        raise ConfigError(f"model.channels={list(stages)} must be three numbers with model.encoder=hadamax")
    layers, channels, scale, pools = [], image.shape[0], image.scale, ((4, 4, 0), (2, 2, 0), (3, 1, 1))
    for out, kernel, pool in zip(stages or (32, 64, 64), (8, 4, 3), pools, strict=True):
        layers.append(Hadamax(channels, out, kernel, pool, scale))
        channels, scale = out, 1.0
    return nn.Sequential(*layers)


def activation_after(images: bool, config: ModelConfig) -> str:
    """That of the fully connected layers; after Hadamax, whose convolutions have GELU too, it is that."""
    return "gelu" if images and config.encoder == "hadamax" else config.activation


class Encoder(nn.Module):
    """Concatenated vectors, and a CNN for each image, then one MLP; gives `size` features."""

    def __init__(self, space: Space, config: ModelConfig) -> None:
        super().__init__()
        self.leaves = nn.ModuleList()
        self.image_leaves = nn.ModuleList()
        self.order: list[bool] = []  # for each leaf: whether it is an image
        for _, part in action_parts(space):
            self.order.append(convolves(part, config))
            if self.order[-1]:
                assert isinstance(part, spaces.Box)
                self.image_leaves.append(_convolutions(Image(part), config))
            else:
                self.leaves.append(Vector(part))
        size = sum(leaf.size for leaf in self.leaves if isinstance(leaf, Vector))
        size += sum(_n_features(leaf) for leaf in self.image_leaves)
        hidden = config.image_hidden if any(self.order) else config.hidden
        activation = activation_after(any(self.order), config)
        self.mlp = Network([size, *hidden], activation, activation, config.norm, gain=math.sqrt(2))
        self.size = self.mlp.size
        self._only = list(self.leaves) if self.order == [False] else []  # in a list: not registered twice

    def forward(self, observation: Tree) -> Tensor:
        features = self.features(observation)
        return self.mlp(features)

    def features(self, observation: Tree) -> Tensor:
        """The input of the MLP."""
        if self._only:
            return self._only[0].forward(*leaves(observation))  # without 10 us of hooks, of which it has none
        vectors, images = iter(self.leaves), iter(self.image_leaves)
        parts = [
            _encode_image(next(images), x) if image else next(vectors)(x)
            for image, x in zip(self.order, leaves(observation), strict=True)
        ]
        return torch.cat(parts, -1) if len(parts) > 1 else parts[0]


def _convolutions(image: Image, config: ModelConfig) -> nn.Sequential:
    body, pool = _body(image, config), config.image_pool
    if not pool:
        return nn.Sequential(image, body)
    with torch.no_grad(), learning_in("fp32"):
        height, width = body(torch.zeros(1, *image.shape)).shape[2:]
    if pool > min(height, width):
        raise ConfigError(
            f"model.image_pool={pool} is larger than the convolutions' output of {height}x{width}; use at most "
            f"{min(height, width)}"
        )
    return nn.Sequential(image, nn.Sequential(body, AdaptiveMaxPool2d(pool)))


def _body(image: Image, config: ModelConfig) -> nn.Sequential:
    channels, height, width = image.shape
    kind, shaped = config.encoder, config.kernels or config.strides or config.pools
    small = min(height, width) < _NATURE_MINIMUM and not shaped
    if config.spectral_norm and not (kind == "impala" or (kind == "auto" and small)):
        raise ConfigError(f"model.spectral_norm=true is for model.encoder=impala, not {kind}; leave it out")
    if kind in ("impala", "hadamax") and shaped:
        raise ConfigError(f"model.kernels, strides and pools are not for model.encoder={kind}; use encoder=nature")
    if kind == "hadamax":
        return hadamax(image, config.channels)
    if kind == "nature" and small:
        raise ConfigError(
            f"model.encoder=nature needs images of 36 pixels per side, got {height}x{width}; use impala, or smaller "
            f"model.kernels and model.strides"
        )
    if kind == "impala" or small:
        return impala(channels, image.scale, config.channels, config.image_norm, config.spectral_norm)
    return conv_net(image, config)


def _encode_image(cnn: nn.Module, x: Tensor) -> Tensor:
    assert isinstance(cnn, nn.Sequential) and isinstance(cnn[0], Image)
    lead = x.shape[: x.dim() - cnn[0].ndim]
    with torch.autocast(x.device.type, torch.bfloat16, enabled=in_bf16()):
        features = cnn(x.flatten(0, len(lead) - 1) if len(lead) > 1 else x)
    return features.flatten(1).float().unflatten(0, lead)


def _n_features(cnn: nn.Module) -> int:
    assert isinstance(cnn, nn.Sequential) and isinstance(cnn[0], Image)
    with torch.no_grad(), learning_in("fp32"):
        return cnn[1](torch.zeros(1, *cnn[0].shape)).numel()


def has_images(space: Space) -> bool:
    """Whether any part of an observation space is an image."""
    if isinstance(space, JointSpace):
        return any(has_images(own) for own in space.own.values())
    return any(is_image(part) for _, part in action_parts(space))


def convolves(space: Space, config: ModelConfig) -> bool:
    """Whether an encoder of this config has a CNN for a part of the space; `image_hidden` follows it, else `hidden`."""
    if isinstance(space, JointSpace):
        return any(convolves(own, config) for own in space.own.values())
    found = any(is_image(part) or _is_board(part, config) for _, part in action_parts(space))
    return config.encoder != "mlp" and found


class CustomEncoder(nn.Module):
    """A user's nn.Module from observation [N, *obs] to features [N, F], for any leading dimensions."""

    def __init__(self, module: nn.Module, space: Space) -> None:
        super().__init__()
        self.module = with_modes(module)
        self.ndim = leaves(zeros(space))[0].ndim
        with torch.no_grad():
            features = module(map_tree(torch.as_tensor, zeros(space, (2,))))
        if not isinstance(features, Tensor) or features.dim() != 2 or features.shape[0] != 2:
            given = tuple(features.shape) if isinstance(features, Tensor) else f"a {type(features).__name__}"
            raise ConfigError(
                f"model.encoder: {type(module).__name__} maps two observations to {given}; it must map [N, ...] to "
                f"features [N, F]"
            )
        if features.dtype != torch.float32:
            raise ConfigError(
                f"model.encoder: {type(module).__name__} returns features of {features.dtype}; make them torch.float32"
            )
        self.size = int(features.shape[1])

    def forward(self, observation: Tree) -> Tensor:
        return with_leading(self.module, observation, self.ndim)


def with_leading(network: Callable[[Tree], Tensor], observation: Tree, ndim: int) -> Tensor:
    """A network of observations [N, *obs], for any leading dimensions; `ndim`: of the first part of an observation."""
    x = leaves(observation)[0]
    lead = x.shape[: x.dim() - ndim]
    if len(lead) == 1:
        return network(observation)
    return network(map_tree(lambda x: x.flatten(0, len(lead) - 1), observation)).unflatten(0, lead)


def feature_size(encoder: nn.Module) -> int:
    """Number of features of an encoder."""
    return int(encoder.size)  # type: ignore[arg-type]  # an attribute of every encoder


def make_encoder(space: Space, config: ModelConfig) -> nn.Module:
    """The encoder of this name, with its number of features as `size`.

    Raises:
        ConfigError: there is no such encoder, or it does not fit the space.
    """
    config.check_plain_layers()
    images = has_images(space) or any(_is_board(part, config) for _, part in action_parts(space))
    if config.encoder in _IMAGE_ENCODERS and not images:
        raise ConfigError(f"model.encoder={config.encoder} needs images, but {space} has none; use auto")
    if config.image_norm != "none" and not images:
        raise ConfigError(f"model.image_norm={config.image_norm} needs images, but {space} has none; use model.norm")
    given = [name for name in _OF_CONVOLUTIONS if getattr(config, name)]
    if given and (config.encoder not in ("auto", *_IMAGE_ENCODERS) or not images):
        shown = ", ".join(_IMAGE_ENCODERS)
        raise ConfigError(f"model.{given[0]} is for the images of model.encoder=auto, {shown}; leave it out")
    if config.encoder in ("auto", "mlp", *_IMAGE_ENCODERS):
        return Encoder(space, config)
    if ":" not in config.encoder:
        raise ConfigError(
            f"model.encoder={config.encoder!r} is not one of auto, mlp, nature, impala, hadamax"
            f"{nearest(config.encoder, ('auto', 'mlp', *_IMAGE_ENCODERS))}; write your own class as "
            f"package.module:Class or ./file.py:Class"
        )
    made = made_by(config.encoder, "model.encoder", nn.Module, "torch.nn.Module", space)
    with naming(f"model.encoder={config.encoder} failed in forward"):
        return CustomEncoder(made, space)
