"""Curiosity: rewards with a learned bonus added; RND and ICM, and the keys that they share."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import chz
import numpy as np
import torch
from gymnasium import Space
from torch import Tensor, nn

from rlframe.algos import Algorithm
from rlframe.algos.running_deviation import RunningDeviation
from rlframe.core.config import below_one, count, fraction, option, positive, sizes
from rlframe.core.errors import ConfigError
from rlframe.core.field_effects import idle_while
from rlframe.core.schedule import Scheduled, scheduled
from rlframe.core.seeding import Role, generator, seed_int
from rlframe.core.spaces import zeros
from rlframe.core.struct import leaves, map_tree
from rlframe.core.types import Samples
from rlframe.distributions import make_distribution
from rlframe.models.heads import GaussianHead, policy_head
from rlframe.models.network import Network, initial_weights, orthogonal
from rlframe.ops.policy_gradient import masked_mean, mean_weights
from rlframe.optimizers.moments import Adam
from rlframe.record import metrics
from rlframe.rewards.base import Bonus, BonusConfig, RewardConfig, Rewards, Steps, encoder_of, normalizer, rows_of
from rlframe.updates.compiled import Compiled
from rlframe.updates.optimizer_step import OptimizerStep
from rlframe.updates.progress import Progress
from rlframe.updates.schedules import Schedules

_CPU = torch.device("cpu")


@chz.chz
class CuriosityConfig(BonusConfig):
    """Base class of the Configs of learned bonuses. Defaults are those of RND's Atari runs, but for the sizes."""

    IDLE = idle_while("clip", normalize_observation=False)

    scale: Scheduled = scheduled(1.0, "weight of the bonus, of deviation 1 in its return, beside the rewards")
    learning_rate: Scheduled = scheduled(1e-4, "of Adam, for the bonus's networks")
    max_grad_norm: Scheduled = scheduled(
        math.inf, "global norm at which their gradients are clipped; inf: never", above=True, infinite=True
    )
    discount: float = below_one(0.99, "gamma of the bonus's return, by whose running deviation it is divided")
    batch_size: int = count(256, "steps of a gradient step; smaller batches of the sampler are collected first")
    epochs: int = count(4, "passes over each step", high=10_000)
    share: float = fraction(0.25, "part of the steps that each pass learns from, at random", above=True)
    learning_starts: int = count(
        1000, "env_steps before the first bonus, in which only observations are normalised", low=0
    )
    normalize_observation: bool = option(True, "by the running mean and deviation of each number, images too")
    clip: float = positive(5.0, "limit of normalised observations, in deviations")
    hidden: tuple[int, ...] = sizes((64, 64), "widths of the layers of vectors, before the embedding")
    embedding: int = count(128, "numbers that a network makes of an observation; RND's paper has 512, ICM's 288")

    @abstractmethod
    def make_bonus(self, observation_space: Space, action_space: Space) -> Bonus:
        """Networks with random weights of torch's generator."""

    def networks(self, observation_space: Space, action_space: Space) -> Sequence[nn.Module]:
        return (self.make_bonus(observation_space, action_space),)

    def add_to(
        self, rewards: Rewards, algo: Algorithm, in_spaces: tuple[Space, Space], n_steps: int, seed: int = 0
    ) -> Curiosity:
        with initial_weights(seed_int(seed, Role.BONUS)):
            bonus = self.make_bonus(*in_spaces)
        device = next((parameter.device for parameter in algo.progress.learned), _CPU)
        return Curiosity(rewards, bonus.to(device), algo.progress, n_steps, self, seed)


class Curiosity(Rewards):
    """Adds `scale * novelty / deviation` to the rewards of each batch, and then learns the bonus from its steps.

    The deviation is that of the discounted sum of novelty in each environment, which goes on over the ends of episodes
    (Burda et al. 2018, section 2.4), running over all environments and ranks. It counts one sum of 0 at the start, so
    that the first bonus does not become huge.

    Deviations from that paper: the bonus is part of the one reward, so its return ends with the episode and has the
    algorithm's discount; there is no second value. A replay holds the reward with the bonus of the time when the row
    was received, so that it works with any replay, n-step returns and priorities; bonuses of old rows do not decay.
    Episodes are reported with the environment's own rewards, and the agent's previous rewards are without the bonus.
    """

    def __init__(
        self, inner: Rewards, bonus: Bonus, progress: Progress, n_steps: int, config: CuriosityConfig, seed: int = 0
    ) -> None:
        """Args:
            inner: what becomes of the rewards before.    progress: that of the algorithm.
        Raises:
            ConfigError: `inner` has a bonus already.
        """
        if isinstance(inner, Curiosity):
            raise ConfigError("reward.bonus: the rewards have one bonus already, and take no other")
        self.inner, self.bonus, self.progress = inner, bonus, progress
        self.config, self.schedules = RewardConfig(bonus=config), Schedules(config, n_steps, progress)
        learned = [parameter for parameter in bonus.parameters() if parameter.requires_grad]
        self.device = learned[0].device
        self.optimizer = OptimizerStep(Adam(learned, (0.9, 0.999), 1e-8), self.schedules)
        self.learn = Compiled(self._learn, self.schedules, [self.optimizer])
        self.scale = self.schedules.of("scale")
        self.rng = generator(seed, Role.BONUS)
        self.deviation = RunningDeviation(config.discount)  # of novelty
        self.collected: list[tuple[Steps, Tensor]] = []  # steps to learn from, and whether each is valid

    def __call__(self, samples: Samples) -> Samples:
        samples, steps, env_steps = self.inner(samples), self.bonus.steps(samples), self.progress.env_steps
        self.progress.schedule(env_steps)  # as the algorithm does when it receives the batch
        learns = env_steps >= self.config.bonus.learning_starts
        found = self._with_bonus(samples, steps, self.scale(env_steps)) if learns else samples
        self._collect(steps, samples.valid.flatten(), learns)
        return found

    def _with_bonus(self, samples: Samples, steps: Steps, scale: float) -> Samples:
        valid, device = samples.valid, samples.reward.device
        with torch.no_grad():
            novelty = self.bonus.novelty(steps.to(self.device)).view(valid.shape)
        self.deviation.update(novelty, samples, over_ends=True)
        deviation = self.deviation.value
        bonus = (scale / deviation * novelty).float().to(device).where(valid, 0.0)
        if samples.n_env_steps:
            metrics.add({"algo/bonus_mean": masked_mean(bonus, valid), "algo/bonus_deviation": deviation.clone()})
        return replace(samples, reward=samples.reward + bonus)

    def _collect(self, steps: Steps, valid: Tensor, learns: bool) -> None:
        """Keep the steps, and learn from all that are kept once they are enough on some rank."""
        self.collected.append((steps.map(torch.clone), valid.clone()))
        n = self.progress.ranks.max(sum(len(valid) for _, valid in self.collected)) // self.config.bonus.batch_size
        if not n:
            return
        parts, self.collected = self.collected, []
        kept = torch.cat([valid for _, valid in parts])
        kept_steps = parts[0][0].map(lambda *x: torch.cat(x), *(steps for steps, _ in parts[1:])).to(self.device)
        self.bonus.observe(map_tree(lambda x: x[kept.to(self.device)], kept_steps.next_observation))
        if learns:
            self._passes(kept_steps, kept, n)

    def _passes(self, steps: Steps, valid: Tensor, n: int) -> None:
        """Passes over the steps in n parts each; every rank makes the same number of gradient steps."""
        size = max(1, round(self.config.bonus.share * (len(valid) // n)))
        for _ in range(self.config.bonus.epochs):
            for part in np.array_split(self.rng.permutation(len(valid)), n):
                chosen = torch.from_numpy(part[:size])
                loss = self.learn((steps[chosen.to(self.device)], valid[chosen].to(self.device)))
                metrics.add({"algo/bonus_loss": loss})

    def _learn(self, inputs: tuple[Steps, Tensor]) -> Tensor:
        """One gradient step from steps of which some are valid; the loss."""
        steps, valid = inputs
        loss = (mean_weights(valid) * self.bonus.loss(steps)).sum()
        self.optimizer.minimize(loss, steps, valid)
        return loss.detach()

    def counters(self) -> dict[str, float]:
        found = self.schedules.at(self.progress.scheduled)
        return {**self.inner.counters(), **{f"algo/bonus_{name}": value for name, value in found.items()}}

    def state_dict(self) -> dict[str, Any]:
        return {
            "inner": self.inner.state_dict(),
            "networks": self.bonus.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "rng": self.rng.bit_generator.state,
            "deviation": self.deviation.state_dict(),
            "collected": [{"steps": leaves(steps), "valid": valid} for steps, valid in self.collected],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.inner.load_state_dict(state["inner"])
        self.bonus.load_state_dict(state["networks"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.rng.bit_generator.state = state["rng"]
        self.deviation.load_state_dict(state["deviation"])
        self.collected = []
        for each in state["collected"]:
            saved = iter(each["steps"])
            self.collected.append((self.bonus.example.map(lambda _, saved=saved: next(saved)), each["valid"]))


@chz.chz
class RNDConfig(CuriosityConfig):
    """Exploration by Random Network Distillation. Burda, Edwards, Storkey, Klimov, 2018. arXiv 1810.12894.

    The paper's networks see the last frame of a stack; these see the whole observation.
    """

    def make_bonus(self, observation_space: Space, action_space: Space) -> RND:
        return RND(observation_space, self)


class RND(Bonus):
    """|f^(s') - f(s')|², how far a predictor f^ is from a fixed random network f, of the next observation s'.

    f^ learns to imitate f on the observations that were seen (section 2.2); it has two layers more (appendix A.4).
    """

    def __init__(self, observation_space: Space, config: RNDConfig) -> None:
        super().__init__()
        self.norm, space = normalizer(observation_space, config.normalize_observation, config.clip)
        self.example = Steps((), (), zeros(observation_space))
        size = config.embedding
        target, predictor = encoder_of(space, config.hidden), encoder_of(space, config.hidden)
        self.target = nn.Sequential(target, orthogonal(nn.Linear(target.size, size))).requires_grad_(False)
        layers = _hidden(predictor.size, size, size)
        self.predictor = nn.Sequential(predictor, layers, orthogonal(nn.Linear(size, size)))

    def steps(self, samples: Samples) -> Steps:
        return Steps((), (), rows_of(samples.inputs[1:].observation))

    def novelty(self, steps: Steps) -> Tensor:
        return self._difference(steps).sum(-1)

    def loss(self, steps: Steps) -> Tensor:
        return self._difference(steps).mean(-1)

    def _difference(self, steps: Steps) -> Tensor:
        """Squares [n, embedding]."""
        observation = self.norm(steps.next_observation)
        with torch.no_grad():
            target = self.target(observation)
        return (self.predictor(observation) - target).square()


@chz.chz
class ICMConfig(CuriosityConfig):
    """ICM. Curiosity-driven Exploration by Self-supervised Prediction. Pathak et al., 2017. arXiv 1705.05363.

    Observations and bonus are normalised as in RND's paper, which ICM's does not do.
    """

    beta: float = below_one(0.2, "weight of the forward model's loss, of 1 with the inverse model's")
    model_hidden: int = count(256, "width of the hidden layer of both models")

    def make_bonus(self, observation_space: Space, action_space: Space) -> ICM:
        return ICM(observation_space, action_space, self)


class ICM(Bonus):
    """|φ^(s') - φ(s')|² / 2 (eq. 6): how wrong a forward model is in features φ that an inverse model learns.

    The inverse model tells the action from φ(s) and φ(s') (eq. 2), so φ has what actions change. The forward model
    predicts φ(s') from φ(s) and the action (eq. 4). Of Box actions the inverse model's error is the squared distance.
    """

    def __init__(self, observation_space: Space, action_space: Space, config: ICMConfig) -> None:
        super().__init__()
        self.norm, space = normalizer(observation_space, config.normalize_observation, config.clip)
        observation = zeros(observation_space)
        self.example, self.beta = Steps(observation, zeros(action_space), observation), config.beta
        size, width = config.embedding, config.model_hidden
        encoder, self.action = encoder_of(space, config.hidden), encoder_of(action_space, ())
        self.features = nn.Sequential(encoder, orthogonal(nn.Linear(encoder.size, size)))
        self.distribution = make_distribution(action_space)
        head = policy_head(self.distribution, width, log_std=0.0)
        for part in head.modules():
            if isinstance(part, GaussianHead):
                part.log_std.requires_grad_(False)
        self.inverse = nn.Sequential(_hidden(2 * size, width), head)
        last = orthogonal(nn.Linear(width, size))
        self.forward_model = nn.Sequential(_hidden(size + self.action.size, width), last)

    def steps(self, samples: Samples) -> Steps:
        after = samples.inputs[1:].observation
        return Steps(rows_of(samples.observation), rows_of(samples.action), rows_of(after))

    def novelty(self, steps: Steps) -> Tensor:
        return self._surprise(steps, *self._features(steps))

    def loss(self, steps: Steps) -> Tensor:
        """Eq. 7 without the policy: (1 - β) L_I + β L_F."""
        before, after = self._features(steps)
        inverse = -self.distribution.log_prob(self.inverse(torch.cat([before, after], -1)), steps.action)
        return (1 - self.beta) * inverse + self.beta * self._surprise(steps, before, after)

    def _features(self, steps: Steps) -> tuple[Tensor, Tensor]:
        """φ(s) and φ(s'), [n, embedding] each."""
        return self.features(self.norm(steps.observation)), self.features(self.norm(steps.next_observation))

    def _surprise(self, steps: Steps, before: Tensor, after: Tensor) -> Tensor:
        predicted = self.forward_model(torch.cat([before, self.action(steps.action)], -1))
        return 0.5 * (predicted - after).square().sum(-1)


def _hidden(*sizes: int) -> Network:
    """Layers with relu after each."""
    return Network(sizes, "relu", "relu", gain=math.sqrt(2))
