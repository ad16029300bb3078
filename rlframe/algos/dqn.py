"""Human-level control through deep reinforcement learning. Mnih et al., 2015. Nature 518, 529-533.

With the options that Rainbow (Hessel et al. 2018, arXiv 1710.02298) combines, each on its own: double (van Hasselt et
al. 2016), dueling (Wang et al. 2016), prioritized (Schaul et al. 2016), n_step, noisy (Fortunato et al. 2018), and the
value as a categorical distribution (C51, Bellemare et al. 2017) or as quantiles (QR-DQN, Dabney et al. 2018).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import chz
import torch
from gymnasium import Space
from torch import Tensor

from rlframe.agents import QAgent, QRun, make_q_agent
from rlframe.agents.exploration import EpsilonSchedule
from rlframe.algos.base import Algorithm, Progress, UpdateMetrics
from rlframe.algos.cuda_graph import graphed
from rlframe.algos.optimizer_step import Updater
from rlframe.algos.prefetch import Beside
from rlframe.algos.replay_ratio import UpdateDebt, priorities
from rlframe.algos.targets import check_feedforward, copy_into
from rlframe.core.config import choice, count, fraction, option
from rlframe.core.errors import ConfigError
from rlframe.core.schedule import Linear, annealed
from rlframe.core.seeding import Role, seed_int
from rlframe.core.types import BatchSpec, Samples
from rlframe.models import ModelConfig
from rlframe.models.encoders import has_images
from rlframe.models.q_network import Categorical, Expected, Quantile, QValue, of_actions
from rlframe.ops.q_learning import QLoss
from rlframe.replay import NStep, ReplayConfig, Transitions, make_replay


@chz.chz
class Config:
    """Defaults are those of the paper's Atari runs, with Adam for RMSProp; the presets have tuned ones."""

    learning_rate: float = option(1e-4, "Adam; the paper: RMSProp, 2.5e-4")
    learning_rate_schedule: str = choice("constant", ("linear", "constant"), "over runner.n_steps")
    adam_epsilon: float = option(1.5e-4, "of Adam, as in Rainbow")
    max_grad_norm: float = option(10.0, "global norm at which gradients are clipped; inf: never")
    discount: float = fraction(0.99, "gamma, per env step")
    batch_size: int = count(32, "rows an update")
    replay: ReplayConfig
    replay_ratio: float = option(8.0, "rows learned from for each row sampled: batch_size / env_steps an update")
    learn_from: int = count(50_000, "env_steps before the first update")
    target_interval: int = count(10_000, "updates between copies to the target network")
    epsilon_initial: float = fraction(1.0, "probability of a random action, at first")
    epsilon_final: float = fraction(0.1, "and after epsilon_fraction of the run")
    epsilon_last: float = fraction(0.0, "the same of the last environment, others spaced logarithmically; 0: as all")
    epsilon_fraction: float = fraction(0.02, "of runner.n_steps, over which epsilon goes down linearly")
    n_step: int = count(1, "rewards a return sums before it bootstraps")
    double: bool = option(False, "the online network chooses the next action, the target network values it")
    dueling: bool = option(False, "a stream for the state's value and one for the advantages")
    noisy: bool = option(False, "noisy layers in the head explore; epsilon may then be 0")
    value: str = choice("expected", ("expected", "categorical", "quantile"), "what is learned of the return")
    n_atoms: int = count(51, "atoms of categorical, or quantiles")
    v_min: float = option(-10.0, "least return that categorical knows")
    v_max: float = option(10.0, "largest return that categorical knows")
    prioritized: bool = option(False, "replay chooses by TD error")
    alpha: float = fraction(0.5, "exponent of the priorities")
    beta_initial: float = fraction(0.4, "exponent of the importance weights, linearly to 1 over runner.n_steps")

    def kind(self) -> QValue:
        """What the network's head says."""
        match self.value:
            case "categorical":
                return Categorical(self.n_atoms, self.v_min, self.v_max)
            case "quantile":
                return Quantile(self.n_atoms)
        return Expected()

    def make_agent(self, observation_space: Space, action_space: Space, model: ModelConfig, seed: int) -> QAgent:
        check_feedforward(model, "dqn", "r2d1")
        return make_q_agent(observation_space, action_space, model, self.kind(), seed, self.dueling, self.noisy)

    def make_algorithm(self, agent: QAgent, batch_spec: BatchSpec, n_steps: int, seed: int) -> DQN:
        return DQN(agent, batch_spec, n_steps, self, seed)


@dataclass(frozen=True)
class Begun:
    """An update whose batch is drawn, and whose loss is being computed."""

    batch: Transitions
    loss: Callable[[], tuple[QRun, QLoss]]  # waits for it
    put_back: tuple[Callable[[], object], ...]  # each undoes a part of what was drawn


class DQN(Algorithm):
    """Q-learning from replay, towards a target network that is copied every `target_interval` updates."""

    def __init__(self, agent: QAgent, batch_spec: BatchSpec, n_steps: int, config: Config, seed: int = 0) -> None:
        self.agent, self.config, c = agent, config, config
        if c.target_interval < 1:
            raise ConfigError(f"algo.target_interval={c.target_interval} must be at least 1")
        self.progress = Progress()
        self.debt = UpdateDebt(c.replay_ratio, c.batch_size, c.learn_from)
        n_annealed, n_envs = c.epsilon_fraction * n_steps, batch_spec.B
        self.epsilon = EpsilonSchedule(c.epsilon_initial, c.epsilon_final, c.epsilon_last, n_annealed, n_envs)
        self.epsilon.apply(agent, 0)
        self.beta = Linear(c.beta_initial, 1.0, n_steps)
        rate = annealed(c.learning_rate_schedule, c.learning_rate, n_steps)
        parameters = agent.model.parameters()
        self.updater = Updater(parameters, "adam", rate, c.max_grad_norm, self.progress, c.adam_epsilon)
        self.target = copy.deepcopy(agent.model).requires_grad_(False)
        self.generator = torch.Generator().manual_seed(seed_int(seed, Role.ALGO))  # of noisy layers
        device = agent.epsilon.device
        self.learn = graphed(self._learn, device, [self.updater])
        # While one environment steps, a second core idles, and images give it enough to do. The networks stay as they
        # are meanwhile, so the next update's loss may be computed then; only the newest rows are not in its batch.
        may_begin = device.type == "cpu" and n_envs == 1 and has_images(agent.observation_space)
        self.beside = Beside() if may_begin else None
        self.begun: Begun | None = None
        self.replay = make_replay(
            c.replay,
            agent.observation_space,
            agent.action_space,
            batch_spec,
            NStep(c.discount, c.n_step),
            alpha=c.alpha if c.prioritized else 0.0,
            previous=agent.model.uses_previous,
            device=device,
            seed=seed,
        )

    def receive(self, samples: Samples) -> None:
        self.progress.count(samples)
        self.replay.append(samples)
        if self.begun:
            self.begun.loss()  # by the observations' statistics of before
        self.agent.observe(samples.observation)
        self.debt.receive(self.progress.scheduled, self.progress.env_steps)
        self.epsilon.apply(self.agent, self.progress.env_steps)

    def prepare(self) -> None:
        if not (self.beside and torch.get_num_threads() > 1 and self.progress.updates and self.replay.n_choices):
            return
        self._put_back()
        put_back = self.replay.mark(), partial(self.generator.set_state, self.generator.get_state())
        batch = self._draw(self.progress.env_steps)
        self.begun = Begun(batch, self.beside.start(self._loss, batch).result, put_back)

    def _draw(self, scheduled: int) -> Transitions:
        """The batch of an update, and noise for both networks."""
        beta = self.beta(scheduled) if self.config.prioritized else 0.0
        self.target.resample(self.generator)
        self.agent.model.resample(self.generator)
        return self.replay.sample(self.config.batch_size, beta)

    def _put_back(self) -> None:
        """Forget what `prepare` has begun: a resumed run does not know of it."""
        if self.begun:
            self.begun.loss()  # so that nothing looks at the networks any more
            for undo in self.begun.put_back:
                undo()
            self.begun = None

    def updates_due(self) -> int:
        due = self.debt.due(self.replay.n_choices)
        if not due:
            self._put_back()
        return due

    def update(self) -> UpdateMetrics:
        begun, self.begun = self.begun, None
        batch = begun.batch if begun else self._draw(self.progress.scheduled)
        loss, q, grad_norm, error = self._descend(batch, *begun.loss()) if begun else self.learn(batch)
        self.progress.updates += 1
        if self.config.prioritized:
            self.replay.update_priorities(batch.index, priorities(error))
        if self.progress.updates % self.config.target_interval == 0:
            copy_into(self.target, self.agent.model)
        self.debt.pay()
        return {
            "loss": loss,
            "q": q,
            "grad_norm": grad_norm,
            "epsilon": self.epsilon.first(self.progress.env_steps),
            "learning_rate": self.updater.rate,
        }

    def _learn(self, batch: Transitions) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self._descend(batch, *self._loss(batch))

    def _loss(self, batch: Transitions) -> tuple[QRun, QLoss]:
        """The values of the rows' actions, and their loss."""
        kind = self.agent.kind
        next_values = self.target.values(batch.next_inputs)
        chooser = self.agent.model.values(batch.next_inputs) if self.config.double else next_values
        target = of_actions(next_values, kind.q(chooser).argmax(-1))
        run = self.agent.run(batch.inputs, batch.action)
        return run, kind.loss(run.values, target, batch.return_, batch.bootstrap)

    def _descend(self, batch: Transitions, run: QRun, found: QLoss) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Descend the weighted mean of the loss; returns the mean loss, Q and gradient norm [], and the error [n]."""
        loss, error, gradient = found
        run.back((batch.weight / len(loss)).unsqueeze(-1) * gradient)
        mean_loss = loss.mean()
        grad_norm = self.updater.follow(mean_loss, batch)
        return mean_loss, self.agent.kind.q(run.values).mean(), grad_norm, error

    def facts(self) -> dict[str, str]:
        return {"replay": self.replay.size}

    def counters(self) -> dict[str, float]:
        return {**self.debt.counters(self.progress), "replay/rows": self.replay.n_rows}

    def state_dict(self) -> dict[str, Any]:
        self._put_back()
        return {
            "progress": self.progress.state_dict(),
            "updater": self.updater.state_dict(),
            "target": self.target.state_dict(),
            "debt": self.debt.state_dict(),
            "generator": self.generator.get_state(),
            "replay": self.replay.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.progress.load_state_dict(state["progress"])
        self.updater.load_state_dict(state["updater"])
        self.target.load_state_dict(state["target"])
        self.debt.load_state_dict(state["debt"])
        self.generator.set_state(state["generator"])
        self.replay.load_state_dict(state["replay"])
