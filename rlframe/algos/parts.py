"""What several algorithms are put together from: updates owed, exploration, on-policy batches and their minibatches."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rlframe.agents import PolicyAgent, PolicyRun, QAgent
from rlframe.algos.base import Progress
from rlframe.core.errors import ConfigError
from rlframe.core.ranks import current_ranks
from rlframe.core.schedule import Linear
from rlframe.core.struct import Struct, Tree, map_tree
from rlframe.core.types import AgentInputs, BatchSpec, Samples
from rlframe.models import ModelConfig
from rlframe.ops.masked import mean_weights
from rlframe.ops.transfer import sent

_MOST_BATCHES = 8  # that UpdateDebt carries on, in what the newest of them calls for
NO_INPUTS = AgentInputs((), (), (), ())
PRIORITY_EPSILON = 1e-6  # added to priorities, so that no row is never drawn again (Schaul et al. 2016, section 3.3)


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
        rate = Fraction(replay_ratio).limit_denominator(10**6) / self.batch_size  # updates an env_step
        self._share, self._whole = rate.as_integer_ratio()  # all is counted in integers: parts of which _whole are one
        self._owed = self._forgone = 0

    def receive(self, before: int, after: int) -> None:
        """Count the env_steps of a batch: so many had come before it, so many after it."""
        more = self._share * max(after - max(before, self.learn_from), 0)
        if self.ready:  # else it is not for want of time that nothing was paid
            given_up = max(self._owed - _MOST_BATCHES * max(more, self._whole), 0)
            self._owed -= given_up
            self._forgone += given_up
        self._owed += more

    def due(self, n_choices: int = 1) -> int:
        """Whole updates owed; none before every rank has rows to choose from (`n_choices` of this one's replay)."""
        owed = self._owed // self._whole
        if owed and not self.ready:
            self.ready = self.ranks.every(n_choices > 0)
        return owed if self.ready else 0

    def pay(self) -> None:
        """An update was made."""
        self._owed -= self._whole

    def forgive(self) -> None:
        """Give up all that is owed."""
        self._forgone, self._owed = self._forgone + self._owed, 0

    @property
    def owed(self) -> Fraction:
        """Updates owed."""
        return Fraction(self._owed, self._whole)

    @property
    def forgone(self) -> Fraction:
        """Updates given up."""
        return Fraction(self._forgone, self._whole)

    def reached(self, progress: Progress) -> float:
        """Rows learned from so far for each env_step since learning began; 0 before."""
        counted = progress.env_steps - self.learn_from
        return progress.updates * self.batch_size / counted if counted > 0 else 0.0

    def counters(self, progress: Progress) -> dict[str, float]:
        """The ratio reached, and what was given up, for the log."""
        forgone = {"replay/forgone": float(self.forgone)} if self._forgone else {}
        return {"replay/ratio": self.reached(progress), **forgone}

    def state_dict(self) -> dict[str, list[int]]:
        """What is owed and what was given up, exactly."""
        return {"owed": list(self.owed.as_integer_ratio()), "forgone": list(self.forgone.as_integer_ratio())}

    def load_state_dict(self, state: Mapping[str, list[int]]) -> None:
        """Go on from a saved debt."""
        self._owed, self._forgone = (int(Fraction(*state[name]) * self._whole) for name in ("owed", "forgone"))


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
    weight: Tree = ()  # of a row in means over the minibatch, which `minibatches` knows


@torch.no_grad()
def values(agent: PolicyAgent, samples: Samples) -> Tensor:
    """V [T+1, B]: those of acting, and row T evaluated now."""
    T = samples.reward.shape[0]
    bootstrap = agent(samples.inputs[T:], samples.final_state)[1]
    return torch.cat([samples.info.value, bootstrap])  # type: ignore[attr-defined]  # PolicyInfo


def make_batch(samples: Samples, advantage: Tensor, return_: Tensor, uses_previous: bool = True) -> Batch:
    """The training rows of a batch, as views; of inputs, only those that the agent's model looks at."""
    inputs = samples.inputs[:-1]
    if not uses_previous:
        inputs = replace(inputs, prev_action=(), prev_reward=(), first=())
    return Batch(
        inputs=inputs,
        action=samples.action,
        log_prob=samples.info.log_prob,  # type: ignore[attr-defined]  # PolicyInfo
        value=samples.info.value,  # type: ignore[attr-defined]  # PolicyInfo
        advantage=advantage,
        return_=return_,
        valid=samples.valid,
    )


def minibatches(
    batch: Batch,
    state: Tree,
    n: int,
    recurrent: bool,
    rng: np.random.Generator,
    prepared: Callable[[Tensor, Tensor], Tensor] = lambda advantage, valid: advantage,
) -> Iterator[tuple[Batch, Tree]]:
    """Split a batch at random into `n` equal parts: rows [T * B / n], or with memory whole sequences [T, B / n].

    With n = 1 nothing is moved. `prepared` maps the advantages and valid marks of all parts [n, rows] to advantages.
    """
    device, (T, B) = batch.valid.device, batch.valid.shape
    if n == 1:
        flat = batch.advantage.reshape(1, -1), batch.valid.reshape(1, -1)
        yield replace(batch, advantage=prepared(*flat).view(T, B), weight=mean_weights(flat[1]).view(T, B)), state
    elif recurrent:
        order = sent(torch.from_numpy(rng.permutation(B)), device).view(n, -1)
        parts = [batch[:, columns] for columns in order]
        advantage, valid = (
            torch.stack([getattr(part, name).flatten() for part in parts]) for name in ("advantage", "valid")
        )
        found = zip(parts, order, prepared(advantage, valid), mean_weights(valid), strict=True)
        for part, columns, own, weight in found:
            changed = replace(part, advantage=own.view(T, -1), weight=weight.view(T, -1))
            yield changed, map_tree(lambda x, i=columns: x[i], state)
    else:
        rows = batch.map(lambda x: x.flatten(0, 1))
        order = sent(torch.from_numpy(rng.permutation(T * B)), device).view(n, -1)
        numbers = replace(rows, inputs=NO_INPUTS)[order]  # few, and so moved at once
        advantage, weight = prepared(numbers.advantage, numbers.valid), mean_weights(numbers.valid)
        numbers = replace(numbers, advantage=advantage, weight=weight)
        for index, part in enumerate(order):
            yield replace(numbers[index], inputs=rows.inputs[part]), state


def policy_gradient(
    run: PolicyRun,
    samples: Samples,
    advantage: Tensor,
    return_: Tensor,
    value_coef: float,
    entropy_coef: float,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Set the gradient of -E[A log π(a|s)] + c_v E[(V - G)^2] / 2 - c_e E[H], over the valid rows of a whole batch.

    Returns this loss and its parts. `run` is the agent's for the batch's rows. (Mnih et al. 2016, section 4, with the
    sign turned to descend.)
    """
    weight, difference = mean_weights(samples.valid.flatten()).view_as(advantage), run.value - return_
    policy_loss = -(weight * run.log_prob * advantage).sum()
    value_loss = 0.5 * (weight * difference.square()).sum()
    entropy = (weight * run.entropy).sum()
    run.back(-weight * advantage, -entropy_coef * weight, value_coef * weight * difference)
    loss = policy_loss + value_coef * value_loss - entropy_coef * entropy
    return loss, {"policy_loss": policy_loss, "value_loss": value_loss, "entropy": entropy}


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
    means = torch.stack([torch.stack([x.detach() for x in each.values()]) for each in metrics]).mean(0)
    return dict(zip(metrics[0], means.unbind(), strict=True))


def priorities(error: Tensor) -> Tensor:
    """What replay is to choose by, from the size of errors; the least for rows whose error is NaN or Inf."""
    return error.nan_to_num(nan=0.0, posinf=0.0) + PRIORITY_EPSILON


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
