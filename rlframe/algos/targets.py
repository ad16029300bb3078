"""Target networks: copies of online ones, replaced or moved slowly; and saved generators."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rlframe.core.errors import ConfigError
from rlframe.models import ModelConfig


def check_feedforward(model: ModelConfig, algo: str, other: str) -> None:
    """Raises:
    ConfigError: the model has memory, which `algo` does not train.
    """
    if model.memory != "none":
        raise ConfigError(f"model.memory={model.memory}: {algo} learns from single rows; use {other} or memory=none")


def load_generator(rng: np.random.Generator, state: Mapping[str, Any]) -> None:
    """Set a generator to a saved state."""
    rng.bit_generator.state = state


def load_torch_generator(rng: torch.Generator, state: Tensor) -> None:
    """The same; from a state that a generator of another kind of device has left, to one that follows from it."""
    if state.numel() == rng.get_state().numel():
        rng.set_state(state.cpu())
    else:
        digest = hashlib.blake2b(state.cpu().numpy().tobytes(), digest_size=8).digest()
        rng.manual_seed(int.from_bytes(digest, "little") >> 1)


@torch.no_grad()
def copy_into(target: nn.Module, online: nn.Module) -> None:
    """Make a target network equal to the online one, statistics and noise included."""
    torch._foreach_copy_(_tensors(target), _tensors(online))


def _tensors(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


def soft_update(targets: list[nn.Parameter], onlines: list[nn.Parameter], tau: float) -> None:
    """target <- (1 - tau) target + tau online, all parameters at once (Lillicrap et al. 2016, algorithm 1).

    To be called where autograd is off.
    """
    torch._foreach_lerp_(targets, onlines, tau)  # type: ignore[arg-type]  # which takes lists of tensors
