"""Offline Reinforcement Learning with Implicit Q-Learning (IQL). Kostrikov, Nair, Levine, 2022. ICLR.

https://arxiv.org/abs/2110.06169. No value of an action that is not in the data is ever asked for.

A gradient step is read here and in `imitation`, `off_policy`, `agents.policy`, `critics.base`, `critics.values`,
`models.actor_critic`, `models.encoders`, `models.network`, `models.heads`, `distributions.categorical`, `ops.offline`,
`ops.q_learning`, `updates.optimizer_step`, `optimizers.moments`, `replay.buffer`, `replay.storage`, `replay.n_step`,
`replay.select` and `core.types`.
"""

from __future__ import annotations

import math

import chz
import torch
from gymnasium import Space, spaces
from torch import Tensor

from rlframe.agents import PolicyAgent
from rlframe.algos.base import UpdateMetrics
from rlframe.algos.defaults import default_model
from rlframe.algos.imitation import Imitation, ImitationConfig
from rlframe.algos.off_policy import check_feedforward, replay_of
from rlframe.algos.targets import is_due, soft_update
from rlframe.core.config import count, fraction
from rlframe.core.errors import ConfigError
from rlframe.core.field_effects import in_state
from rlframe.core.schedule import Scheduled, scheduled
from rlframe.core.struct import Tree
from rlframe.core.types import BatchSpec
from rlframe.critics import Critic, ExpectedValue, make_critic
from rlframe.critics.values import of_actions
from rlframe.distributions import executed
from rlframe.models import ModelConfig
from rlframe.ops.offline import advantage_weight, expectile_loss
from rlframe.ops.q_learning import taken
from rlframe.replay import NStep, Replay, Transitions
from rlframe.updates.compiled import updates_of
from rlframe.updates.optimizer_step import make_optimizer_step


@chz.chz
class Config(ImitationConfig):
    """Defaults are those of the paper for locomotion (appendix B).

    Its policy is a Gaussian whose mean is tanh of the network's; here actions beyond the bounds are clipped. It anneals
    the policy's learning rate, learning_rate=cosine(3e-4,0), but not that of the value, which is one here.
    """

    IN_STATE = in_state("discount")

    critic_learning_rate: Scheduled = scheduled(3e-4, "of the critics")
    discount: float = fraction(0.99, "gamma, per env step")
    expectile: Scheduled = scheduled(0.7, "tau of V's expectile of Q; 0.5: the mean over the data's actions", high=1)
    beta: Scheduled = scheduled(3.0, "of the weight exp(beta (Q - V)) of an action; 0: behaviour cloning")
    most_weight: Scheduled = scheduled(100.0, "largest weight of an action; inf: any", above=True, infinite=True)
    tau: Scheduled = scheduled(0.005, "how far the target critics move to the online ones at each move", high=1)
    n_critics: int = count(2, "critics; V and the policy take the least of their targets' values", high=10_000)
    target_interval: int = count(1, "updates for each move of the targets")

    def make_agent(
        self, observation_space: Space, action_space: Space, model: ModelConfig | None = None, seed: int = 0
    ) -> PolicyAgent:
        check_feedforward(model := model or default_model(self, observation_space, action_space), "iql", "bc")
        if not isinstance(action_space, spaces.Box | spaces.Discrete):
            raise ConfigError(f"algo=iql has critics of one Box or one Discrete, not {action_space}; use marwil or bc")
        return super().make_agent(observation_space, action_space, model, seed)

    def make_replay(self, agent: PolicyAgent, batch_spec: BatchSpec, seed: int = 0) -> Replay[Transitions]:
        return replay_of(self, agent, batch_spec, seed, NStep(self.discount), sampled=True)

    def make_algorithm(self, agent: PolicyAgent, batch_spec: BatchSpec, n_steps: int, seed: int = 0) -> IQL:
        network = chz.replace(agent.model_config, distribution="auto", shared="auto")  # of the policy alone
        given = agent.observation_space, agent.action_space, ExpectedValue(math.inf), network, self.n_critics, seed
        return IQL(agent, make_critic(*given), self.make_replay(agent, batch_spec, seed), n_steps, self)


class IQL(Imitation):
    """V is an expectile of Q over the data's actions, Q follows V, and the policy imitates by the advantage."""

    saved = (*Imitation.saved, "critic", "critic_optimizer")

    def __init__(
        self,
        agent: PolicyAgent,
        critic: Critic,
        replay: Replay[Transitions],
        n_steps: int,
        config: Config | None = None,
    ) -> None:
        """Args:
        agent: its value is V.    critic: of (observation [n, *obs], action [n, *act]); for Discrete actions of the
            observation.    n_steps: env_steps of the run, over which schedules go.
        """
        super().__init__(agent, replay, n_steps, config or Config())
        self.critic = critic.to(self.device)
        self.chooses = isinstance(agent.action_space, spaces.Discrete)
        self.targets, self.online = critic.target_and_online()
        self.critic_optimizer = make_optimizer_step(critic.learned, self.schedules, "critic_learning_rate")
        self.learn = updates_of(self._learn, self.schedules, [self.critic_optimizer, self.optimizer])

    def update(self) -> UpdateMetrics:
        batch = self.replay.sample(self.config.batch_size)
        metrics = self.learn(batch)
        if is_due(self.progress.updates, self.config.target_interval):
            soft_update(self.targets, self.online, self.now.tau)
        self.progress.updates += 1
        return {**metrics, "learning_rate": self.optimizer.rate}

    def _learn(self, batch: Transitions) -> dict[str, Tensor]:
        """One step of the critics, and one of V and the policy, all by the values before these steps.

        Algorithm 1 moves V first, and then the critics by the new V; the authors' code the policy by the new V too.
        """
        critic_loss, of_critics = self.critic_loss(batch)
        loss, found = self.loss(*self.outputs(batch), batch)
        self.critic_optimizer.minimize(critic_loss, batch)
        self.optimizer.minimize(loss, batch)
        return {**of_critics, **found}

    def critic_loss(self, batch: Transitions) -> tuple[Tensor, dict[str, Tensor]]:
        """Σ_i E[(r + γ V(s') - Q_i(s, a))²]   (eq. 6), and metrics."""
        with torch.no_grad():
            next_value = self.agent(batch.next_inputs, ())[1]
        values = self._values(*self._of_data(batch))
        loss = 2 * self.critic.loss(values, next_value.unsqueeze(-1), batch.return_, batch, math.inf)
        return loss, {"loss": loss.detach(), "q": values.detach().mean()}

    def loss(self, params: Tensor, value: Tensor, batch: Transitions) -> tuple[Tensor, dict[str, Tensor]]:
        """The losses of V and of the policy [], and metrics.

        V:       E[L_2^τ(min_i Q'_i(s, a) - V(s))]                                                            (eq. 5)
        policy:  -E[min(exp(β (min_i Q'_i(s, a) - V(s))), w) log π(a|s)]                                      (eq. 7)
        """
        c = self.now
        with torch.no_grad():
            target_q = self._target_q(*self._of_data(batch))
        value_loss = expectile_loss(target_q - value, c.expectile).mean()
        weight = advantage_weight(target_q - value, c.beta, c.most_weight)
        policy_loss = -(weight * self.agent.distribution.log_prob(params, batch.action)).mean()
        found = {"value_loss": value_loss.detach(), "policy_loss": policy_loss.detach()}
        return value_loss + policy_loss, {**found, "advantage_weight": weight.mean()}

    def _of_data(self, batch: Transitions) -> tuple[Tree, Tensor]:
        """Observations, normalised, and the actions taken, as the critics see them."""
        observation = self.agent.model.normalized(batch.inputs.observation)
        return observation, executed(self.agent.action_space, batch.action)

    def _values(self, observation: Tree, action: Tensor) -> Tensor:
        """Q_i(s, a) [critics, n, 1]."""
        if not self.chooses:
            return self.critic(observation, action)
        return of_actions(self.critic(observation), action)

    def _target_q(self, observation: Tree, action: Tensor) -> Tensor:
        """min_i Q'_i(s, a) [n], by the target critics."""
        if not self.chooses:
            return self.critic.target_q(observation, action).amin(0)
        return taken(self.critic.target_q(observation), action).amin(0)
