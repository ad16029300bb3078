"""Spaces and observations for networks, and their gradients."""

from typing import Any

import numpy as np
import torch
from gymnasium import Space, spaces
from torch import Tensor, nn

from rlframe.core.spaces import zeros
from rlframe.core.struct import map_tree

BOX = spaces.Box(-1, 1, (2,), np.float32)
VECTOR, IMAGE = spaces.Box(-9, 9, (5,), np.float32), spaces.Box(0, 255, (12, 12, 3), np.uint8)
MIXED = spaces.Dict({"image": IMAGE, "place": VECTOR, "which": spaces.Discrete(3)})
OBSERVATIONS = {"vector": VECTOR, "image": IMAGE, "dict": MIXED}


def close(found: Any, expected: Any, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=tolerance)


def observations(space: Space, n: int) -> Any:
    generator = torch.Generator().manual_seed(0)

    def fill(x: np.ndarray) -> Tensor:
        drawn = torch.rand(x.shape, generator=generator)
        return drawn if x.dtype.kind == "f" else (drawn * 2.99).to(torch.from_numpy(x).dtype)

    return map_tree(fill, zeros(space, (n,)))


def gradients(module: nn.Module) -> list[Tensor | None]:
    return [parameter.grad for parameter in module.parameters()]
