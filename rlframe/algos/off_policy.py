"""Shared by the algorithms that learn from replay: their keys, the replay ratio, priorities and target networks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import chz
import torch
from torch import Tensor, nn

from rlframe.agents import ActorAgent, QAgent
from rlframe.algos.base import Algorithm, Progress, observed
from rlframe.algos.schedules import Schedules
from rlframe.core.config import AUTO, choice, count, fraction, number, positive
from rlframe.core.errors import ConfigError
from rlframe.core.ranks import current_ranks
from rlframe.core.types import BatchSpec, Samples
from rlframe.critics import Value
from rlframe.critics.values import KINDS, make_value
from rlframe.exploration import ExplorationSchedule
from rlframe.models import ModelConfig
from rlframe.optimizers import OptimizerConfig, optimizer
from rlframe.replay import NStep, Replay, ReplayConfig, StoredReplay, Transitions, make_replay, replay
from rlframe.replay.buffer import Batch
from rlframe.replay.kinds import counters_of, is_stored
from rlframe.replay.select import PRIORITY_EPSILON

_MOST_BATCHES = 8  # batches whose updates may be pending
_MOST_UPDATES = 1_000  # for each env_step; more would hardly ever end


@chz.chz
class OffPolicyConfig:
    """The keys that DQN, DDPG, TD3 and SAC share."""

    learns_from = "replay"

    replay: ReplayConfig | str = replay()
    optimizer: OptimizerConfig | str = optimizer("adam", epsilon=1e-8)
    discount: float = fraction(0.99, "gamma, per env step")
    n_step: int = count(1, "rewards a return sums before it bootstraps")
    value: str = choice("expected", KINDS, "what is learned of the return: its mean, its distribution, its quantiles")
    n_atoms: int = count(51, "atoms of categorical, or quantiles")
    v_min: float = number(-10.0, "least return that categorical knows", low=-math.inf)
    v_max: float = number(10.0, "largest return that categorical knows", low=-math.inf)
    huber_delta: float = positive(
        math.nan, "|TD error| from which the loss is linear; inf: squared; nan: 1 for quantile, else inf", infinite=True
    )

    def kind(self) -> Value:
        """What the networks say of the return."""
        by_default = 1.0 if self.value == "quantile" else math.inf
        huber_delta = by_default if math.isnan(self.huber_delta) else self.huber_delta
        return make_value(self.value, self.n_atoms, self.v_min, self.v_max, huber_delta)


def check_categorical(config: Any) -> None:
    """Raise ConfigError if a categorical value is given options of other losses."""
    given = {"huber_delta": not math.isnan(config.huber_delta), "target_clip": config.target_clip != math.inf}
    for name, is_given in given.items():
        if config.value == "categorical" and is_given:
            raise ConfigError(
                f"algo.{name}={getattr(config, name)} is not for algo.value=categorical, whose returns are clipped to "
                f"algo.v_min and algo.v_max; leave it out"
            )


class ReplayRatio:
    """Counts due updates exactly: each env_step after `learning_starts` adds `replay_ratio / batch_size` updates.

    An update learns from batch_size rows of each replay: one a rank, or one of all learners. env_steps count over all
    ranks, so with n replays an env_step adds 1 / n of that, and all ranks have the same updates due.
    If batches arrive faster than updates are made (AsyncRl), updates for more than 8 batches are dropped and counted:
    made later all at once, they would learn from data that has hardly changed.
    """

    def __init__(self, replay_ratio: float, batch_size: int, learning_starts: int) -> None:
        """Args:
            replay_ratio: rows learned from per row received.    batch_size: rows of an update from each replay.
            learning_starts: env_steps, over all ranks, before the first update.
        Raises:
            ValueError: a number out of range.
        """
        if replay_ratio <= 0 or batch_size < 1 or learning_starts < 0:
            raise ValueError(
                f"algo.replay_ratio={replay_ratio} must be above 0, algo.batch_size={batch_size} at least 1 and "
                f"algo.learning_starts={learning_starts} at least 0"
            )
        self.ranks, self.ready = current_ranks(), False  # ready: every replay has rows to sample
        self.batch_size, self.learning_starts = batch_size * self.ranks.n_samplers, learning_starts
        rate = Fraction(replay_ratio).limit_denominator(10**6) / self.batch_size  # updates an env_step
        self._share, self._whole = rate.as_integer_ratio()  # counts are integers, in units of 1 / _whole update
        self._pending = self._dropped = 0

    def updates_until(self, env_steps: int) -> int:
        """Whole updates due until then."""
        return self._share * max(env_steps - self.learning_starts, 0) // self._whole

    def receive(self, before: int, after: int) -> None:
        """Count a batch, given the env_steps before and after it."""
        more = self._share * max(after - max(before, self.learning_starts), 0)
        if self.ready:  # before, updates were impossible, not too slow
            dropped = max(self._pending - _MOST_BATCHES * max(more, self._whole), 0)
            self._pending -= dropped
            self._dropped += dropped
        self._pending += more

    def due(self, n_rows: int = 1) -> int:
        """Whole updates due; 0 until every replay has rows to sample, and while the only one has none again.

        Args:
            n_rows: those in this rank's replay.
        """
        due = self._pending // self._whole
        if due and not self.ready:
            self.ready = self.ranks.sum(int(n_rows > 0)) == self.ranks.n_samplers
        return due if self.ready and (n_rows or self.ranks.world_size > 1) else 0

    def count_update(self) -> None:
        """An update was made; one that was not due, of a run without a sampler, is not counted."""
        self._pending -= min(self._whole, self._pending)

    def drop(self) -> None:
        """Drop all pending updates."""
        self._dropped, self._pending = self._dropped + self._pending, 0

    @property
    def pending(self) -> Fraction:
        """Updates due and not made yet, with fraction."""
        return Fraction(self._pending, self._whole)

    @property
    def dropped(self) -> Fraction:
        """Updates dropped."""
        return Fraction(self._dropped, self._whole)

    def counters(self, progress: Progress) -> dict[str, float]:
        """For the log: rows learned from per env_step since `learning_starts`, and the updates dropped."""
        dropped = {"replay/forgone": float(self.dropped)} if self._dropped else {}
        env_steps = progress.env_steps - self.learning_starts
        return {"replay/ratio": progress.updates * self.batch_size / env_steps if env_steps > 0 else 0.0, **dropped}

    def state_dict(self) -> dict[str, list[int]]:
        """Both counts as exact fractions."""
        return {"pending": list(self.pending.as_integer_ratio()), "dropped": list(self.dropped.as_integer_ratio())}

    def load_state_dict(self, state: Mapping[str, list[int]]) -> None:
        """Continue from saved counts."""
        self._pending, self._dropped = (int(Fraction(*state[name]) * self._whole) for name in ("pending", "dropped"))


class OffPolicy(Algorithm):
    """Base class of algorithms that learn from replay; subclasses add `update`, and `start_exploring` once made."""

    agent: QAgent | ActorAgent
    exploration: ExplorationSchedule
    replay: Replay
    ratio: ReplayRatio
    config: Any
    schedules: Schedules
    saved: Sequence[str] = ("progress", "ratio", "replay")

    def __init__(
        self,
        agent: Any,
        replay: Replay,
        exploration: ExplorationSchedule,
        n_steps: int,
        config: Any,
        device: torch.device,
        unused: Sequence[str] = (),
    ) -> None:
        """`n_steps`: env_steps of the run, over which schedules go.    unused: schedules that are not logged."""
        self.agent, self.replay, self.exploration, self.config = agent, replay, exploration, config
        self.device, self.progress = device, Progress()
        self.ratio = ReplayRatio(config.replay_ratio, self.rows_of_update(), config.learning_starts)
        self.schedules = Schedules(config, n_steps, self.progress, device, unused)
        self.now = self.schedules.now

    def rows_of_update(self) -> int:
        """Rows that an update learns from."""
        rows: int = self.config.batch_size
        return rows

    def start_exploring(self) -> None:
        """Set the agent's exploration at first. Raises ConfigError if it was made by another config."""
        self.exploration.check(self.agent.exploration)
        self.explore()

    def explore(self) -> None:
        """Set the agent's exploration for `progress.env_steps`."""
        self.exploration.apply(self.agent.exploration, self.progress.env_steps)

    def receive(self, samples: Samples) -> None:
        self.progress.count(samples)
        self.replay.append(samples)
        self.agent.observe(observed(samples))
        before, after = self.progress.scheduled, self.progress.env_steps
        self.ratio.receive(before, after)
        self.explore()
        n_envs = self.exploration.n_envs
        self.agent.exploration.follow(self.agent.model, samples.observation, before // n_envs, after // n_envs)

    def updates_due(self) -> int:
        return self.ratio.due(self.replay.n_rows)

    def n_rows(self) -> int:
        return self.replay.n_rows

    def updates_in(self, n_steps: int, batch_size: int) -> int:
        return self.ratio.updates_until(n_steps)

    def rows_of_step(self, batch_size: int) -> int:
        return self.rows_of_update()

    def check_run(self, n_steps: int) -> None:
        c: Any = self.config
        if (n := c.replay_ratio / self.ratio.batch_size) > _MOST_UPDATES:
            raise ConfigError(
                f"algo.replay_ratio={c.replay_ratio:g} with algo.batch_size={c.batch_size} makes {n:,.0f} updates for "
                f"each env_step, more than {_MOST_UPDATES:,}; use algo.replay_ratio={_MOST_UPDATES * c.batch_size} or "
                f"less"
            )
        if not self.ratio.updates_until(n_steps):
            raise ConfigError(
                f"nothing would be learned: with algo.batch_size={c.batch_size}, algo.replay_ratio={c.replay_ratio:g} "
                f"and algo.learning_starts={c.learning_starts}, runner.n_steps={n_steps} are too few for one update; "
                f"lower algo.learning_starts, or use a preset made for such a task (experiment=, see --list presets)"
            )

    def drop_updates(self) -> None:
        self.ratio.drop()

    def least_exploring(self) -> range:
        return self.exploration.least_exploring(self.progress.env_steps)

    def facts(self) -> dict[str, str]:
        return {"replay": str(self.replay)}

    def counters(self) -> dict[str, float]:
        counters = self.ratio.counters(self.progress)
        level = self.exploration.metrics(self.agent.exploration, self.progress.env_steps)
        own = self.agent.exploration.counters()
        counters |= {"replay/rows": self.replay.n_rows, **counters_of(self.replay)}
        return {**counters, **self.schedules.metrics(), **level, **own}


def n_step_replay(
    config: Any, agent: Any, batch_spec: BatchSpec, seed: int, alpha: float = 0.0, td_priorities: bool = False
) -> Replay[Transitions]:
    """Replay of config.n_step transitions, made from config.replay, on the agent's device (see NStep)."""
    return make_replay(
        config.replay,
        agent.observation_space,
        agent.action_space,
        batch_spec,
        NStep(config.discount, config.n_step, td_priorities),
        alpha=alpha,
        previous=agent.model.uses_previous,
        device=next(agent.parameters()).device,
        seed=seed,
    )


def reading_back(replay: Replay[Batch], setting: str, remedy: str) -> StoredReplay[Batch]:
    """The same replay, whose rows can be read again by their index. Raises ConfigError if they cannot."""
    if is_stored(replay):
        return replay
    raise ConfigError(
        f"{setting} reads back the rows just stored, which a {type(replay).__name__} does not offer; use {remedy}, or "
        f"replay=memory, device, disk or ray"
    )


def priorities(error: Tensor) -> Tensor:
    """Priorities [n] from absolute errors [n]; the lowest for rows whose error is NaN or Inf."""
    return error.nan_to_num(nan=0.0, posinf=0.0) + PRIORITY_EPSILON


@torch.no_grad()
def copy_into(target: nn.Module, online: nn.Module, tau: float = 1.0) -> None:
    """Make a target network equal to the online one, statistics and noise included.

    With tau < 1 the parameters move only that far: target <- (1 - tau) target + tau online.
    """
    if tau < 1:
        soft_update([*target.parameters()], [*online.parameters()], tau)
        for place, buffer in zip(target.buffers(), online.buffers(), strict=True):
            place.copy_(buffer)
    else:
        torch._foreach_copy_([*target.parameters(), *target.buffers()], [*online.parameters(), *online.buffers()])


@torch.no_grad()
def soft_update(targets: list[Tensor], onlines: list[Tensor], tau: float | Tensor) -> None:
    """target <- (1 - tau) target + tau online, all tensors at once (Lillicrap et al. 2016, algorithm 1)."""
    if not targets:  # of critics without
        return
    if isinstance(tau, Tensor):  # on a GPU, where the kernel for numbers would wait for it
        moves = torch._foreach_mul(torch._foreach_sub(onlines, targets), tau)
        torch._foreach_add_(targets, moves)
    else:
        torch._foreach_lerp_(targets, onlines, tau)


def is_due(updates: int, interval: int) -> bool:
    """Whether the update that follows so many is one of every `interval`: a step of the policy, or of the targets."""
    return (updates + 1) % interval == 0


def smoothed(action: Tensor, noise: Tensor, std: Any, clip: Any) -> Tensor:
    """clip(a + clip(σ ε, -c, c), -1, 1),  ε ~ N(0, 1)   (Fujimoto et al. 2018, algorithm 1).

    `std` σ and `clip` c are numbers or tensors [].
    """
    return (action + (std * noise).clamp(-clip, clip)).clamp(-1, 1)


def random_until(config: Any) -> int:
    """The env_steps before which actions are random: config.random_steps, by default until learning starts."""
    steps: int = config.learning_starts if config.random_steps == AUTO else config.random_steps
    return steps


def check_feedforward(model: ModelConfig, algo: str, other: str) -> None:
    """Raise ConfigError if the model has memory, which `algo` does not train."""
    if model.memory != "none":
        raise ConfigError(f"model.memory={model.memory}: {algo} learns from single rows; use {other} or memory=none")
