"""Simplifying Deep Temporal Difference Learning. Gallici et al., 2024. arXiv 2407.04811.

PQN: Q-learning on the newest batch, without replay and without a target network. Layer normalisation after each layer,
many environments and Q(λ) returns take their place.

A gradient step is read here and in `on_policy`, `agents.q`, `critics.values`, `models.q_network`,
`models.actor_critic`, `models.encoders`, `models.network`, `ops.policy_gradient`, `ops.returns`,
`updates.optimizer_step`, `optimizers.moments` and `core.types`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import chz
import torch
from gymnasium import Space
from torch import Tensor

from rlframe.agents import QAgent, make_q_agent
from rlframe.algos import fields
from rlframe.algos.defaults import Defaults, default_model
from rlframe.algos.on_policy import OnPolicyEpochs, inputs_of_rows, order_of_rows
from rlframe.core.config import count
from rlframe.core.schedule import Scheduled, scheduled
from rlframe.core.seeding import Role, seed_int
from rlframe.core.struct import Struct, Tree, map_tree
from rlframe.core.types import AgentInputs, BatchSpec, Samples
from rlframe.critics import ExpectedValue
from rlframe.exploration import Q_KINDS, ExplorationSchedule, ExploreConfig, explore
from rlframe.kernels.transfer import to_device
from rlframe.models import ModelConfig
from rlframe.models.views import check_not_privileged
from rlframe.ops.policy_gradient import explained_variance, masked_mean
from rlframe.ops.q_learning import taken
from rlframe.ops.returns import q_lambda_return
from rlframe.optimizers import OptimizerConfig, optimizer


@chz.chz
class Config:
    """Defaults are those of the paper's Atari runs."""

    learns_from = "batches"
    for_images = Defaults(ModelConfig(activation="relu", norm="layer", image_norm="layer"), BatchSpec(T=32, B=128))
    for_vectors = Defaults(
        ModelConfig(hidden=(128, 128), activation="relu", norm="layer"),
        BatchSpec(T=32, B=16),
        {
            "learning_rate": "linear(1e-3,0)",
            "q_lambda": 0.95,
            "epochs": 4,
            "minibatches": 4,
            "explore.epsilon": "linear(1,0.05,0.2)",
        },
        normalize_reward=True,
    )

    learning_rate: Scheduled = scheduled(2.5e-4, "of the optimizer")
    optimizer: OptimizerConfig | str = optimizer("radam", epsilon=1e-8)
    max_grad_norm: Scheduled = fields.grad_norm(10.0)
    discount: Scheduled = scheduled(0.99, "gamma, per env step", high=1)
    q_lambda: Scheduled = scheduled(0.65, "lambda: 0 is the one-step target, 1 the sum of rewards", high=1)
    epochs: int = count(2, "passes over each batch", high=10_000)
    minibatches: int = count(32, "gradient steps an epoch; of rows, or of whole sequences with memory")
    explore: ExploreConfig | str = explore("epsilon", Q_KINDS, {"epsilon": "linear(1,0.001,0.1)"})

    make_q_network = None
    """As of DQN's Config."""

    def make_agent(
        self, observation_space: Space, action_space: Space, model: ModelConfig | None = None, seed: int = 0
    ) -> QAgent:
        model = model or default_model(self, observation_space, action_space)
        check_not_privileged(observation_space)
        given = observation_space, action_space, model, ExpectedValue(), self.explore, seed
        return make_q_agent(*given, make_network=self.make_q_network)

    def make_algorithm(self, agent: QAgent, batch_spec: BatchSpec, n_steps: int, seed: int = 0) -> PQN:
        return PQN(agent, batch_spec, n_steps, self, seed)


@dataclass(frozen=True, eq=False)
class ReturnRows(Struct):
    """Training rows: [T, B], or [n] for a minibatch of rows."""

    inputs: AgentInputs
    action: Tensor
    return_: Tensor  # G, the target
    valid: Tensor


class PQN(OnPolicyEpochs):
    """The squared error to Q(λ) returns, in epochs of minibatches over each batch."""

    saved = (*OnPolicyEpochs.saved, "generator")
    agent: QAgent
    config: Config

    def __init__(
        self, agent: QAgent, batch_spec: BatchSpec, n_steps: int, config: Config | None = None, seed: int = 0
    ) -> None:
        """`n_steps`: env_steps of the run, over which schedules go.

        Raises:
            ConfigError, ValueError: the agent explores otherwise than `config`; minibatches do not divide the batch.
        """
        c = config or Config()
        super().__init__(agent, batch_spec, n_steps, c, seed)
        self.generator = torch.Generator().manual_seed(seed_int(seed, Role.ALGO))  # of noisy layers
        self.exploration = ExplorationSchedule(c.explore, n_steps, batch_spec.n_envs)
        self.exploration.check(agent.exploration)
        self.explore()
        agent.model.resample(self.generator)  # for the first batch

    def explore(self) -> None:
        """Set the agent's exploration for the env_steps so far."""
        self.exploration.apply(self.agent.exploration, self.progress.env_steps)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.explore()  # the agent has the level of the run that saved it

    def receive(self, samples: Samples) -> None:
        before = self.progress.column_steps
        super().receive(samples)
        after, n_envs = self.progress.column_steps, self.exploration.n_envs
        self.explore()
        self.agent.exploration.follow(self.agent.model, samples, before // n_envs, after // n_envs)

    @torch.no_grad()
    def rows(self, samples: Samples) -> tuple[ReturnRows, dict[str, Tensor]]:
        """Rows with their returns, by the Q-values when acting, and how much of the returns those explain.

        No step was made since, unless the sampler runs ahead; row T is evaluated now.
        """
        c, T, ends = self.now, len(samples.reward), (samples.terminated, samples.truncated, samples.valid)
        last, _ = self.agent(samples.inputs[T:], samples.final_state)
        q = torch.cat([samples.info.q, self.agent.kind.q(last)])  # type: ignore[attr-defined]  # QInfo
        q = self.agent.of_allowed(q, samples.inputs)
        return_ = q_lambda_return(samples.reward, q, *ends, c.discount, c.q_lambda)
        inputs = inputs_of_rows(samples, self.agent.uses_previous)
        fit = explained_variance(q[:-1].amax(-1), return_, samples.valid)
        return ReturnRows(inputs, samples.action, return_, samples.valid), {"explained_variance": fit}

    def minibatches(self, rows: ReturnRows, samples: Samples) -> Iterator[tuple[ReturnRows, Tree]]:
        """One pass in a new order: rows [T * B / n], or with memory sequences [T, B / n] and the memory before.

        Each minibatch has noise of its own in noisy layers.
        """
        n, state = self.config.minibatches, samples.state
        if self.agent.recurrent:
            columns = torch.from_numpy(self.rng.permutation(rows.valid.shape[1]))
            for part in to_device(columns, rows.valid.device).view(n, -1):
                self.agent.model.resample(self.generator)
                yield rows[:, part], map_tree(lambda x, part=part: x[part], state)
        else:
            flat = rows.map(lambda x: x.flatten(0, 1))
            for part in order_of_rows(rows.valid, n, self.rng, samples.n_valid):
                self.agent.model.resample(self.generator)
                yield flat[part], state

    def _learn(self, inputs: tuple[ReturnRows, Tree]) -> dict[str, Tensor]:
        """One gradient step on a minibatch."""
        rows, state = inputs
        loss, q = self.loss(*self.outputs(rows, state), rows)
        norm = self.optimizer.minimize(loss, rows, rows.valid)
        return {"loss": loss.detach(), "q": q, "grad_norm": norm}

    def outputs(self, rows: ReturnRows, state: Tree) -> tuple[Tensor]:
        """What the network gives for a minibatch and the memory before it: the arguments of `loss` before the rows."""
        return (self.agent(rows.inputs, state)[0],)

    def loss(self, values: Tensor, rows: ReturnRows) -> tuple[Tensor, Tensor]:
        """E[(Q(s, a) - G)²] / 2   (algorithm 1), of the head's numbers [..., A, 1]; and E[Q(s, a)]."""
        q = taken(self.agent.kind.q(values), rows.action)
        return masked_mean(0.5 * (q - rows.return_).square(), rows.valid), masked_mean(q.detach(), rows.valid)

    def least_exploring(self) -> range:
        return self.exploration.least_exploring(self.progress.env_steps)

    def counters(self) -> dict[str, float]:
        exploration = self.agent.exploration
        level = self.exploration.metrics(exploration, self.progress.env_steps)
        return {**super().counters(), **level, **exploration.counters()}
