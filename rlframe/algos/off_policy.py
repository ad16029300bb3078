"""Shared by the algorithms that learn from replay: their keys, what they receive, priorities and noise."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import chz
import torch
from torch import Tensor, nn

from rlframe.agents import ActorAgent, QAgent
from rlframe.algos import fields
from rlframe.algos.base import Algorithm, observed
from rlframe.algos.checks import check_learns, check_network, check_replay
from rlframe.algos.defaults import Defaults
from rlframe.algos.replay_ratio import ReplayRatio
from rlframe.algos.targets import TargetMoves, copy_into, copy_statistics
from rlframe.core.config import choice, count, fraction_or_auto, number, positive
from rlframe.core.errors import ConfigError, qualified_name
from rlframe.core.field_effects import idle_while, in_state
from rlframe.core.multi_agent import observation_of, side_by_side
from rlframe.core.schedule import Scheduled, scheduled
from rlframe.core.seeding import Role, seed_int
from rlframe.core.types import BatchSpec, Samples
from rlframe.critics import CategoricalValue, ExpectedValue, QuantileValue, Value
from rlframe.critics.values import KINDS
from rlframe.exploration import ExplorationSchedule
from rlframe.models import ModelConfig
from rlframe.models.normalize import ObservationNorm
from rlframe.models.q_network import QModel
from rlframe.optimizers import OptimizerConfig, optimizer
from rlframe.replay import NStep, Replay, ReplayConfig, Transitions, counters_of, is_stored, make_replay, replay
from rlframe.replay.base import StoredReplay
from rlframe.replay.buffer import Batch, ReaderConfig
from rlframe.replay.select import PRIORITY_EPSILON
from rlframe.updates.progress import Progress
from rlframe.updates.schedules import Schedules

_MOST_OBSERVED, _OBSERVED_AT_ONCE = 100_000, 1_000  # rows drawn for statistics; means of 10,000 are within 2 % of a std


@chz.chz
class FromReplayConfig:
    """The keys of every algorithm that learns from replay; one that knows better numbers states them anew."""

    learns_from = "replay"
    for_images = Defaults(ModelConfig(activation="relu"), BatchSpec(T=1, B=1))
    for_vectors = Defaults(ModelConfig(hidden=(256, 256), activation="relu"), BatchSpec(T=1, B=1))

    learning_rate: Scheduled = scheduled(3e-4, "of the policy")
    optimizer: OptimizerConfig | str = optimizer("adam", epsilon=1e-8)
    max_grad_norm: Scheduled = fields.grad_norm(math.inf, "norm at which the gradient of each loss is clipped")
    batch_size: int = count(256, "rows of an update")
    replay: ReplayConfig | str = replay()
    replay_ratio: float = positive(256.0, "rows learned from for each env_step: batch_size times the updates a step")
    learning_starts: int = count(1_000, "env_steps before the first update", low=0)

    def rows_of_update(self) -> int:
        """Rows that an update learns from."""
        return self.batch_size

    def make_exploration(self: Any, batch_spec: BatchSpec, n_steps: int) -> ExplorationSchedule:
        """As the field `explore` says, over a run of so many env_steps."""
        return ExplorationSchedule(self.explore, n_steps, batch_spec.n_envs)

    def parts(self: Any, agent: Any, batch_spec: BatchSpec, n_steps: int, seed: int) -> tuple[Any, ...]:
        """The arguments of the algorithm, an OffPolicy."""
        replay = self.make_replay(agent, batch_spec, seed)
        return agent, replay, self.make_exploration(batch_spec, n_steps), n_steps, self, seed

    def check_run(self, n_steps: int) -> None:
        """Raise ConfigError if a run of so many env_steps makes no update, before anything is made for it."""
        ratio = ReplayRatio(self.replay_ratio, self.rows_of_update(), self.learning_starts, Progress())
        check_learns(self, ratio, n_steps)


@chz.chz
class OffPolicyConfig(FromReplayConfig):
    """The keys that DQN, DDPG, TD3 and SAC share."""

    IDLE = idle_while("n_atoms", value="expected") | idle_while("v_min", "v_max", value=("expected", "quantile"))
    IN_STATE = in_state("v_min", "v_max", "discount")  # of the returns in stored rows

    discount: float = fraction_or_auto(
        0.99, "gamma, per env step; auto: (T/5 - 1) / (T/5) of episodes of at most T steps, within 0.95 and 0.995"
    )
    n_step: int = count(1, "rewards a return sums before it bootstraps", high=255)
    target_interval_steps: int = fields.interval_steps()
    value: str = choice("expected", KINDS, "what is learned of the return: its mean, its distribution, its quantiles")
    n_atoms: int = count(51, "atoms of categorical, or quantiles")
    v_min: float = number(-10.0, "least return that categorical knows", low=-math.inf)
    v_max: float = number(10.0, "largest return that categorical knows", low=-math.inf)
    huber_delta: float = positive(
        math.nan, "|TD error| from which the loss is linear; inf: squared; nan: 1 for quantile, else inf", infinite=True
    )

    def kind(self) -> Value:
        """What the networks say of the return."""
        given = not math.isnan(self.huber_delta)
        match self.value:
            case "categorical":
                return CategoricalValue(self.n_atoms, self.v_min, self.v_max)
            case "quantile":
                return QuantileValue(self.n_atoms, self.huber_delta if given else 1.0)
        return ExpectedValue(self.huber_delta if given else math.inf)


class FromReplay(Algorithm):
    """Base class of algorithms that learn from replay, with any agent; subclasses add `update`."""

    agent: Any
    replay: Replay[Any]
    ratio: ReplayRatio
    config: Any
    schedules: Schedules
    saved: Sequence[str] = ("progress", "ratio", "replay")

    def __init__(self, agent: Any, replay: Replay[Any], n_steps: int, config: Any) -> None:
        """`n_steps`: env_steps of the run, over which schedules go.    config: a FromReplayConfig.

        Raises:
            ConfigError: it is another Config.
        """
        if not isinstance(config, FromReplayConfig):
            raise ConfigError(
                f"{type(self).__name__} needs a Config that inherits FromReplayConfig, whose keys it reads"
            )
        self.agent, self.replay, self.config = agent, replay, config
        self.device, self.progress = next(agent.parameters()).device, Progress()
        self.ratio = ReplayRatio(config.replay_ratio, self.rows_of_update(), config.learning_starts, self.progress)
        self.schedules = Schedules(config, n_steps, self.progress, self.device)
        self.now = self.schedules.now

    def rows_of_update(self) -> int:
        """Rows that an update learns from."""
        return self.config.rows_of_update()

    def of_agents(self, samples: Samples) -> Samples:
        """The batch with a column for each agent, if its columns are environments of several."""
        return samples

    def receive(self, samples: Samples) -> None:
        seen = self.of_agents(samples)
        if not self.progress.clock and self.replay.n_rows:  # of data, beside which it plays
            self.observe_data()
        self.progress.count(seen)
        self.replay.append(samples)
        self.agent.observe(observed(seen))
        self.ratio.receive(self.progress.scheduled, self.progress.env_steps)

    def observe_data(self) -> None:
        if not any(isinstance(module, ObservationNorm) for module in self.agent.modules()):
            return
        drawn_once = getattr(self.config, "unique", False)  # so many as an update draws
        n = self.config.batch_size if drawn_once else _OBSERVED_AT_ONCE
        for _ in range(-(-min(self.replay.n_rows, _MOST_OBSERVED) // n)):
            self.agent.observe(self.replay.sample(n).acted_on)

    def updates_due(self) -> int:
        return self.ratio.due(self.replay.n_rows)

    def n_rows(self) -> int:
        return self.replay.n_rows

    def updates_in(self, n_steps: int, batch_size: int) -> int:
        return self.ratio.updates_until(n_steps)

    def rows_of_step(self, batch_size: int) -> int:
        return self.rows_of_update()

    def check_run(self, n_steps: int) -> None:
        check_learns(self.config, self.ratio, n_steps)

    def drop_updates(self) -> None:
        self.ratio.drop()

    def facts(self) -> dict[str, str]:
        of, is_silent = type(self.replay), str(self.replay) == object.__repr__(self.replay)
        return {"replay": qualified_name(of) if is_silent else str(self.replay)}

    def counters(self) -> dict[str, float]:
        own = {"replay/rows": self.replay.n_rows, **counters_of(self.replay)}
        return {**self.ratio.counters(), **own, **self.schedules.metrics()}


class OffPolicy(FromReplay):
    """Base class of those whose agent explores by a level; subclasses also call `start_exploring` once made."""

    agent: QAgent | ActorAgent
    exploration: ExplorationSchedule
    moves: TargetMoves
    saved: Sequence[str] = (*FromReplay.saved, "moves")

    def __init__(self, agent: Any, replay: Replay, exploration: ExplorationSchedule, n_steps: int, config: Any) -> None:
        """As FromReplay; `exploration`: sets the level by env_steps.

        Raises:
            ConfigError: the replay has another discount or n_step, or is prioritized, other than `config` says.
        """
        super().__init__(agent, replay, n_steps, config)
        check_replay(replay, config)
        self.exploration = exploration
        self.moves = TargetMoves(config.target_interval_steps, self.progress)

    def start_exploring(self) -> None:
        """Set the agent's exploration at first. Raises ConfigError if it was made by another config."""
        self.exploration.check(self.agent.exploration)
        self.explore()
        self.progress.followers.append(self._follow_updates)

    def _follow_updates(self, now: int) -> None:
        if not self.progress.env_steps:  # no batch is received where a runner counts in updates
            self.explore()

    def explore(self) -> None:
        """Set the agent's exploration for `progress.clock`."""
        self.exploration.apply(self.agent.exploration, self.progress.clock)

    def receive(self, samples: Samples) -> None:
        before = self.progress.column_steps
        super().receive(samples)
        after = self.progress.column_steps
        self.explore()
        n_envs, seen = self.exploration.n_envs, self.of_agents(samples)
        self.agent.exploration.follow(self.agent.model, seen, before // n_envs, after // n_envs)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.explore()  # the agent has the level of the run that saved it

    def least_exploring(self) -> range:
        return self.exploration.least_exploring(self.progress.env_steps)

    def counters(self) -> dict[str, float]:
        level = self.exploration.metrics(self.agent.exploration, self.progress.clock)
        return {**super().counters(), **level, **self.agent.exploration.counters()}


class QLearning(OffPolicy):
    """Base class of those whose agent has a Q-network, perhaps with noisy layers; subclasses make its `target`."""

    agent: QAgent
    target: QModel
    saved: Sequence[str] = (*OffPolicy.saved, "optimizer", "generator")

    def __init__(
        self, agent: QAgent, replay: Replay, exploration: ExplorationSchedule, n_steps: int, config: Any, seed: int = 0
    ) -> None:
        """As OffPolicy; `seed`, the run's root seed, decides what updates draw.

        Raises:
            ConfigError: the agent was made with another network than `config` says.
        """
        super().__init__(agent, replay, exploration, n_steps, config)
        check_network(agent, config)
        self.generator = torch.Generator().manual_seed(seed_int(seed, Role.ALGO))  # of noisy layers, for example
        self.target_tau = self.schedules.of("target_tau")

    def finish_update(self, target: nn.Module, online: nn.Module) -> None:
        """What follows a step of the optimizer: it is counted, and the target moves if it is its turn."""
        if self.moves.turn(self.config.target_interval):
            copy_into(target, online, self.target_tau(self.progress.scheduled))
        self.progress.updates += 1

    def start_exploring(self) -> None:
        super().start_exploring()
        self.resample()

    def resample(self) -> None:
        """Draw new noise for the noisy layers of both networks, as before every update.

        Before the first one the target also takes the online network's statistics, which rows have changed since.
        """
        if not self.progress.updates:
            copy_statistics(self.target, self.agent.model)
        self.target.resample(self.generator)
        self.agent.model.resample(self.generator)

    def receive(self, samples: Samples) -> None:
        super().receive(samples)
        if not self.progress.updates:  # the next batch gets its own noise all the same
            self.resample()


def replay_of(
    config: Any, agent: Any, batch_spec: BatchSpec, seed: int, reader: ReaderConfig[Batch], **others: Any
) -> Replay[Batch]:
    """Replay made from config.replay for an agent of these spaces, on its device; `others` as of `make_replay`.

    Raises:
        ConfigError: an agent of the user's does not have its spaces.
    """
    for name in ("observation_space", "action_space"):
        if not hasattr(agent, name):
            raise ConfigError(f"replay needs {type(agent).__name__}.{name}; set it in __init__")
    others |= {"previous": agent.uses_previous, "device": next(agent.parameters()).device, "seed": seed}
    return make_replay(config.replay, agent.observation_space, agent.action_space, batch_spec, reader, **others)


def n_step_replay(
    config: Any, agent: Any, batch_spec: BatchSpec, seed: int, prioritized: bool = False, initial: str = "max"
) -> Replay[Transitions]:
    """Replay of config.n_step transitions, made from config.replay, on the agent's device.

    Args:
        prioritized: as config.alpha and config.unique say.    initial: priority of new rows; td: by NStep.
    """
    alpha, unique = (config.alpha, config.batch_size * config.unique) if prioritized else (0.0, 0)
    first = math.inf if initial in ("max", "td") else float(initial)
    reader = NStep(config.discount, config.n_step, initial == "td")
    return replay_of(config, agent, batch_spec, seed, reader, alpha=alpha, unique=unique, initial_priority=first)


def joint_replay(
    config: Any, agent: QAgent | ActorAgent, n_agents: int, batch_spec: BatchSpec, seed: int
) -> Replay[Transitions]:
    """Replay of config.n_step transitions of n agents side by side (see core.multi_agent.joint_of)."""
    return make_replay(
        config.replay,
        observation_of(agent.observation_space, n_agents, turns=False),
        side_by_side(agent.action_space, n_agents, canonical=True),
        batch_spec,
        NStep(config.discount, config.n_step),
        previous=agent.uses_previous,
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


def weighted_mean(loss: Tensor, weight: Tensor) -> Tensor:
    """Mean of the losses [n], weighted against the bias of prioritized replay.

    Raises:
        ConfigError: a loss of another shape, which would be broadcast.
    """
    if loss.shape != weight.shape:
        raise ConfigError(
            f"a loss has shape {list(loss.shape)} and must be a number for each row, {list(weight.shape)}"
        )
    return (weight * loss).mean()


def target_policy_smoothing(action: Tensor, noise: Tensor, std: Any, clip: Any) -> Tensor:
    """clip(a + clip(σ ε, -c, c), -1, 1),  ε ~ N(0, 1)   (Fujimoto et al. 2018, algorithm 1).

    `std` σ and `clip` c are numbers or tensors [].
    """
    return (action + (std * noise).clamp(-clip, clip)).clamp(-1, 1)


def check_feedforward(model: ModelConfig, algo: str, other: str) -> None:
    """Raise ConfigError if the model has memory, which `algo` does not train."""
    if model.memory != "none":
        raise ConfigError(f"model.memory={model.memory}: {algo} learns from single rows; use {other} or memory=none")
