"""QMIX: Monotonic Value Function Factorisation for Deep Multi-Agent Reinforcement Learning. Rashid et al., 2018.

https://arxiv.org/abs/1803.11485

With mixer=sum, Value-Decomposition Networks (VDN, Sunehag et al. 2017, arXiv 1706.05296). The agents' networks are
feed-forward; the papers' have memory. For the team's reward, the sum of its agents'.

A gradient step is read here and in `off_policy`, `agents.q`, `models.q_network`, `models.central`, `ops.q_learning`,
`updates.optimizer_step`, `replay.buffer`, `replay.n_step` and `core.multi_agent`.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod

import chz
import torch
import torch.nn.functional as F
from gymnasium import Space
from torch import Tensor, nn

from rlframe.agents import QAgent, make_q_agent
from rlframe.algos import fields
from rlframe.algos.base import Algorithm, UpdateMetrics
from rlframe.algos.checks import check_norms
from rlframe.algos.defaults import Defaults, default_model
from rlframe.algos.off_policy import FromReplayConfig, QLearning, check_feedforward, joint_replay, weighted_mean
from rlframe.core.config import choice, count, fraction, positive
from rlframe.core.errors import ConfigError
from rlframe.core.field_effects import idle_while, in_state
from rlframe.core.multi_agent import OBSERVATION, VALID, agent_rows, agents_of, present, unflat
from rlframe.core.schedule import Scheduled, scheduled
from rlframe.core.seeding import Role, seed_int
from rlframe.core.struct import Tree
from rlframe.core.types import AgentInputs, BatchSpec, Samples
from rlframe.critics import ExpectedValue
from rlframe.exploration import Q_KINDS, ExplorationSchedule, ExploreConfig, explore
from rlframe.models import ModelConfig
from rlframe.models.actor import make_features
from rlframe.models.central import CentralView, where_present
from rlframe.models.encoders import feature_size
from rlframe.models.network import initial_weights
from rlframe.models.q_network import QModel
from rlframe.ops.q_learning import taken, td_loss
from rlframe.optimizers import OptimizerConfig, optimizer
from rlframe.replay import Replay, Transitions
from rlframe.updates.compiled import updates_of
from rlframe.updates.optimizer_step import make_optimizer_step


@chz.chz
class Config(FromReplayConfig):
    """Defaults are those of the paper where it has them, with Adam for RMSProp, and rows for episodes."""

    IDLE = idle_while("mixer_width", mixer="sum")
    IN_STATE = in_state("discount")
    joint = True

    for_images = Defaults(ModelConfig(activation="relu"), BatchSpec(T=8, B=4))
    for_vectors = Defaults(ModelConfig(hidden=(64, 64), activation="relu"), BatchSpec(T=8, B=4))

    learning_rate: Scheduled = scheduled(5e-4, "of agents and mixing network")
    optimizer: OptimizerConfig | str = optimizer("adam", epsilon=1e-5)
    max_grad_norm: Scheduled = fields.grad_norm(10.0)
    discount: float = fraction(0.99, "gamma, per env step")
    n_step: int = count(1, "rewards a return sums before it bootstraps", high=255)
    batch_size: int = count(256, "rows an update, each of all agents")
    replay_ratio: float = positive(32.0, "joint rows for each env_step: batch_size / env_steps an update")
    huber_delta: float = positive(float("inf"), "|TD error| above which the loss is linear; inf: squared")
    target_interval: int = count(200, "updates between moves of the target networks")
    target_interval_steps: int = fields.interval_steps()
    target_tau: Scheduled = fields.target_tau()
    explore: ExploreConfig | str = explore("epsilon", Q_KINDS, {"epsilon": "linear(1,0.05,0.1)"})
    double: bool = fields.double(True)
    dueling: bool = fields.dueling(False)
    mixer: str = choice("monotonic", ("monotonic", "sum"), "of the agents' values: QMIX's network, or VDN's sum")
    mixer_width: int = count(32, "hidden units of the mixing network", high=10_000)

    def make_agent(
        self, observation_space: Space, action_space: Space, model: ModelConfig | None = None, seed: int = 0
    ) -> QAgent:
        model = model or default_model(self, observation_space, action_space)
        check_feedforward(model, "qmix", "ppo")
        return make_q_agent(observation_space, action_space, model, ExpectedValue(), self.explore, seed, self.dueling)

    def make_algorithm(self, agent: QAgent, batch_spec: BatchSpec, n_steps: int, seed: int = 0) -> Algorithm:
        raise ConfigError("algo=qmix learns from several agents together; use make_joint, or algo=dqn for one")

    def make_mixer(self, agent: QAgent, n_agents: int, seed: int = 0) -> Mixer:
        """`seed`, the run's root seed, decides its initial weights."""
        if self.mixer == "sum":
            return Sum()
        with initial_weights(seed_int(seed, Role.CRITIC)):
            view = CentralView(agent.observation_space, agent.action_space, n_agents)
            return Monotonic(view, n_agents, self.mixer_width, agent.model_config)

    def make_joint(self, agent: QAgent, n_agents: int, batch_spec: BatchSpec, n_steps: int, seed: int = 0) -> QMIX:
        """For n agents that share the network of `agent`, in batches of `joint_of` of this size."""
        exploration = ExplorationSchedule(self.explore, n_steps, batch_spec.n_envs * n_agents)
        own_replay = joint_replay(self, agent, n_agents, batch_spec, seed)
        return QMIX(agent, self.make_mixer(agent, n_agents, seed), own_replay, exploration, n_steps, self, seed)


class Mixer(nn.Module, ABC):
    """Makes one value of those of all agents."""

    @abstractmethod
    def forward(self, q: Tensor, observation: Tree, present: Tensor) -> Tensor:
        """Q_tot [N] of q [N, n], 0 for agents that are not present.

        Args:
            observation: [N, n, ...], normalised.    present: [N, n] bool.
        """


class Sum(Mixer):
    """Q_tot = Σ_a Q_a   (Sunehag et al. 2017)."""

    def forward(self, q: Tensor, observation: Tree, present: Tensor) -> Tensor:
        return q.sum(-1)


class Monotonic(Mixer):
    """Q_tot = w_2(s)ᵀ elu(W_1(s) q + b_1(s)) + b_2(s),  W_1, w_2 >= 0   (figure 2; eq. 5: ∂Q_tot / ∂Q_a >= 0).

    The weights are those of hypernetworks of the state: linear, and b_2 of one hidden layer.
    """

    def __init__(self, view: CentralView, n_agents: int, width: int, config: ModelConfig) -> None:
        super().__init__()
        plain = chz.replace(config.of_team().of_value(), feed_back=False, action_embedding=0)
        self.view, self.encoder = view, make_features(view.space, plain)
        size = feature_size(self.encoder)
        self.W_1, self.b_1 = nn.Linear(size, width * n_agents), nn.Linear(size, width)
        self.w_2 = nn.Linear(size, width)
        self.b_2 = nn.Sequential(nn.Linear(size, width), nn.ReLU(), nn.Linear(width, 1))

    def forward(self, q: Tensor, observation: Tree, present: Tensor) -> Tensor:
        state = self.encoder(self.view(observation, present))
        W_1 = self.W_1(state).abs().unflatten(-1, (-1, q.shape[-1]))  # [N, width, n]
        hidden = F.elu((W_1 * q.unsqueeze(-2)).sum(-1) + self.b_1(state))
        return (self.w_2(state).abs() * hidden).sum(-1) + self.b_2(state).squeeze(-1)


class QMIX(QLearning):
    """Q-learning of the team's value, whose greedy actions are those of each agent's own value."""

    saved = (*QLearning.saved, "mixer", "targets")

    def __init__(
        self,
        agent: QAgent,
        mixer: Mixer,
        replay: Replay[Transitions],
        exploration: ExplorationSchedule,
        n_steps: int,
        config: Config | None = None,
        seed: int = 0,
    ) -> None:
        """`n_steps`: env_steps of the run, over which schedules go."""
        check_norms(agent, "counts agents that are absent")
        super().__init__(agent, replay, exploration, n_steps, config or Config(), seed)
        self.mixer = mixer.to(self.device)
        self.networks = nn.ModuleList([agent.model, mixer])
        self.optimizer = make_optimizer_step(self.networks.parameters(), self.schedules)
        self.target, self.target_mixer = copy.deepcopy(agent.model), copy.deepcopy(mixer)
        self.targets = nn.ModuleList([self.target, self.target_mixer]).requires_grad_(False)
        self.learn = updates_of(self._learn, self.schedules, [self.optimizer])
        self.start_exploring()

    def of_agents(self, samples: Samples) -> Samples:
        return agents_of(samples)

    def update(self) -> UpdateMetrics:
        self.resample()
        metrics = self.learn(self.replay.sample(self.config.batch_size))
        self.finish_update(self.targets, self.networks)
        return {**metrics, "learning_rate": self.optimizer.rate}

    def _learn(self, batch: Transitions) -> dict[str, Tensor]:
        loss, q = self.evaluate(batch)
        mean = weighted_mean(loss, batch.weight)
        norm = self.optimizer.minimize(mean, batch)
        return {"loss": mean.detach(), "q": q.mean(), "grad_norm": norm}

    def evaluate(self, batch: Transitions) -> tuple[Tensor, Tensor]:
        """Loss and Q_tot [N] of a batch; changes nothing."""
        return self.loss(*self.outputs(batch), batch)

    def outputs(self, batch: Transitions) -> tuple[Tensor]:
        """Q_a [N, n, A] of the online network: the arguments of `loss` before the batch."""
        return (self.values(self.agent.model, batch.inputs),)

    def loss(self, values: Tensor, batch: Transitions) -> tuple[Tensor, Tensor]:
        """Loss and Q_tot [N].  ½ (y - Q_tot(s, u))²,  y = r + γ Q'_tot(s', argmax_u Q(s', u))   (eq. 6)."""
        q_tot = self.q_tot(self.agent.model, self.mixer, values, batch.action, batch.inputs)
        with torch.no_grad():
            following = batch.next_inputs
            next_values = self.values(self.target, following)
            best = self.best(self.values(self.agent.model, following) if self.config.double else next_values, following)
            next_q_tot = self.q_tot(self.target, self.target_mixer, next_values, best, following)
        target = batch.return_ + batch.bootstrap * next_q_tot
        return td_loss(q_tot, target, self.config.huber_delta)[0], q_tot.detach()

    def values(self, model: QModel, inputs: AgentInputs) -> Tensor:
        """Q_a(o_a, .) [N, n, A] of each agent."""
        n = inputs.observation[VALID].shape[-1]
        return unflat(self.agent.kind.q(model(agent_rows(inputs), ())[0]), n)

    def best(self, values: Tensor, inputs: AgentInputs) -> Tensor:
        """The best allowed action [N, n] of each agent."""
        rows = agent_rows(inputs)
        return unflat(self.agent.best(values.flatten(0, 1), rows), values.shape[1])

    def q_tot(self, model: QModel, mixer: Mixer, values: Tensor, action: Tensor, inputs: AgentInputs) -> Tensor:
        """Q_tot(s, u) [N] of actions u [N, n]; s as `model` sees it. Agents that are not present contribute 0."""
        here, observation = present(inputs.observation), inputs.observation[OBSERVATION]
        q = where_present(taken(values, action), here)
        return mixer(q, model.normalized(observation), here)
