"""Recurrent Experience Replay in Distributed Reinforcement Learning. Kapturowski et al., 2019. ICLR.

R2D2 on one machine: Q-learning on sequences from replay, begun at the recurrent state that acting had there, the first
rows only to warm it up. Differences from the paper: sequences begin where the sampler's batches do (the paper's overlap
of half a sequence is sampler.batch_T = half of burn_in + learn_T); they may reach over the end of an episode, where the
state is reset and the rows that do not count are masked.

A gradient step is read here and in `off_policy`, `agents.q`, `critics.values`, `models.q_network`,
`models.actor_critic`, `models.memory`, `ops.returns`, `models.encoders`, `models.network`, `ops.q_learning`,
`updates.optimizer_step`, `optimizers.moments`, `replay.buffer`, `replay.storage`, `replay.sequences`, `replay.select`
and `core.types`.
"""

from __future__ import annotations

import copy
from typing import Any

import chz
import torch
from gymnasium import Space
from torch import Tensor

from rlframe.agents import QAgent, make_q_agent
from rlframe.algos import fields
from rlframe.algos.base import UpdateMetrics
from rlframe.algos.checks import check_norms
from rlframe.algos.defaults import Defaults, default_model
from rlframe.algos.off_policy import FromReplayConfig, QLearning, priorities, reading_back, replay_of, weighted_mean
from rlframe.algos.prioritized import PRIORITIES, check_unique
from rlframe.core.config import count, fraction, option, positive
from rlframe.core.errors import ConfigError
from rlframe.core.field_effects import idle_while
from rlframe.core.schedule import Scheduled, scheduled
from rlframe.core.struct import Tree
from rlframe.core.types import AgentInputs, BatchSpec, Samples
from rlframe.critics import ExpectedValue
from rlframe.exploration import Q_KINDS, ExplorationSchedule, ExploreConfig, explore
from rlframe.models import ModelConfig
from rlframe.models.views import check_not_privileged
from rlframe.ops.q_learning import rescale, taken, td_loss, unscale
from rlframe.ops.returns import n_step_return
from rlframe.optimizers import OptimizerConfig, optimizer
from rlframe.replay import FixedSequence, Replay, Sequences
from rlframe.updates.compiled import looks_of, updates_of
from rlframe.updates.optimizer_step import make_optimizer_step

LADDER = {"epsilon": "linear(1,0.4,0.02)", "epsilon_last": "linear(1,0.00065536,0.02)"}  # 0.4, and 0.4 ** 8


@chz.chz
class Config(FromReplayConfig):
    """Defaults are the paper's (table 2), where one machine has them."""

    IDLE = idle_while("alpha", "beta", "eta", prioritized=False)
    IN_STATE = PRIORITIES
    for_images = Defaults(ModelConfig(activation="relu", memory="lstm", memory_size=512), BatchSpec(T=40, B=8))
    for_vectors = Defaults(
        ModelConfig(hidden=(64,), activation="relu", memory="lstm"),
        BatchSpec(T=20, B=8),
        {
            "learning_rate": "linear(1e-3,0)",
            "optimizer.epsilon": 1e-5,
            "discount": 0.99,
            "n_step": 3,
            "batch_size": 32,
            "burn_in": 10,
            "learn_T": 20,
            "replay.size": 100_000,
            "replay_ratio": 40.0,
            "learning_starts": 5_000,
            "target_interval": 200,
            "explore.epsilon": "linear(1,0.1,0.1)",
            "explore.epsilon_last": "linear(1,0.01,0.1)",
        },
    )

    learning_rate: Scheduled = scheduled(1e-4, "of the optimizer")
    optimizer: OptimizerConfig | str = optimizer("adam", epsilon=1e-3)
    max_grad_norm: Scheduled = fields.grad_norm(40.0)
    discount: Scheduled = scheduled(0.997, "gamma, per env step", high=1)
    n_step: int = count(5, "rewards a return sums before it bootstraps")
    batch_size: int = count(64, "sequences an update")
    burn_in: int = count(40, "rows of a sequence that only warm up the state", low=0)
    learn_T: int = count(80, "rows of a sequence, after those, that are learned from")
    replay_ratio: float = positive(
        1.0, "rows learned from for each row sampled: updates * batch_size * learn_T / env_steps"
    )
    learning_starts: int = count(50_000, "env_steps before the first update", low=0)
    state_interval: int = count(0, "env steps between stored states, where sequences start; 0: sampler.batch_T")
    huber_delta: float = positive(1.0, "|TD error| above which the loss is linear; inf: squared", infinite=True)
    target_interval: int = count(2_500, "updates between moves of the target network")
    target_interval_steps: int = fields.interval_steps()
    target_tau: Scheduled = fields.target_tau()
    explore: ExploreConfig | str = explore("epsilon", Q_KINDS, LADDER)
    double: bool = fields.double(True)
    dueling: bool = fields.dueling(True)
    rescale: bool = option(True, "learn h(value), so that rewards of any size need no clipping")
    prioritized: bool = option(True, "replay chooses sequences by their TD errors")
    alpha: float = fraction(0.9, "exponent of the priorities")
    beta: Scheduled = scheduled(0.6, "exponent of the importance weights", high=1)
    unique: bool = option(False, "prioritized: no sequence is twice in a batch")
    eta: Scheduled = scheduled(
        0.9, "priority: eta of the largest TD error of a sequence, the rest of their mean", high=1
    )

    @chz.validate
    def _check(self) -> None:
        check_unique(self)

    def rows_of_update(self) -> int:
        return self.batch_size * self.learn_T

    def make_agent(
        self, observation_space: Space, action_space: Space, model: ModelConfig | None = None, seed: int = 0
    ) -> QAgent:
        model = model or default_model(self, observation_space, action_space)
        if model.memory == "none":
            raise ConfigError("r2d1 trains a memory: use model.memory=lstm, gru or transformer, or algo=dqn without")
        check_not_privileged(observation_space)
        return make_q_agent(observation_space, action_space, model, ExpectedValue(), self.explore, seed, self.dueling)

    def make_replay(self, agent: QAgent, batch_spec: BatchSpec, seed: int = 0) -> Replay[Sequences]:
        reader = FixedSequence(self.burn_in + self.learn_T, self.state_interval)
        alpha, unique = self.alpha if self.prioritized else 0.0, self.batch_size if self.unique else 0
        state = agent.initial_state(range(batch_spec.B))
        return replay_of(self, agent, batch_spec, seed, reader, alpha=alpha, state=state, unique=unique)

    def make_algorithm(self, agent: QAgent, batch_spec: BatchSpec, n_steps: int, seed: int = 0) -> R2D1:
        return R2D1(*self.parts(agent, batch_spec, n_steps, seed))


class R2D1(QLearning):
    """Double Q-learning on sequences; online and target network start from the same stored state."""

    saved = (*QLearning.saved, "target")
    replay: Replay[Sequences]

    def __init__(
        self,
        agent: QAgent,
        replay: Replay[Sequences],
        exploration: ExplorationSchedule,
        n_steps: int,
        config: Config | None = None,
        seed: int = 0,
    ) -> None:
        """Raises:
        ConfigError, ValueError: a number of `config` is out of range; prioritized, with a replay of your own.
        """
        check_norms(agent)
        super().__init__(agent, replay, exploration, n_steps, c := config or Config(), seed)
        self.new_rows = reading_back(replay, "algo.prioritized=true", "prioritized=false") if c.prioritized else None
        self.beta = self.schedules.of("beta")
        self.optimizer = make_optimizer_step(agent.model.parameters(), self.schedules)
        self.target = copy.deepcopy(agent.model).requires_grad_(False)
        self.learn = updates_of(self._learn, self.schedules, [self.optimizer], looks_of(agent.model))
        self.start_exploring()

    def receive(self, samples: Samples) -> None:
        super().receive(samples)
        if self.new_rows and len(index := self.new_rows.newest()):
            with torch.no_grad():  # the priorities that an update would give them
                self.replay.update_priorities(index, self.evaluate(self.new_rows.read(index))[1])

    def update(self) -> UpdateMetrics:
        self.resample()
        batch = self.replay.sample(
            self.config.batch_size, self.beta(self.progress.scheduled) if self.config.prioritized else 0.0
        )
        metrics, priority = self.learn(batch)
        if self.config.prioritized:
            self.replay.update_priorities(batch.index, priority)
        self.finish_update(self.target, self.agent.model)
        return {**metrics, "learning_rate": self.optimizer.rate}

    def _learn(self, batch: Sequences) -> tuple[dict[str, Tensor], Tensor]:
        """One gradient step on the weighted mean loss; also the priorities [n] of the sequences."""
        loss, priority, q = self.evaluate(batch)
        grad_norm = self.optimizer.minimize(weighted_mean(loss, batch.weight), batch)
        return {"loss": loss.detach().mean(), "q": q.mean(), "grad_norm": grad_norm}, priority

    def evaluate(self, batch: Sequences) -> tuple[Tensor, Tensor, Tensor]:
        """Loss, priority and mean Q-value [n] of the sequences of a batch; changes nothing."""
        return self.loss(*self.outputs(batch), batch)

    def outputs(self, batch: Sequences) -> tuple[Tensor]:
        """What the online network gives, [learn_T + 1, n, A, 1]: the arguments of `loss` before the batch."""
        return (self._values(self.agent.model, batch),)

    def loss(self, values: Tensor, batch: Sequences) -> tuple[Tensor, Tensor, Tensor]:
        """Loss [n] and priority [n] of the sequences, and the mean Q-value [n] of their actions."""
        c, q_of = self.now, self.agent.kind.q
        learned = slice(c.burn_in, None)
        ends = (batch.terminated[learned], batch.truncated[learned], batch.valid[learned])
        return_, bootstrap, index = n_step_return(batch.reward[learned], *ends, c.discount, c.n_step)
        with torch.no_grad():
            next_values = q_of(self._values(self.target, batch))
            chooser = q_of(values) if c.double else next_values
            best = self.agent.best(chooser, batch.inputs[c.burn_in :])
            next_q = taken(next_values, best).gather(0, index)
            target = return_ + bootstrap * (unscale(next_q) if c.rescale else next_q)
            target = rescale(target) if c.rescale else target
        q = taken(q_of(values[:-1]), batch.action[learned])
        loss, error = td_loss(q, target, c.huber_delta)
        valid = batch.valid[learned]
        n_valid = valid.sum(0).clamp(min=1)
        error = error * valid
        priority = priorities(c.eta * error.max(0).values + (1 - c.eta) * error.sum(0) / n_valid)
        return (loss * valid).sum(0) / n_valid, priority, (q.detach() * valid).sum(0) / n_valid

    def _values(self, model: Any, batch: Sequences) -> Tensor:
        """Of the rows that are learned from, with gradient from their first on."""
        return model(*self.after_burn_in(model, batch))[0]

    def after_burn_in(self, model: Any, batch: Sequences) -> tuple[AgentInputs, Tree]:
        """The inputs [learn_T + 1, n] of the rows that are learned from, and a network's memory before them."""
        state: Tree = batch.state.memory
        if self.config.burn_in:
            with torch.no_grad():
                _, state = model(batch.inputs[: self.config.burn_in], state)
        return batch.inputs[self.config.burn_in :], state
