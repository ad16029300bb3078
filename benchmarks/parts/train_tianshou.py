"""Tianshou's side of `benchmarks.compare`: its collector and updates, on environments in one process."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import gymnasium
import numpy as np
import torch
from tianshou.algorithm import DQN, PPO, SAC, TD3
from tianshou.algorithm.modelfree.ddpg import ContinuousDeterministicPolicy
from tianshou.algorithm.modelfree.dqn import DiscreteQLearningPolicy
from tianshou.algorithm.modelfree.reinforce import ProbabilisticActorPolicy
from tianshou.algorithm.modelfree.sac import AutoAlpha, SACPolicy
from tianshou.algorithm.optim import AdamOptimizerFactory, LRSchedulerFactoryLinear
from tianshou.data import Collector, VectorReplayBuffer
from tianshou.env import DummyVectorEnv
from tianshou.env.atari.atari_network import DQNet, ScaledObsInputActionReprNet
from tianshou.exploration import GaussianNoise
from tianshou.utils.net.common import Net
from tianshou.utils.net.continuous import ContinuousActorDeterministic, ContinuousActorProbabilistic, ContinuousCritic
from tianshou.utils.net.discrete import DiscreteActor, DiscreteCritic
from tianshou.utils.torch_utils import policy_within_training_step
from torch import nn

from benchmarks.parts import rows
from benchmarks.parts.gate import Gate
from benchmarks.parts.rows import PONG, OffPolicy, Row

ENDLESS = 10**9  # env steps


def environments(row: Row, n: int) -> DummyVectorEnv:
    """Python environments in one process."""
    if row.env != PONG:
        return DummyVectorEnv([partial(gymnasium.make, row.env)] * n)
    from benchmarks.parts.python_atari import python_atari

    return DummyVectorEnv([partial(python_atari, row.env)] * n)


def train(row: Row, gate: Gate) -> None:
    """Collect and update; calls the gate before each iteration.

    Tianshou's trainer does the same, but also searches all of replay for NaN at every step (version 2.0.1).
    """
    work = row.work
    envs = environments(row, work.n_envs if isinstance(work, rows.PPO) else 1)
    if isinstance(work, rows.PPO):
        _on_policy(work, row, envs, gate)
    else:
        _off_policy(work, row, envs, gate)


def _on_policy(work: rows.PPO, row: Row, envs: DummyVectorEnv, gate: Gate) -> None:
    algorithm, size, steps = _ppo(work, row, envs), work.n_envs * work.T, 0
    buffer = VectorReplayBuffer(size, work.n_envs)
    collector = Collector(algorithm, envs, buffer)
    collector.reset()
    with policy_within_training_step(algorithm.policy):
        while True:
            gate(steps)
            steps += int(collector.collect(n_step=size).n_collected_steps)
            algorithm.update(buffer=buffer, batch_size=work.minibatch(), repeat=work.epochs)
            collector.reset_buffer(keep_statistics=True)


def _off_policy(work: OffPolicy, row: Row, envs: DummyVectorEnv, gate: Gate) -> None:
    algorithm: Any = {"sac": _sac, "td3": _td3, "dqn": _dqn}[work.algo](work, row, envs)
    frames = {"stack_num": 4, "save_only_last_obs": True, "ignore_obs_next": True} if row.env == PONG else {}
    buffer = VectorReplayBuffer(work.replay_rows, 1, **frames)
    collector = Collector(algorithm, envs, buffer, exploration_noise=True)
    collector.reset()
    steps = int(collector.collect(n_step=work.learning_starts, random=True).n_collected_steps)
    with policy_within_training_step(algorithm.policy):
        while True:
            gate(steps)
            steps += int(collector.collect(n_step=work.every).n_collected_steps)
            algorithm.update(buffer=buffer, sample_size=work.batch_size)


def _spaces(envs: DummyVectorEnv) -> tuple[Any, Any]:
    return envs.observation_space[0], envs.action_space[0]


def _images() -> DQNet:
    """The Nature CNN with its layer of 512."""
    return DQNet(4, 84, 84, 0, features_only=True, output_dim_added_layer=512)


def _ppo(work: rows.PPO, row: Row, envs: DummyVectorEnv) -> PPO:
    observation, action = _spaces(envs)
    make: Callable[[], Any] = partial(Net, state_shape=observation.shape, hidden_sizes=work.hidden, activation=nn.Tanh)
    body: Any = ScaledObsInputActionReprNet(_images()) if row.env == PONG else make()
    actor = DiscreteActor(preprocess_net=body, action_shape=action.n, softmax_output=False)
    critic = DiscreteCritic(preprocess_net=body if row.env == PONG else make())
    for layer in [*actor.modules(), *critic.modules()]:
        if isinstance(layer, nn.Linear | nn.Conv2d):
            nn.init.orthogonal_(layer.weight, 2**0.5)
            nn.init.zeros_(layer.bias)
    policy = ProbabilisticActorPolicy(
        actor=actor,
        dist_fn=lambda logits: torch.distributions.Categorical(logits=logits),
        action_space=action,
        action_scaling=False,
        action_bound_method=None,
    )
    schedule = LRSchedulerFactoryLinear(1, ENDLESS, work.n_envs * work.T)
    return PPO(
        policy=policy,
        critic=critic,
        optim=AdamOptimizerFactory(lr=work.learning_rate).with_lr_scheduler_factory(schedule),
        gamma=work.discount,
        gae_lambda=work.gae_lambda,
        eps_clip=work.clip,
        ent_coef=work.entropy_coef,
        vf_coef=work.value_coef,
        max_grad_norm=work.max_grad_norm,
    )


def _critics(work: OffPolicy, observation: Any, action: Any) -> dict[str, Any]:
    def make() -> ContinuousCritic:
        body = Net(state_shape=observation.shape, action_shape=action.shape, hidden_sizes=work.hidden, concat=True)
        return ContinuousCritic(preprocess_net=body)

    optim = AdamOptimizerFactory(lr=work.learning_rate)
    return {"critic": make(), "critic_optim": optim, "critic2": make(), "critic2_optim": optim, "policy_optim": optim}


def _sac(work: OffPolicy, row: Row, envs: DummyVectorEnv) -> SAC:
    observation, action = _spaces(envs)
    body = Net(state_shape=observation.shape, hidden_sizes=work.hidden)
    actor = ContinuousActorProbabilistic(
        preprocess_net=body, action_shape=action.shape, unbounded=True, conditioned_sigma=True
    )
    alpha = AutoAlpha(-float(np.prod(action.shape)), 0.0, AdamOptimizerFactory(lr=work.learning_rate))
    return SAC(
        policy=SACPolicy(actor=actor, action_space=action),
        tau=work.tau,
        gamma=work.discount,
        alpha=alpha,
        **_critics(work, observation, action),
    )


def _td3(work: OffPolicy, row: Row, envs: DummyVectorEnv) -> TD3:
    observation, action = _spaces(envs)
    body = Net(state_shape=observation.shape, hidden_sizes=work.hidden)
    actor = ContinuousActorDeterministic(preprocess_net=body, action_shape=action.shape)
    policy = ContinuousDeterministicPolicy(
        actor=actor, exploration_noise=GaussianNoise(sigma=work.noise), action_space=action
    )
    return TD3(policy=policy, tau=work.tau, gamma=work.discount, **_critics(work, observation, action))


def _dqn(work: OffPolicy, row: Row, envs: DummyVectorEnv) -> DQN:
    observation, action = _spaces(envs)
    model: Any = (
        ScaledObsInputActionReprNet(DQNet(4, 84, 84, action.n))
        if row.env == PONG
        else Net(state_shape=observation.shape, action_shape=action.n, hidden_sizes=work.hidden)
    )
    policy = DiscreteQLearningPolicy(model=model, action_space=action, eps_training=work.epsilon)
    return DQN(
        policy=policy,
        optim=AdamOptimizerFactory(lr=work.learning_rate),
        gamma=work.discount,
        target_update_freq=work.target_every // work.every,
        is_double=False,
    )
