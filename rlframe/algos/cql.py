"""Conservative Q-Learning for Offline Reinforcement Learning (CQL). Kumar, Zhou, Tucker, Levine, 2020. NeurIPS 33.

https://arxiv.org/abs/2006.04779. CQL(H) on the critics of SAC, with a fixed weight or one by Lagrange. On those of DQN,
as in the paper's Atari experiments, it is algo=dqn algo.conservative_weight=1 (with value=quantile, the paper's).

A gradient step is read here and in `sac`, and the files that it names, and `ops.offline`.
"""

from __future__ import annotations

import math
from typing import Any

import chz
import torch
from torch import Tensor

from rlframe.agents import ActorAgent
from rlframe.algos import sac
from rlframe.algos.actor_critics import Temperature
from rlframe.algos.checks import check_norms
from rlframe.algos.defaults import Defaults
from rlframe.algos.sac import Continuous, Discrete, Losses, Pair, SoftValue
from rlframe.core.config import count, option
from rlframe.core.errors import ConfigError
from rlframe.core.field_effects import idle_while, in_state
from rlframe.core.schedule import Schedule, Scheduled, scheduled
from rlframe.core.spaces import ACTION_MASK, allowed
from rlframe.core.struct import Tree, map_tree
from rlframe.core.types import BatchSpec
from rlframe.models import ModelConfig
from rlframe.models.actor import ActorModel
from rlframe.ops.offline import conservative_gap
from rlframe.ops.q_learning import taken
from rlframe.replay import Transitions
from rlframe.updates.compiled import Compiled
from rlframe.updates.optimizer_step import make_optimizer_step

_MOST_WEIGHT = 1e6  # of a learned weight, as in the authors' code


@chz.chz
class Config(sac.Config):
    """Defaults are those of the paper for locomotion (appendix F) and of its code; the rest is SAC's.

    The weight is that of eq. 4, whose squared error is halved; the code's is not, and its weight of 10 is 5 here.
    """

    for_vectors = Defaults(ModelConfig(hidden=(256, 256, 256), activation="relu"), BatchSpec(T=1, B=1))

    IDLE = idle_while("target_gap", learn_conservative_weight=False)
    IN_STATE = in_state("conservative_weight", learn_conservative_weight=True)

    learning_rate: Scheduled = scheduled(1e-4, "of the actor and the temperature")
    conservative_weight: Scheduled = scheduled(5.0, "alpha: weight of the gap; at first, if it is learned", above=True)
    learn_conservative_weight: bool = option(False, "so that the gap comes to be target_gap (Lagrange, eq. 30)")
    target_gap: Scheduled = scheduled(10.0, "tau: the gap that a learned weight holds", low=-math.inf)
    n_actions: int = count(10, "Box actions drawn for the gap from each of: uniform, the policy at s, and at s'")
    entropy_in_target: bool = option(False, "the critics' targets have the entropy of s' too, as in SAC")
    learning_starts: int = count(0, "env_steps before the first update", low=0)

    @chz.validate
    def _check_weight(self) -> None:
        if self.learn_conservative_weight and isinstance(self.conservative_weight, Schedule):
            raise ConfigError(
                f"algo.conservative_weight={self.conservative_weight} changes what is learned; leave out "
                f"algo.learn_conservative_weight=true, or give the weight at first"
            )

    def make_algorithm(self, agent: ActorAgent, batch_spec: BatchSpec, n_steps: int, seed: int = 0) -> CQL:
        return CQL(*self.parts(agent, batch_spec, n_steps, seed))


def with_gap(losses: Losses, gap: Tensor, c: Any, multiplier: Temperature) -> Losses:
    """Σ_i α E[gap_i] + ½ E[(Q_i - y)²]   (eq. 4), of gaps [critics, n] and what SAC's critics descend."""
    (loss, found), gap = losses, gap.mean(-1)
    found = {**found, "conservative_gap": gap.mean()}
    if not c.learn_conservative_weight:
        return loss + c.conservative_weight * gap.sum(), found
    weight = multiplier.log.exp().detach()
    return loss + weight * gap.sum(), {**found, "conservative_weight": weight}


def entropy_weight(c: Any, temperature: Tensor) -> Tensor:
    """The temperature in the critics' targets."""
    return temperature if c.entropy_in_target else torch.zeros_like(temperature)


class OfDrawn(Continuous):
    """Box actions: N are drawn uniformly, N by the policy at s and N by that at s', and weighed by their densities."""

    multiplier: Temperature  # α, if it is learned

    def noise(self, n: int) -> Pair:
        """What SAC draws, and for others: [2, N n, d] standard normal, and [N n, *act] uniform in [-1, 1]."""
        (own, following), rows, device = super().noise(n), self.now.n_actions * n, self.generator.device
        normal = torch.randn(2, rows, self.policy.size, generator=self.generator, device=device)
        uniform = torch.rand(rows, *self.policy.shape, generator=self.generator, device=device)
        return own, (following, normal, 2 * uniform - 1)

    def draw_next(self, model: ActorModel, observations: Pair, noise: Any) -> Pair:
        """Also actions [3 N n, *act], of the policy as it acts, and log-densities [3 N n], those of a row n apart."""
        following, normal, uniform = noise
        of_both = [model.params(x) for x in observations]
        at, after = (
            self.draw(each.repeat(self.now.n_actions, 1), own) for each, own in zip(of_both, normal, strict=True)
        )
        of_uniform = torch.full_like(at[1], -self.policy.size * math.log(2))
        others = torch.cat([uniform, at[0], after[0]]), torch.cat([of_uniform, at[1], after[1]])
        return self.draw(of_both[1], following), others

    def critic_loss(self, batch: Transitions, observations: Pair, next_drawn: Any, temperature: Tensor) -> Losses:
        next_drawn, others = next_drawn
        losses = super().critic_loss(batch, observations, next_drawn, entropy_weight(self.now, temperature))
        return with_gap(losses, self.gap(batch, observations[0], others), self.now, self.multiplier)

    def gap(self, batch: Transitions, observation: Tree, drawn: Pair) -> Tensor:
        """log Σ_a exp Q_i(s, a) - Q_i(s, a of the data) [critics, n], the sum estimated by the actions drawn."""
        (action, log_density), n = drawn, len(batch.return_)
        k = len(action) // n
        repeated = map_tree(lambda x: x.expand(k, *x.shape).flatten(0, 1), observation)
        q = self.critic.q(repeated, action).unflatten(-1, (k, n)).transpose(-1, -2)  # [critics, n, 3 N]
        return conservative_gap(q, self.critic.q(observation, batch.action), log_density.view(k, n).T)


class OfAll(Discrete):
    """Discrete actions: the sum is exact, over all that are allowed."""

    multiplier: Temperature  # α, if it is learned

    def critic_loss(self, batch: Transitions, observations: Pair, log_prob: Tensor, temperature: Tensor) -> Losses:
        losses = super().critic_loss(batch, observations, log_prob, entropy_weight(self.now, temperature))
        return with_gap(losses, self.gap(batch, observations[0]), self.now, self.multiplier)

    def gap(self, batch: Transitions, observation: Tree) -> Tensor:
        """log Σ_a exp Q_i(s, a) - Q_i(s, a of the data) [critics, n]."""
        q = self.critic.q(observation)  # [critics, n, A]
        of_allowed = q
        if self.policy.masked:
            of_allowed = q.masked_fill(~allowed(observation[ACTION_MASK]), -torch.inf)
        return conservative_gap(of_allowed, taken(q, batch.action))


class CQL(sac.SAC):
    """SAC, whose critics are lower where the data have no actions."""

    saved = (*sac.SAC.saved, "multiplier", "multiplier_optimizer")
    config: Config

    def __init__(self, *parts: Any) -> None:
        """`parts`: those of SAC."""
        check_norms(parts[0], "sets the gap between values that different rows have normalised")
        super().__init__(*parts)
        self.multiplier_optimizer = make_optimizer_step(
            self.multiplier.parameters(), self.schedules, "critic_learning_rate", decays=False
        )
        if self.config.learn_conservative_weight:
            steps = [self.critic_optimizer, self.multiplier_optimizer]
            self.learn_critics = Compiled(self._learn_critics, self.schedules, steps)
            self.learn.steps.append(self.multiplier_optimizer)

    def make_soft_value(self) -> SoftValue:
        self.multiplier = Temperature(self.schedules.of("conservative_weight")(0)).to(self.device)
        kind = OfDrawn if self.agent.policy.size else OfAll
        made = kind(self.critic, self.agent.policy, self.generator, self.now)
        made.multiplier = self.multiplier
        return made

    def _learn_critics(self, inputs: tuple[Transitions, Pair]) -> dict[str, Tensor]:
        """One step of the critics, and where α is learned one of it along α (mean_i E[gap_i] - τ)   (eq. 30)."""
        found = super()._learn_critics(inputs)
        if self.config.learn_conservative_weight:
            above = found["conservative_gap"] - self.now.target_gap
            self.multiplier_optimizer.minimize(-self.multiplier.log.exp() * above)
            with torch.no_grad():
                self.multiplier.log.clamp_(max=math.log(_MOST_WEIGHT))
        return found
