"""What several algorithms are put together from: gradient steps, on-policy batches and their minibatches."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rlframe.agents import PolicyAgent, QAgent
from rlframe.algos.base import Progress
from rlframe.algos.guard import Guard
from rlframe.core.errors import ConfigError
from rlframe.core.ranks import current_ranks
from rlframe.core.schedule import Linear
from rlframe.core.struct import Struct, Tree, map_tree
from rlframe.core.types import AgentInputs, BatchSpec, Samples
from rlframe.models import ModelConfig
from rlframe.ops.masked import masked_mean

_SMALL = 8  # times smaller than the largest parameter are biases and the like
_MOST_BATCHES = 8  # that UpdateDebt carries on, in what the newest of them calls for
PRIORITY_EPSILON = 1e-6  # added to priorities, so that no row is never drawn again (Schaul et al. 2016, section 3.3)


class Updater:
    """One optimizer over all that learns together: scheduled rate, clipped gradient, the one place to average ranks.

    The gradient is the mean over ranks before it is clipped, so that parameters that begin equal stay equal. Where loss
    or gradient are not finite no step is made, on any rank (see guard.Guard).
    """

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        optimizer: str,
        learning_rate: Linear,
        max_grad_norm: float,
        progress: Progress,
        epsilon: float = 1e-5,  # of Adam as in Schulman et al.'s code, of RMSProp as in Mnih et al. 2016
    ) -> None:
        self.parameters = list(parameters)
        progress.learned += self.parameters
        self.learning_rate, self.max_grad_norm, self.progress = learning_rate, max_grad_norm, progress
        self.optimizer = _optimizer(optimizer, self.parameters, learning_rate.initial, epsilon)
        self.guard = Guard(self.optimizer, self.parameters, progress)
        largest = max(parameter.numel() for parameter in self.parameters)
        self._small = [p for p in self.parameters if p.numel() * _SMALL <= largest] or self.parameters

    def step(self, loss: Tensor, valid: Tensor | None = None, batch: Tree = ()) -> Tensor:
        """One gradient step on `loss`, if it is finite; returns the gradient's norm before clipping.

        Args:
            valid: marks the rows that the loss is a mean over, where ranks may have more or fewer of them: the gradient
                is then the mean over the rows of all ranks.
            batch: what is learned from, to be kept if that gives no finite gradient.
        """
        for parameter in self.parameters:
            parameter.grad = None
        loss.backward()
        loss = self._average(loss.detach(), 1.0 if valid is None else valid.sum())
        grad_norm = self._descend(loss, self.parameters, batch)
        self.progress.updates += 1
        return grad_norm

    def follow(self, loss: Tensor, batch: Tree = ()) -> None:
        """One step along the gradients that the parameters have, if they are finite; the caller counts its updates.

        `loss` is looked at too. Where nothing is clipped, small parameters stand for all: a bias's gradient sums what
        goes on to the layers below, at a tenth of what a look at all costs.
        """
        loss = self._average(loss.detach(), 1.0)
        self._descend(loss, self.parameters if math.isfinite(self.max_grad_norm) else self._small, batch)

    def _average(self, loss: Tensor, weight: Tensor | float) -> Tensor:
        """Over ranks, all parameters and the loss at once; those without a gradient have none on any rank."""
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        if self.progress.ranks.world_size == 1:
            return loss
        loss = loss.clone()  # the caller's stays its own
        self.progress.ranks.average([*gradients, loss], weight)
        return loss

    @torch.no_grad()
    def _descend(self, loss: Tensor, looked_at: list[nn.Parameter], batch: Tree) -> Tensor:
        norm = gradient_norm(looked_at)
        if self.guard.allows(loss, norm, batch):
            if math.isfinite(self.max_grad_norm):
                clip_gradient(self.parameters, norm, self.max_grad_norm)
            for group in self.optimizer.param_groups:
                group["lr"] = self.rate
            self.optimizer.step()
        return norm

    @property
    def rate(self) -> float:
        """The learning rate now."""
        return self.learning_rate(self.progress.scheduled)

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's state."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a saved state."""
        self.optimizer.load_state_dict(state)


def _optimizer(
    name: str, parameters: list[nn.Parameter], learning_rate: float, epsilon: float
) -> torch.optim.Optimizer:
    if name == "adam":  # fused: 863 -> 702 us per PPO minibatch on CPU
        return torch.optim.Adam(parameters, learning_rate, eps=epsilon, fused=True)
    if name == "rmsprop":  # decay as in Mnih et al. 2016
        return torch.optim.RMSprop(parameters, learning_rate, alpha=0.99, eps=epsilon)
    raise ValueError(f"optimizer={name!r} is unknown; use adam or rmsprop")


@torch.no_grad()
def gradient_norm(parameters: list[nn.Parameter]) -> Tensor:
    """The global norm of their gradients."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))


@torch.no_grad()
def clip_gradient(parameters: list[nn.Parameter], norm: Tensor, max_norm: float) -> None:
    """Scale gradients whose global norm is `norm` so that it is at most `max_norm`.

    As nn.utils.clip_grad_norm_, whose grouping by devices takes longer than the sums of a small network.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    torch._foreach_mul_(gradients, (max_norm / (norm + 1e-6)).clamp_(max=1.0))


class UpdateDebt:
    """Updates owed for env_steps: each calls for `replay_ratio / batch_size` of one. Fractions add up, none is lost.

    Counting begins once `learn_from` env_steps have been received: what came before is learned from, but not owed for.
    An update takes batch_size rows on every rank, each from its own replay. Since env_steps count over all ranks, each
    then calls for 1 / world_size of that, and all ranks owe the same, whichever of them sampled it.
    Where batches come faster than updates are made, for good (AsyncRl), what more than a few batches call for is given
    up, and counted: a debt without end would only be paid at once, some day, on data that have hardly changed.
    """

    def __init__(self, replay_ratio: float, batch_size: int, learn_from: int) -> None:
        """Args:
            replay_ratio: rows learned from for each row received.    batch_size: rows of an update, of each rank.
            learn_from: env_steps, over all ranks, before the first update.
        Raises:
            ValueError: a number out of range.
        """
        if replay_ratio <= 0 or batch_size < 1 or learn_from < 0:
            raise ValueError(
                f"algo.replay_ratio={replay_ratio} must be above 0, algo.batch_size={batch_size} at least 1 and "
                f"algo.learn_from={learn_from} at least 0"
            )
        self.ranks, self.ready = current_ranks(), False  # ready: every rank has something to learn from
        self.batch_size, self.learn_from = batch_size * self.ranks.world_size, learn_from
        self.rate = Fraction(replay_ratio).limit_denominator(10**6) / self.batch_size  # updates an env_step
        self.owed = self.forgone = Fraction(0)

    def receive(self, before: int, after: int) -> None:
        """Count the env_steps of a batch: so many had come before it, so many after it."""
        more = self.rate * max(after - max(before, self.learn_from), 0)
        if self.ready:  # else it is not for want of time that nothing was paid
            given_up = max(self.owed - _MOST_BATCHES * max(more, Fraction(1)), Fraction(0))
            self.owed -= given_up
            self.forgone += given_up
        self.owed += more

    def due(self, n_choices: int = 1) -> int:
        """Whole updates owed; none before every rank has rows to choose from (`n_choices` of this one's replay)."""
        owed = math.floor(self.owed)
        if owed and not self.ready:
            self.ready = self.ranks.every(n_choices > 0)
        return owed if self.ready else 0

    def pay(self) -> None:
        """An update was made."""
        self.owed -= 1

    def reached(self, progress: Progress) -> float:
        """Rows learned from so far for each env_step since learning began; 0 before."""
        counted = progress.env_steps - self.learn_from
        return progress.updates * self.batch_size / counted if counted > 0 else 0.0

    def counters(self, progress: Progress) -> dict[str, float]:
        """The ratio reached, and what was given up, for the log."""
        forgone = {"replay/forgone": float(self.forgone)} if self.forgone else {}
        return {"replay/ratio": self.reached(progress), **forgone}

    def state_dict(self) -> dict[str, list[int]]:
        """What is owed and what was given up, exactly."""
        return {"owed": list(self.owed.as_integer_ratio()), "forgone": list(self.forgone.as_integer_ratio())}

    def load_state_dict(self, state: Mapping[str, list[int]]) -> None:
        """Go on from a saved debt."""
        self.owed, self.forgone = Fraction(*state["owed"]), Fraction(*state["forgone"])


class EpsilonSchedule:
    """Sets an agent's epsilon: from `initial` linearly over `n_steps`, to `final` of the first environment, to `last`
    of the last one (0: to `final` as well)."""

    def __init__(self, initial: float, final: float, last: float, n_steps: float, n_envs: int) -> None:
        """`n_envs`: of this rank; the last environment is that of all ranks."""
        self.first = Linear(initial, final, max(n_steps, 1))
        self.last = Linear(initial, last or final, max(n_steps, 1))
        self.n_envs = n_envs * current_ranks().world_size

    def apply(self, agent: QAgent, env_steps: int) -> None:
        """Explore as after `env_steps`."""
        agent.set_epsilon(self.first(env_steps), self.last(env_steps), self.n_envs)


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


@torch.no_grad()
def values(agent: PolicyAgent, samples: Samples) -> Tensor:
    """V [T+1, B]: those of acting, and row T evaluated now."""
    T = samples.reward.shape[0]
    bootstrap = agent(samples.inputs[T:], samples.final_state)[1]
    return torch.cat([samples.info.value, bootstrap])  # type: ignore[attr-defined]  # PolicyInfo


def make_batch(samples: Samples, advantage: Tensor, return_: Tensor) -> Batch:
    """The training rows of a batch, as views."""
    return Batch(
        inputs=samples.inputs[:-1],
        action=samples.action,
        log_prob=samples.info.log_prob,  # type: ignore[attr-defined]  # PolicyInfo
        value=samples.info.value,  # type: ignore[attr-defined]  # PolicyInfo
        advantage=advantage,
        return_=return_,
        valid=samples.valid,
    )


def minibatches(
    batch: Batch, state: Tree, n: int, recurrent: bool, rng: np.random.Generator
) -> Iterator[tuple[Batch, Tree]]:
    """Split a batch at random into `n` equal parts: rows [T * B / n], or with memory whole sequences [T, B / n].

    With n = 1 nothing is moved.
    """
    T, B = batch.valid.shape
    if n == 1:
        yield batch, state
    elif recurrent:
        for columns in np.split(rng.permutation(B), n):
            chosen = torch.from_numpy(columns).to(batch.valid.device)
            yield batch[:, chosen], map_tree(lambda x, i=chosen: x[i], state)
    else:
        rows = batch.map(lambda x: x.flatten(0, 1))
        for part in np.split(rng.permutation(T * B), n):
            yield rows[torch.from_numpy(part).to(batch.valid.device)], state


def policy_gradient_loss(
    agent: PolicyAgent, samples: Samples, advantage: Tensor, return_: Tensor, value_coef: float, entropy_coef: float
) -> tuple[Tensor, dict[str, Tensor]]:
    """-E[A log π(a|s)] + c_v E[(V - G)^2] / 2 - c_e E[H], over the valid rows of a whole batch; and its parts.

    (Mnih et al. 2016, section 4, with the sign turned to descend.)
    """
    params, value, _ = agent(samples.inputs[:-1], samples.state)
    log_prob = agent.distribution.log_prob(params, samples.action)
    policy_loss = -masked_mean(log_prob * advantage, samples.valid)
    value_loss = masked_mean(0.5 * (value - return_).square(), samples.valid)
    entropy = masked_mean(agent.distribution.entropy(params), samples.valid)
    loss = policy_loss + value_coef * value_loss - entropy_coef * entropy
    return loss, {"policy_loss": policy_loss.detach(), "value_loss": value_loss.detach(), "entropy": entropy.detach()}


def check_feedforward(model: ModelConfig, algo: str, other: str) -> None:
    """Raises:
    ConfigError: the model has memory, which `algo` does not train.
    """
    if model.memory != "none":
        raise ConfigError(f"model.memory={model.memory}: {algo} learns from single rows; use {other} or memory=none")


def check_minibatches(n: int, batch_spec: BatchSpec, recurrent: bool) -> None:
    """Raises:
    ValueError: `n` minibatches do not divide the batch (its environments, with memory).
    """
    what, size = ("sampler.batch_B", batch_spec.B) if recurrent else ("sampler.batch_T * batch_B", batch_spec.size)
    if n < 1 or size % n:
        rows = "sequences (with memory, whole ones)" if recurrent else "rows"
        good = [k for k in range(1, size + 1) if size % k == 0][:8]
        raise ValueError(
            f"algo.minibatches={n} must divide {what}={size} {rows}; use one of {', '.join(map(str, good))}"
        )


def mean_of(metrics: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The mean over several updates, by name."""
    return {name: torch.stack([m[name].detach() for m in metrics]).mean() for name in metrics[0]}


def priorities(error: Tensor) -> Tensor:
    """What replay is to choose by, from the size of errors; the least for rows whose error is NaN or Inf."""
    return error.nan_to_num(nan=0.0, posinf=0.0) + PRIORITY_EPSILON


def load_generator(rng: np.random.Generator, state: Mapping[str, Any]) -> None:
    """Set a generator to a saved state."""
    rng.bit_generator.state = state


@torch.no_grad()
def soft_update(targets: list[nn.Parameter], onlines: list[nn.Parameter], tau: float) -> None:
    """target <- (1 - tau) target + tau online, all parameters at once (Lillicrap et al. 2016, algorithm 1)."""
    torch._foreach_lerp_(targets, onlines, tau)  # type: ignore[arg-type]  # which takes lists of tensors
