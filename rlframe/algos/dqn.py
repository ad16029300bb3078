"""Human-level control through deep reinforcement learning. Mnih et al., 2015. Nature 518, 529-533.

With the options that Rainbow (Hessel et al. 2018, arXiv 1710.02298) combines, each on its own: double (van Hasselt et
al. 2016), dueling (Wang et al. 2016), prioritized (Schaul et al. 2016), n_step, explore=noisy (Fortunato et al. 2018),
and the value as a categorical distribution (C51, Bellemare et al. 2017) or as quantiles (QR-DQN, Dabney et al. 2018).
Beyond it: implicit quantiles (IQN, Dabney et al. 2018, arXiv 1806.06923) and soft targets, munchausen (Vieillard et al.
2020). For data of other policies: conservative_weight (CQL, Kumar et al. 2020).

A gradient step is read here and in `off_policy`, `agents.q`, `critics.values`, `models.q_network`,
`models.actor_critic`, `models.encoders`, `models.network`, `ops.q_learning`, `updates.optimizer_step`,
`optimizers.moments`, `replay.buffer`, `replay.storage`, `replay.n_step`, `replay.select` and `core.types`.
"""

from __future__ import annotations

import copy
from dataclasses import replace

import chz
import torch
from gymnasium import Space
from torch import Tensor

from rlframe.agents import QAgent, make_q_agent
from rlframe.algos import fields
from rlframe.algos.base import Algorithm, UpdateMetrics
from rlframe.algos.defaults import Defaults, default_model
from rlframe.algos.off_policy import (
    OffPolicyConfig,
    QLearning,
    check_feedforward,
    n_step_replay,
    priorities,
    weighted_mean,
)
from rlframe.algos.prioritized import PRIORITIES, check_priorities, initial_priority
from rlframe.core.config import choice, count, fraction, number, option, positive
from rlframe.core.errors import ConfigError
from rlframe.core.field_effects import idle_while
from rlframe.core.schedule import Scheduled, scheduled
from rlframe.core.types import BatchSpec
from rlframe.critics import ImplicitValue, Value
from rlframe.critics.values import KINDS, of_actions
from rlframe.exploration import Q_KINDS, ExplorationSchedule, ExploreConfig, explore
from rlframe.kernels.transfer import to_device
from rlframe.models import ModelConfig
from rlframe.models.views import check_not_privileged
from rlframe.ops.offline import conservative_gap
from rlframe.ops.q_learning import log_policy_bonus, soft_values, taken
from rlframe.optimizers import OptimizerConfig, optimizer
from rlframe.replay import Replay, Transitions
from rlframe.updates.compiled import updates_of
from rlframe.updates.optimizer_step import make_optimizer_step


@chz.chz
class Config(OffPolicyConfig):
    """Defaults are those of the paper's Atari runs, with Adam for RMSProp; the presets have others."""

    IDLE = (
        idle_while("v_min", "v_max", value=("expected", "quantile", "implicit"))
        | idle_while("n_cosines", value=("expected", "categorical", "quantile"))
        | idle_while("alpha", "beta", prioritized=False)
        | idle_while("munchausen_temperature", "munchausen_clip", munchausen=0)
    )
    IN_STATE = PRIORITIES
    for_images = Defaults(ModelConfig(activation="relu"), BatchSpec(T=4, B=8))
    for_vectors = Defaults(
        ModelConfig(hidden=(128, 128), activation="relu"),
        BatchSpec(T=4, B=8),
        {
            "learning_rate": "linear(1e-3,0)",
            "batch_size": 64,
            "replay_ratio": 16.0,
            "learning_starts": 1_000,
            "target_interval": 125,
            "double": True,
            "n_step": 3,
            "replay.size": 100_000,
            "explore.epsilon": "linear(1,0.05,0.1)",
        },
    )

    learning_rate: Scheduled = scheduled(1e-4, "the paper: 2.5e-4, with RMSProp")
    optimizer: OptimizerConfig | str = optimizer("adam", epsilon=1.5e-4)  # as in Rainbow
    max_grad_norm: Scheduled = fields.grad_norm(10.0)
    batch_size: int = count(32, "rows an update")
    replay_ratio: float = positive(8.0, "rows learned from for each row sampled: batch_size / env_steps an update")
    learning_starts: int = count(50_000, "env_steps before the first update", low=0)
    value: str = choice(
        "expected", (*KINDS, "implicit"), "what is learned of the return: its mean, distribution, quantiles"
    )
    n_atoms: int = count(
        51, "atoms of categorical, quantiles, or fractions of implicit at which an update asks for them"
    )
    n_cosines: int = count(64, "features cos(pi i tau) of each fraction, for value=implicit", high=2**16)
    huber_delta: float = positive(1.0, "|TD error| above which the loss is linear; inf: squared", infinite=True)
    target_interval: int = count(10_000, "updates between moves of the target network")
    target_tau: Scheduled = fields.target_tau()
    explore: ExploreConfig | str = explore("epsilon", Q_KINDS, {"epsilon": "linear(1,0.1,0.02)"})
    double: bool = fields.double(False)
    dueling: bool = fields.dueling(False)
    prioritized: bool = option(False, "replay chooses by TD error")
    alpha: float = fraction(0.5, "exponent of the priorities")
    beta: Scheduled = scheduled("linear(0.4,1)", "exponent of the importance weights", high=1)
    initial_priority: str = initial_priority("the TD error of acting")
    unique: bool = option(False, "prioritized: no row is twice in a batch")
    munchausen: float = fraction(0.0, "alpha: weight of the log-policy added to the first reward; 0: hard targets")
    munchausen_temperature: float = positive(0.03, "tau, of the policy softmax(Q / tau) by the target network")
    munchausen_clip: float = number(-1.0, "least tau log pi that is added", low=-1e9, high=0.0)
    conservative_weight: Scheduled = scheduled(
        0.0, "alpha of CQL: weight of log sum exp Q(s, .) - Q(s, a), for data of other policies (the paper: 0.5 to 4)"
    )

    @chz.validate
    def _check(self) -> None:
        if self.value == "categorical" and self.huber_delta != 1:
            raise ConfigError(f"algo.huber_delta={self.huber_delta:g} is not for algo.value=categorical; leave it out")
        if self.munchausen and self.double:
            raise ConfigError(
                f"algo.double=true chooses one next action, but algo.munchausen={self.munchausen:g} averages over all; "
                f"use algo.double=false"
            )
        if self.munchausen and self.value == "categorical":
            raise ConfigError(
                f"algo.munchausen={self.munchausen:g} averages values over actions, which logits of "
                f"algo.value=categorical are not; use expected, quantile or implicit"
            )
        check_priorities(self)
        if self.initial_priority == "td" and (self.value not in ("expected", "quantile") or self.munchausen):
            raise ConfigError(
                "algo.initial_priority=td needs algo.value=expected or quantile and algo.munchausen=0, where errors "
                "are differences of the values of acting; use max"
            )

    def kind(self) -> Value:
        if self.value == "implicit":
            return ImplicitValue(self.n_atoms, self.n_cosines, self.huber_delta)
        return super().kind()

    make_q_network = None
    """A method that makes a network of your own; None: it is rlframe's.

    It is given what the agent sees of observations, the action space, n_atoms and the ModelConfig, and returns a
    torch.nn.Module from observations [n, *obs] to values [n, A], or [n, A, n_atoms] of a distribution. Observations are
    normalised, if model.normalize_observation says so; forbidden actions are never chosen.
    """

    def make_agent(
        self, observation_space: Space, action_space: Space, model: ModelConfig | None = None, seed: int = 0
    ) -> QAgent:
        model = model or default_model(self, observation_space, action_space)
        check_feedforward(model, "dqn", "r2d1")
        check_not_privileged(observation_space)
        given = observation_space, action_space, model, self.kind(), self.explore, seed
        return make_q_agent(*given, self.dueling, self.make_q_network)

    def make_replay(self, agent: QAgent, batch_spec: BatchSpec, seed: int = 0) -> Replay[Transitions]:
        return n_step_replay(self, agent, batch_spec, seed, self.prioritized, self.initial_priority)

    def make_algorithm(self, agent: QAgent, batch_spec: BatchSpec, n_steps: int, seed: int = 0) -> Algorithm:
        return DQN(*self.parts(agent, batch_spec, n_steps, seed))


class DQN(QLearning):
    """Q-learning from replay, towards a target network that is moved every `target_interval` updates or env_steps."""

    saved = (*QLearning.saved, "target")

    def __init__(
        self,
        agent: QAgent,
        replay: Replay[Transitions],
        exploration: ExplorationSchedule,
        n_steps: int,
        config: Config | None = None,
        seed: int = 0,
    ) -> None:
        """`n_steps`: env_steps of the run, over which schedules go.

        Raises:
            ConfigError, ValueError: a number of `config` is out of range.
        """
        super().__init__(agent, replay, exploration, n_steps, config or Config(), seed)
        self.beta = self.schedules.of("beta")
        self.optimizer = make_optimizer_step(agent.model.parameters(), self.schedules)
        self.target = copy.deepcopy(agent.model).requires_grad_(False)
        self.learn = updates_of(self._learn, self.schedules, [self.optimizer])
        self.start_exploring()

    def update(self) -> UpdateMetrics:
        c = self.config
        self.resample()
        beta = self.beta(self.progress.scheduled) if c.prioritized else 0.0
        batch = self.with_fractions(self.replay.sample(c.batch_size, beta))
        found = self.learn(batch)
        if c.prioritized:
            self.replay.update_priorities(batch.index, priorities(found["error"]))
        self.finish_update(self.target, self.agent.model)
        metrics = {name: x for name, x in found.items() if name != "error"}
        return {**metrics, "learning_rate": self.optimizer.rate}

    def with_fractions(self, batch: Transitions) -> Transitions:
        """The batch, if quantiles are implicit with fractions [n, 3, n_atoms] in `drawn`; see `tau`."""
        if self.config.value != "implicit":
            return batch
        drawn = torch.rand((len(batch.return_), 3, self.config.n_atoms), generator=self.generator)
        return replace(batch, drawn=to_device(drawn, batch.return_.device))

    def tau(self, batch: Transitions, network: int) -> tuple[Tensor, ...]:
        """The fractions [n, n_atoms] drawn for the online network (0), the target at the next row (1) or at this (2).

        (), unless quantiles are implicit.
        """
        return (batch.drawn[:, network],) if self.config.value == "implicit" else ()

    def _learn(self, batch: Transitions) -> dict[str, Tensor]:
        """One gradient step on the mean loss, weighted against the bias of prioritized replay."""
        loss, error, q = self.evaluate(batch)
        mean = weighted_mean(loss, batch.weight)
        norm = self.optimizer.minimize(mean, batch)
        return {"loss": mean.detach(), "q": q.mean(), "grad_norm": norm, "error": error}

    def evaluate(self, batch: Transitions) -> tuple[Tensor, Tensor, Tensor]:
        """Loss, error and Q [n] of a batch; changes nothing."""
        return self.loss(*self.outputs(batch), batch)

    def outputs(self, batch: Transitions) -> tuple[Tensor]:
        """What the online network gives for a batch: the arguments of `loss` before the batch."""
        return (self.agent(batch.inputs, (), *self.tau(batch, 0))[0],)

    def loss(self, values: Tensor, batch: Transitions) -> tuple[Tensor, Tensor, Tensor]:
        """Loss, error (by which replay may prioritize) and Q [n] of the head's numbers [n, A, n_atoms]."""
        kind, c = self.agent.kind.at(*self.tau(batch, 0)), self.config
        return_ = batch.return_ if c.munchausen == 0 else self.soft_returns(batch)
        loss, error, q = kind.loss_of_actions(values, batch.action, self.next_values(batch), return_, batch.bootstrap)
        if c.conservative_weight != 0:
            loss = loss + self.now.conservative_weight * self._gap(kind.q(values), batch)
        return loss, error, q

    def _gap(self, q: Tensor, batch: Transitions) -> Tensor:
        """log Σ exp Q(s, .) over allowed actions, less Q(s, a), [n] of Q [n, A]   (Kumar et al. 2020, eq. 4)."""
        return conservative_gap(self.agent.of_allowed(q, batch.inputs), taken(q, batch.action))

    @torch.no_grad()
    def soft_returns(self, batch: Transitions) -> Tensor:
        """G + α max(τ ln π(a|s), clip) [n] of the first step, with `munchausen` α: replay has no rows between.

        π is the target network's, as in the papers of Munchausen and of Beyond the Rainbow; the code of the latter has
        the online network's here, and the target network's at the next row.
        """
        c, kind = self.config, self.agent.kind
        q = self.agent.of_allowed(kind.q(self.target(batch.inputs, (), 1.0, *self.tau(batch, 2))[0]), batch.inputs)
        bonus = log_policy_bonus(q, batch.action, c.munchausen_temperature, c.munchausen_clip)
        return batch.return_ + c.munchausen * bonus

    @torch.no_grad()
    def next_values(self, batch: Transitions) -> Tensor:
        """The target network's numbers [n, n_atoms] of the best allowed action, with `double` the online's best.

        With `munchausen` their mean over the soft policy, plus its entropy.
        """
        tau = self.tau(batch, 1)
        next_values, _ = self.target(batch.next_inputs, (), 1.0, *tau)
        kind = self.agent.kind
        if self.config.munchausen != 0:
            q = self.agent.of_allowed(kind.q(next_values), batch.next_inputs)
            return soft_values(next_values, q, self.config.munchausen_temperature)
        chooser = self.agent(batch.next_inputs, (), *tau)[0] if self.config.double else next_values
        if self.agent.masked:
            return of_actions(next_values, self.agent.best(kind.q(chooser), batch.next_inputs))
        return kind.of_best(next_values, chooser)
