"""What ranks that train one agent share: running statistics are averaged, and what is learned must stay equal."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from rlframe.core.ranks import Ranks, RanksDiffer
from rlframe.models.base import statistics
from rlframe.models.normalize import RunningNorm
from rlframe.runners.learner import Learner


def statistics_of(learner: Learner) -> list[Tensor]:
    """Running statistics of all users' networks."""
    parts = vars(learner.algo).values()
    networks = [learner.agent, *(part for part in parts if isinstance(part, nn.Module))]
    return [x for network in networks for x in statistics(network)]


def learned(learner: Learner) -> dict[str, Tensor]:
    """Everything that must be equal on all ranks, by name: learned parameters and running statistics."""
    found: dict[str, Tensor] = {f"agent.{name}": x for name, x in learner.agent.named_parameters()}
    known = {id(parameter) for parameter in found.values()}
    of_algo = [parameter for parameter in learner.algo.progress.learned if id(parameter) not in known]
    found |= {f"algo.parameter_{i} {tuple(x.shape)}": x for i, x in enumerate(of_algo)}
    for name, module in learner.agent.named_modules():
        if isinstance(module, RunningNorm):
            found |= {f"agent.{name}.{field}": x for field, x in module.named_buffers()}
    found |= {f"statistics {i} {tuple(x.shape)}": x for i, x in enumerate(statistics_of(learner))}
    return {f"{learner.name} {name}".lstrip(): x for name, x in found.items()}


def check_equal(tensors: Mapping[str, Tensor], ranks: Ranks) -> None:
    """Compare tensors over ranks, bit by bit, by their hashes.

    Raises:
        RanksDiffer: some are not equal; the message names the first one and the ranks.
    """
    hashes = ranks.gather({name: _hash(tensor) for name, tensor in tensors.items()})
    for name in tensors:
        others = [rank for rank, found in enumerate(hashes) if found.get(name) != hashes[0][name]]
        if others:
            n = sum(any(found.get(each) != hashes[0][each] for found in hashes) for each in tensors)
            raise RanksDiffer(
                f"{name} on rank {', '.join(map(str, others))} differs from rank 0 ({n} of {len(tensors)} differ); "
                f"all ranks must start from one seed or snapshot, and change parameters by OptimizerStep only"
            )


def _hash(tensor: Tensor) -> str:
    flat = tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8)
    return hashlib.blake2b(flat.numpy().data, digest_size=16).hexdigest()
