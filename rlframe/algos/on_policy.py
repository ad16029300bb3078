"""OnPolicy, the base class of PPO, A2C, PQN and their kind; their batches, with advantages and returns; minibatches."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import chz
import numpy as np
import torch
from gymnasium import Space
from torch import Tensor

from rlframe.agents import PolicyAgent, QAgent, make_policy_agent
from rlframe.algos import fields
from rlframe.algos.base import Algorithm, UpdateMetrics, observed
from rlframe.algos.checks import check_norms
from rlframe.algos.defaults import Defaults, default_model
from rlframe.core.errors import ConfigError
from rlframe.core.schedule import Scheduled, curve, scheduled
from rlframe.core.seeding import Role, generator
from rlframe.core.struct import Struct, Tree, map_tree, unbind
from rlframe.core.types import AgentInputs, BatchSpec, Samples
from rlframe.exploration import POLICY_KINDS, ExploreConfig, explore
from rlframe.kernels.transfer import to_device
from rlframe.models import ModelConfig
from rlframe.models.network import OF_BATCH
from rlframe.ops.policy_gradient import explained_variance, masked_normalize, mean_weights
from rlframe.optimizers import OptimizerConfig, optimizer
from rlframe.updates.compiled import looks_of, updates_of
from rlframe.updates.optimizer_step import make_optimizer_step
from rlframe.updates.progress import Progress
from rlframe.updates.schedules import Schedules

NO_INPUTS = AgentInputs((), (), (), ())
_SIZES = 8  # of minibatches, see `order_of_rows`


@chz.chz
class OnPolicyConfig:
    """Base class of the Configs of on-policy algorithms with a policy."""

    learns_from = "batches"
    for_images = Defaults(ModelConfig(activation="relu"))  # as in Mnih et al. 2015

    optimizer: OptimizerConfig | str = optimizer("adam", epsilon=1e-5)
    discount: Scheduled = scheduled(0.99, "gamma, per env step", high=1)
    value_coef: Scheduled = scheduled(0.5, "weight of the value loss")
    max_grad_norm: Scheduled = fields.grad_norm(0.5)
    explore: ExploreConfig | str = explore("stochastic", POLICY_KINDS)

    def make_agent(
        self, observation_space: Space, action_space: Space, model: ModelConfig | None = None, seed: int = 0
    ) -> PolicyAgent:
        model = model or default_model(self, observation_space, action_space)
        if model.norm in OF_BATCH:
            raise ConfigError(
                f"model.norm={model.norm} gives the policy other action probabilities when it learns than when it "
                f"acts; use layer or none"
            )
        return make_policy_agent(observation_space, action_space, model, seed, self.explore)


class OnPolicy(Algorithm):
    """Base class of algorithms that learn from each batch as it arrives, and then never again: here by one step.

    Subclasses add `_learn`, and those that make several steps an `update` of their own.
    """

    saved: Sequence[str] = ("progress", "optimizer")
    agent: PolicyAgent | QAgent

    def __init__(self, agent: PolicyAgent | QAgent, n_steps: int, config: Any) -> None:
        """`n_steps`: env_steps of the run, over which schedules go.    config: that of the algorithm."""
        check_norms(agent)
        self.agent, self.config, self.progress = agent, config, Progress()
        self.samples: list[Samples] = []  # at most one: the batch to learn from
        self.schedules = Schedules(config, n_steps, self.progress, next(agent.parameters()).device)
        self.now = self.schedules.now
        self.optimizer = make_optimizer_step(agent.parameters(), self.schedules)
        self.learn = updates_of(self._learn, self.schedules, [self.optimizer], looks_of(agent.model))

    @abstractmethod
    def _learn(self, inputs: Any) -> Any:
        """One gradient step, from a batch, or from a minibatch and the memory before it; see Compiled."""

    def update(self) -> UpdateMetrics:
        samples = self.samples.pop()
        metrics = self.learn(samples)
        self.progress.updates += 1
        self.agent.observe(observed(samples))
        return {**metrics, "learning_rate": self.optimizer.rate}

    def receive(self, samples: Samples) -> None:
        self.progress.count(samples)
        state, final = (self.agent.parts_of(each).memory for each in (samples.state, samples.final_state))
        samples = replace(samples, state=state, final_state=final)
        self.samples = [samples.to(self.optimizer.device)]

    def can_receive(self) -> bool:
        return not self.samples

    def updates_due(self) -> int:
        return len(self.samples)

    def updates_in(self, n_steps: int, batch_size: int) -> int:
        return self.steps_of_batch() * -(-n_steps // batch_size)

    def steps_of_batch(self) -> int:
        """Gradient steps on each batch."""
        return 1

    def counters(self) -> dict[str, float]:
        return self.schedules.metrics()


class OnPolicyActorCritic(OnPolicy):
    """Base class of algorithms that make one step a batch on the policy gradient, the value error and the entropy."""

    agent: PolicyAgent

    @abstractmethod
    def targets(self, samples: Samples, value: Tensor) -> tuple[Tensor, Tensor]:
        """Advantages and returns [T, B] of a batch, by the values [T+1, B] before the step."""

    def _learn(self, samples: Samples) -> dict[str, Tensor]:
        """One gradient step on the whole batch."""
        value = values(self.agent, samples)
        advantage, return_ = self.targets(samples, value)
        if self.now.normalize_advantage:
            advantage = masked_normalize(advantage, samples.valid, self.progress.ranks.sum_tensor)
        loss, metrics = self.loss(*self.outputs(samples), samples, advantage, return_)
        grad_norm = self.optimizer.minimize(loss, samples, samples.valid)
        fit = explained_variance(value[:-1], return_, samples.valid)
        return {**metrics, "grad_norm": grad_norm, "explained_variance": fit}

    def outputs(self, samples: Samples) -> tuple[Tensor, Tensor]:
        """The policy's parameters and the value [T, B], with gradient: the arguments of `loss` before the batch."""
        params, value, _ = self.agent(samples.inputs[:-1], samples.state)
        return params, value

    def loss(
        self, params: Tensor, value: Tensor, samples: Samples, advantage: Tensor, return_: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """-E[A log π(a|s)] + c_v E[(V - G)²] / 2 - c_e E[H], over the valid rows of a batch; and its parts.

        Mnih et al. 2016, section 4, negated for descent. `advantage` A and `return_` G are constants [T, B].
        """
        log_prob, entropy = self.agent.distribution.log_prob_entropy(params, samples.action)
        weight = mean_weights(samples.valid.flatten()).view_as(advantage)
        parts = {
            "policy_loss": -(weight * log_prob * advantage).sum(),
            "value_loss": 0.5 * (weight * (value - return_).square()).sum(),
            "entropy": (weight * entropy).sum(),
        }
        c = self.now
        loss = parts["policy_loss"] + c.value_coef * parts["value_loss"] - c.entropy_coef * parts["entropy"]
        return loss, {name: part.detach() for name, part in parts.items()}


class OnPolicyEpochs(OnPolicy):
    """Base class of algorithms that make `epochs` passes over each batch, each in `minibatches` of a new order."""

    saved: Sequence[str] = (*OnPolicy.saved, "rng")

    def __init__(
        self, agent: PolicyAgent | QAgent, batch_spec: BatchSpec, n_steps: int, config: Any, seed: int
    ) -> None:
        """As `OnPolicy`; `seed`: of the order. Raises ConfigError if the minibatches do not divide the batch."""
        check_minibatches(config.minibatches, batch_spec, agent.recurrent)
        super().__init__(agent, n_steps, config)
        self.rng = generator(seed, Role.ALGO)

    def update(self) -> UpdateMetrics:
        samples = self.samples.pop()
        batch, found = self.rows(samples)
        metrics = self.learn_epochs(batch, samples)
        self.agent.observe(observed(samples))  # only now: acting and learning saw the same statistics
        return {**metrics, **found, "learning_rate": self.optimizer.rate}

    @abstractmethod
    def rows(self, samples: Samples) -> tuple[Any, dict[str, Tensor]]:
        """What all epochs over a batch learn from, as `minibatches` takes it; and metrics."""

    def learn_epochs(self, batch: Any, samples: Samples) -> dict[str, Tensor]:
        """All epochs over the rows of a batch; returns the means of the steps' metrics."""
        steps: list[dict[str, Tensor]] = []
        for _ in range(self.config.epochs):
            for inputs in self.minibatches(batch, samples):
                steps.append(self.learn(inputs))
                self.progress.updates += 1
        means = torch.stack([torch.stack([x.detach() for x in each.values()]) for each in steps]).mean(0)
        return dict(zip(steps[0], means.unbind(), strict=True))

    def steps_of_batch(self) -> int:
        return int(self.config.epochs * self.config.minibatches)

    def rows_of_step(self, batch_size: int) -> int:
        return int(batch_size // self.config.minibatches)

    def ready(self, batch: Batch) -> Batch:
        """The batch for `minibatches`, once advantages are there: as it is, or as its own only minibatch."""
        return as_minibatch(batch, self._normalized) if self.config.minibatches == 1 else batch

    def minibatches(self, batch: Any, samples: Samples) -> Iterator[tuple[Any, Tree]]:
        """One pass over a Batch that is `ready`, in a new order: minibatches, and the memory before each."""
        n, recurrent = self.config.minibatches, self.agent.recurrent
        return minibatches(batch, samples.state, n, recurrent, self.rng, self._normalized, samples.n_valid)

    def _normalized(self, advantage: Tensor, valid: Tensor) -> Tensor:
        """The advantages [minibatches, rows] to learn from."""
        if not self.config.normalize_advantage:
            return advantage
        return masked_normalize(advantage, valid, self.progress.ranks.sum_tensor, dim=1)


@dataclass(frozen=True, eq=False)
class Batch(Struct):
    """On-policy training rows: [T, B], or [n] for a minibatch of rows."""

    inputs: AgentInputs
    action: Tree
    log_prob: Tensor  # when acting
    value: Tensor  # when acting
    advantage: Tensor
    return_: Tensor
    valid: Tensor
    weight: Tree = ()  # of a row in means over the minibatch, set by `minibatches` or `as_minibatch`


@torch.no_grad()
def values(agent: PolicyAgent, samples: Samples) -> Tensor:
    """V [T+1, B]: the values when acting, and row T evaluated now."""
    T = samples.reward.shape[0]
    bootstrap = agent(samples.inputs[T:], samples.final_state)[1]
    return torch.cat([samples.info.value, bootstrap])  # type: ignore[attr-defined]  # PolicyInfo


def inputs_of_rows(samples: Samples, uses_previous: bool) -> AgentInputs:
    """Those of rows 0 to T - 1, as views; previous actions and rewards only if the model uses them."""
    inputs = samples.inputs[:-1]
    return inputs if uses_previous else replace(inputs, prev_action=(), prev_reward=(), first=())


def make_batch(samples: Samples, advantage: Tensor, return_: Tensor, uses_previous: bool = True) -> Batch:
    """Training rows of a batch, as views."""
    return Batch(
        inputs=inputs_of_rows(samples, uses_previous),
        action=samples.action,
        log_prob=samples.info.log_prob,  # type: ignore[attr-defined]  # PolicyInfo
        value=samples.info.value,  # type: ignore[attr-defined]  # PolicyInfo
        advantage=advantage,
        return_=return_,
        valid=samples.valid,
    )


def as_minibatch(batch: Batch, prepared: Callable[[Tensor, Tensor], Tensor]) -> Batch:
    """A batch as its own only minibatch, the same in each epoch; see `minibatches`. Nothing is copied."""
    advantage, valid = batch.advantage.reshape(1, -1), batch.valid.reshape(1, -1)
    own, weight = prepared(advantage, valid), mean_weights(valid)
    return replace(batch, advantage=own.view_as(batch.advantage), weight=weight.view_as(batch.advantage))


def minibatches(
    batch: Batch,
    state: Tree,
    n: int,
    recurrent: bool,
    rng: np.random.Generator,
    prepared: Callable[[Tensor, Tensor], Tensor] = lambda advantage, valid: advantage,
    n_valid: int = -1,
) -> Iterator[tuple[Batch, Tree]]:
    """Split a batch at random into `n` equal parts: rows [T * B / n], or with memory whole sequences [T, B / n].

    With n = 1 it is the batch, which comes from `as_minibatch`. `prepared` maps advantages and `valid` of all parts
    [n, rows] to advantages. `n_valid`: see `order_of_rows`.
    """
    device, (T, B) = batch.valid.device, batch.valid.shape
    check_minibatches(n, BatchSpec(T, B), recurrent)
    if n == 1:
        yield batch, state
    elif recurrent:
        order = to_device(torch.from_numpy(rng.permutation(B)), device).view(n, -1)
        parts = [batch[:, columns] for columns in order]
        advantage, valid = (
            torch.stack([getattr(part, name).flatten() for part in parts]) for name in ("advantage", "valid")
        )
        for part, columns, own, weight in zip(
            parts, order, prepared(advantage, valid), mean_weights(valid), strict=True
        ):
            changed = replace(part, advantage=own.view(T, -1), weight=weight.view(T, -1))
            yield changed, map_tree(lambda x, i=columns: x[i], state)
    else:
        rows = batch.map(lambda x: x.flatten(0, 1))
        order = order_of_rows(batch.valid, n, rng, n_valid)
        numbers = replace(rows, inputs=NO_INPUTS)[order]  # few, so copied at once
        advantage, weight = prepared(numbers.advantage, numbers.valid), mean_weights(numbers.valid)
        numbers = replace(numbers, advantage=advantage, weight=weight)
        for part, minibatch in zip(order, unbind(numbers, n), strict=True):
            yield replace(minibatch, inputs=rows.inputs[part]), state


def order_of_rows(valid: Tensor, n: int, rng: np.random.Generator, n_valid: int = -1) -> Tensor:
    """The rows of a batch in random order, for `n` minibatches: numbers [n, rows] in the flattened batch.

    If `n_valid` says how many are valid (-1: all count), the valid ones, and no more others than fill the minibatches
    up. Their size is in eighths of the full one: few sizes, as each is compiled. Agents that wait have many other rows.
    """
    n_rows = valid.numel()
    order = to_device(torch.from_numpy(rng.permutation(n_rows)), valid.device)
    share = max(1, math.ceil(_SIZES * n_valid / n_rows)) if n_valid >= 0 else _SIZES
    if share < _SIZES:
        valid_first = order[(~valid.flatten()[order]).to(torch.uint8).argsort(stable=True)]
        n_kept = n * math.ceil(n_rows // n * share / _SIZES)
        order = valid_first[to_device(torch.from_numpy(rng.permutation(n_kept)), valid.device)]
    return order.view(n, -1)


def check_minibatches(n: int, batch_spec: BatchSpec, recurrent: bool) -> None:
    """Raise ConfigError if `n` minibatches do not divide the batch (its columns, with memory)."""
    what, size = ("sampler.batch_B", batch_spec.B) if recurrent else ("sampler.batch_T * batch_B", batch_spec.size)
    if n < 1 or size % n:
        rows = "sequences (with memory, whole ones)" if recurrent else "rows"
        good = [k for k in range(1, size + 1) if size % k == 0][:8]
        raise ConfigError(
            f"algo.minibatches={n} must divide the {size} {rows} of a batch ({what}, of each agent); "
            f"use one of {', '.join(map(str, good))}"
        )


def check_trace_clips(config: Any, n_steps: float) -> None:
    """Raise ValueError if `rho_clip` is below `c_clip` somewhere; two forms of schedules may cross between ends."""
    rho, c = curve(config.rho_clip, n_steps), curve(config.c_clip, n_steps)
    ends = sorted({*rho.places, *c.places})
    between = [place for pair in pairwise(ends) for place in np.linspace(*pair, 64)]
    if any(rho(place) < c(place) for place in (*ends, *between)):
        raise ValueError(f"algo.rho_clip={config.rho_clip} must be at least algo.c_clip={config.c_clip}")
