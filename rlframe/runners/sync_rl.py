"""SyncRl: MinibatchRlEval in several ranks at once, whose gradients are averaged and whose parameters stay equal."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping

import chz
import torch
from torch import Tensor

from rlframe.agents import Agent
from rlframe.algos import Algorithm
from rlframe.core.config import option
from rlframe.core.errors import ConfigError
from rlframe.core.ranks import Ranks, RanksDiffer
from rlframe.models.normalize import RunningNorm
from rlframe.runners.base import NO_LIMITS, Limits, Runner, RunnerConfig
from rlframe.samplers import Evaluator, Sampler


@chz.chz
class Config(RunnerConfig):
    """How long to train and how often to evaluate and report. `world_size` says in how many ranks."""

    timeout_s: float = option(600.0, "seconds that a rank waits for the others, before the run ends")

    @chz.validate
    def _check(self) -> None:
        if not self.timeout_s > 0:
            raise ConfigError(f"runner.timeout_s={self.timeout_s} must be above 0")

    def make_runner(
        self, sampler: Sampler, agent: Agent, algo: Algorithm, make_evaluator: Callable[[], Evaluator]
    ) -> SyncRl:
        return SyncRl(sampler, agent, algo, self.n_steps, self.log_interval_steps, make_evaluator(), self.limits())


class SyncRl(Runner):
    """Every rank has a sampler of its own and a copy of all that is learned; built and trained within `join`ed ranks.

    Batch sizes are those of each rank, env_steps and schedules count over all. Evaluates before training and at every
    report, each rank its part, and checks there that what is learned is the same on all ranks.
    """

    score_name = "eval/return_mean"

    def __init__(
        self,
        sampler: Sampler,
        agent: Agent,
        algo: Algorithm,
        n_steps: int,
        log_interval_steps: int,
        evaluator: Evaluator,
        limits: Limits = NO_LIMITS,
    ) -> None:
        super().__init__(sampler, agent, algo, n_steps, log_interval_steps, limits)
        self.evaluator = evaluator

    def evaluate(self) -> dict[str, float]:
        """Mean return, its spread and the episodes' length, of all ranks' episodes.

        Raises:
            RanksDiffer: the ranks do not have the same agent to evaluate.
        """
        check_equal(learned(self.agent, self.algo), self.ranks)
        return self.evaluator.score(self.env_steps, self.stop.__bool__)

    def close(self) -> None:
        """Close the sampler and the evaluator."""
        self.sampler.close()
        self.evaluator.close()


def learned(agent: Agent, algo: Algorithm) -> dict[str, Tensor]:
    """All that must be equal on every rank, by name: what gradients move, and running statistics."""
    found: dict[str, Tensor] = {f"agent.{name}": parameter for name, parameter in agent.named_parameters()}
    known = {id(parameter) for parameter in found.values()}
    of_algo = [parameter for parameter in algo.progress.learned if id(parameter) not in known]
    found |= {f"algo.parameter_{i} {tuple(x.shape)}": x for i, x in enumerate(of_algo)}
    for name, module in agent.named_modules():
        if isinstance(module, RunningNorm):
            found |= {f"agent.{name}.{field}": x for field, x in module.named_buffers()}
    return found


def check_equal(tensors: Mapping[str, Tensor], ranks: Ranks) -> None:
    """Compare tensors over ranks, bit by bit, by their hashes.

    Raises:
        RanksDiffer: some are not equal; names the first, and the ranks.
    """
    hashes = ranks.gather({name: _hash(tensor) for name, tensor in tensors.items()})
    for name in tensors:
        others = [rank for rank, found in enumerate(hashes) if found.get(name) != hashes[0][name]]
        if others:
            n = sum(any(found.get(each) != hashes[0][each] for found in hashes) for each in tensors)
            raise RanksDiffer(
                f"{name} is another on rank {_names(others)} than on rank 0 ({n} of {len(tensors)} differ); "
                f"all ranks must start from one seed or snapshot, and change what they learn by Updaters only"
            )


def _names(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))


def _hash(tensor: Tensor) -> bytes:
    flat = tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8)
    return hashlib.blake2b(flat.numpy().data, digest_size=16).digest()
