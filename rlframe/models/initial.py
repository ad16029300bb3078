"""Initial weights of networks by a rule, `model.init`, in the place of those that their code gives them."""

from __future__ import annotations

import math
from typing import TypeVar

import torch
from torch import nn

from rlframe.models.network import Linear, Units

INITS = ("auto", "torch", "lecun", "xavier")  # auto: as the networks were made
_CUT_DEVIATION = 0.87962566103423978  # of a standard normal that is cut at two deviations

_N = TypeVar("_N", bound=nn.Module)


@torch.no_grad()
def redrawn(network: _N, kind: str) -> _N:
    """The network, with new weights in its dense and convolutional layers, heads included, but not in noisy ones.

    With n inputs and m outputs of a layer, and zero bias:

    - lecun: normal of variance 1/n, cut at two deviations: the default of flax and Haiku (LeCun et al. 1998).
    - xavier: uniform of variance 2 / (n + m) (Glorot & Bengio 2010).
    - torch: uniform of variance 1 / 3n, biases too: the default of torch.
    """
    if kind == "auto":
        return network
    for module in network.modules():
        if isinstance(module, Linear | nn.Linear):
            weight, (m, n) = module.weight, module.weight.shape[-2:]
        elif isinstance(module, nn.Conv2d):
            weight, n, m = module.weight, module.weight[0].numel(), module.weight[:, 0].numel()
        else:
            continue
        if kind == "lecun":
            deviation = 1 / math.sqrt(n) / _CUT_DEVIATION
            nn.init.trunc_normal_(weight, std=deviation, a=-2 * deviation, b=2 * deviation)
        else:
            bound = math.sqrt(6 / (n + m)) if kind == "xavier" else 1 / math.sqrt(n)
            nn.init.uniform_(weight, -bound, bound)
        if module.bias is not None:
            bound = 1 / math.sqrt(n) if kind == "torch" else 0.0
            nn.init.uniform_(module.bias, -bound, bound)
    Units.of(network).project()
    return network
