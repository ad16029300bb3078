"""Value rescaling: rewards of any size learned without clipping them."""

import torch
from torch import Tensor

_EPSILON = 1e-3  # of Kapturowski et al. 2019: keeps the inverse Lipschitz


def rescale(x: Tensor) -> Tensor:
    """h(x) = sign(x) (√(|x| + 1) - 1) + ε x, ε = 10^-3   (Pohlen et al. 2018; Kapturowski et al. 2019, section 2.3)."""
    return x.sign() * ((x.abs() + 1).sqrt() - 1) + _EPSILON * x


def unscale(y: Tensor) -> Tensor:
    """h^-1(y) = sign(y) (((√(1 + 4ε (|y| + 1 + ε)) - 1) / 2ε)^2 - 1)   (Pohlen et al. 2018, proposition A.2).

    In float64: the difference of nearly equal numbers is divided by ε.
    """
    wide = y.double()
    root = (torch.sqrt(1 + 4 * _EPSILON * (wide.abs() + 1 + _EPSILON)) - 1) / (2 * _EPSILON)
    return (wide.sign() * (root.square() - 1)).to(y.dtype)
