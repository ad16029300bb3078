"""Spaces for networks, what is close, and gradients."""

from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn

BOX = spaces.Box(-1, 1, (2,), np.float32)
VECTOR = spaces.Box(-9, 9, (5,), np.float32)


def close(found: Any, expected: Any, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=tolerance)


def gradients(module: nn.Module) -> list[Tensor | None]:
    return [parameter.grad for parameter in module.parameters()]
