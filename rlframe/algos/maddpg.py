"""Multi-Agent Actor-Critic for Mixed Cooperative-Competitive Environments (MADDPG). Lowe, Wu et al., 2017.

https://arxiv.org/abs/1706.02275

For the agents of one policy, which share an actor, and the team's reward, the sum of theirs: the critics that the paper
has for each of them are then one. The actor follows its gradient of all their actions at once, those of the others
being the policy's own (Peng et al. 2021, arXiv 2003.06709); the paper takes the others' from replay. Of the agents of
other policies the critic knows what the state tells, not their actions.

With n_critics=2, policy_interval=2, target_interval=2 and target_noise=0.2 it is MATD3 (Ackermann et al. 2019, arXiv
1910.01465). A gradient step is read here, in `ddpg` and the files that it names, and in `models.central`.
"""

from __future__ import annotations

import chz
from torch import Tensor, nn

from rlframe.agents import ActorAgent
from rlframe.algos import ddpg, fields
from rlframe.algos.checks import check_norms
from rlframe.algos.defaults import Defaults
from rlframe.algos.off_policy import joint_replay
from rlframe.core.config import count, fraction, positive
from rlframe.core.errors import ConfigError
from rlframe.core.multi_agent import OBSERVATION, VALID, agents_of, flat, present, side_by_side, unflat
from rlframe.core.schedule import Scheduled, scheduled
from rlframe.core.seeding import Role, seed_int
from rlframe.core.struct import Tree
from rlframe.core.types import AgentInputs, BatchSpec, Samples
from rlframe.critics import Critic
from rlframe.critics.base import ActionNetworks
from rlframe.exploration import NOISE_KINDS, ExplorationSchedule, ExploreConfig, explore
from rlframe.models import ModelConfig
from rlframe.models.actor import ActorModel
from rlframe.models.central import CentralView, where_present
from rlframe.models.initial import redrawn
from rlframe.models.network import initial_weights


@chz.chz
class Config(ddpg.Config):
    """Defaults are those of the paper for its particle worlds, which have Discrete actions there."""

    joint = True

    for_images = Defaults(ModelConfig(hidden=(64, 64), activation="relu"), BatchSpec(T=25, B=4))
    for_vectors = for_images

    learning_rate: Scheduled = scheduled(1e-2, "of the actor")
    critic_learning_rate: Scheduled = scheduled(1e-2, "of the critic")
    max_grad_norm: Scheduled = fields.grad_norm(0.5, "norm at which the gradient of either loss is clipped")
    discount: float = fraction(0.95, "gamma, per env step")
    tau: Scheduled = scheduled(0.01, "how far targets move to the online networks at each of their moves", high=1)
    batch_size: int = count(1024, "rows of an update, each of all agents")
    replay_ratio: float = positive(
        10.24, "rows, of all agents, learned from for each env_step: batch_size times the updates a step"
    )
    learning_starts: int = count(10_000, "env_steps before the first update", low=0)
    policy_penalty: Scheduled = scheduled(1e-3, "of the mean square of the actor's outputs, as in the authors' code")
    explore: ExploreConfig | str = explore("gaussian", NOISE_KINDS, {"std": 0.1})

    @chz.validate
    def _check_replay(self) -> None:
        if self.prioritized:
            raise ConfigError("algo.prioritized=true is not for algo=maddpg, whose replay is uniform; leave it out")

    def make_algorithm(self, agent: ActorAgent, batch_spec: BatchSpec, n_steps: int, seed: int = 0) -> ddpg.DDPG:
        raise ConfigError(
            "algo=maddpg learns from several agents together; use make_joint, or algo=ddpg or td3 for one"
        )

    def make_joint_critic(self, agent: ActorAgent, n_agents: int, seed: int = 0) -> Critic:
        """Of what all agents observe and do; `seed`, the run's root seed, decides the initial weights."""
        check_norms(agent, "counts agents that are absent")
        value, view = self.kind(), CentralView(agent.observation_space, agent.action_space, n_agents)
        actions = side_by_side(agent.action_space, n_agents)
        with initial_weights(seed_int(seed, Role.CRITIC)):
            model = agent.model_config.of_team()
            networks = redrawn(ActionNetworks(view.space, actions, value.n_atoms, model, self.n_critics), model.init)
        return Critic(CentralNetworks(networks, view), value, self.ensemble())

    def make_joint(
        self, agent: ActorAgent, n_agents: int, batch_spec: BatchSpec, n_steps: int, seed: int = 0
    ) -> MADDPG:
        """For n agents that share the network of `agent`, in batches of `joint_of` of this size."""
        exploration = ExplorationSchedule(self.explore, n_steps, batch_spec.n_envs * n_agents)
        critic = self.make_joint_critic(agent, n_agents, seed)
        own_replay = joint_replay(self, agent, n_agents, batch_spec, seed)
        return MADDPG(agent, critic, own_replay, exploration, n_steps, self, seed)


class CentralNetworks(nn.Module):
    """Values of what all agents observe and do, zeros where one is not present."""

    def __init__(self, networks: ActionNetworks, view: CentralView) -> None:
        super().__init__()
        self.networks, self.view = networks, view

    def forward(self, rows: Tree, action: Tensor) -> Tensor:
        """Q(x, a_1, ..., a_n) [k, N, n_atoms] of observations [N, n, ...] with flags, and actions [N, n, *act]."""
        here = present(rows)
        return self.networks(self.view(rows[OBSERVATION], here), where_present(action, here))


class MADDPG(ddpg.DDPG):
    """DDPG of the team: the action is that of all agents, each by its own observation. Equations stand in its file.

    y = r + γ Q'(x', μ'(o'_1), ..., μ'(o'_n)), and the actor follows the gradient of Q(x, μ(o_1), ..., μ(o_n))
    (eq. 6 and 5, of one actor).
    """

    config: Config

    def of_agents(self, samples: Samples) -> Samples:
        return agents_of(samples)

    def normalized(self, inputs: AgentInputs) -> Tree:
        rows = inputs.observation
        return {**rows, OBSERVATION: self.agent.model.normalized(rows[OBSERVATION])}

    def actor_outputs(self, actor: ActorModel, observation: Tree) -> Tensor:
        """u [n, agents, d] of each by its own observation, 0 where one is not present."""
        own = unflat(super().actor_outputs(actor, flat(observation[OBSERVATION])), observation[VALID].shape[1])
        return where_present(own, present(observation))

    def actor_loss(self, q: Tensor, outputs: Tensor, action_of_data: Tensor) -> Tensor:
        """-mean Q + c mean u²,  a = tanh u: actions near their bounds keep a gradient."""
        return -q.mean() + self.now.policy_penalty * outputs.square().mean()
