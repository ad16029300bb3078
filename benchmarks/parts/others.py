"""Sampling by other packages: Stable-Baselines3, and the worker processes of Gymnasium and Stable-Baselines3."""

from __future__ import annotations

from contextlib import ExitStack, closing
from functools import partial

import gymnasium
import numpy as np
import torch
from gymnasium.vector import AsyncVectorEnv

from benchmarks.parts.bare import Policy
from benchmarks.parts.turns import Unit

CARTPOLE = partial(gymnasium.make, "CartPole-v1")


def collect_rollouts(n: int, T: int, stack: ExitStack) -> Unit:
    """Stable-Baselines3's collect_rollouts, as its `learn` calls it."""
    from stable_baselines3 import PPO
    from stable_baselines3.common.vec_env import DummyVecEnv

    env = stack.enter_context(closing(DummyVecEnv([CARTPOLE] * n)))
    model = PPO("MlpPolicy", env, n_steps=T, seed=0, device="cpu")
    _, callback = model._setup_learn(total_timesteps=10**9)

    def unit() -> int:
        model.collect_rollouts(env, callback, model.rollout_buffer, n_rollout_steps=T)
        return n * T

    return unit


def async_vector_env(policy: Policy, n: int, T: int, stack: ExitStack) -> Unit:
    """Gymnasium's worker processes, one for each environment; this process acts. Steps that reset do not count."""
    env = stack.enter_context(closing(AsyncVectorEnv([CARTPOLE] * n)))
    network, noise = policy.network(), policy.noise(T, n)
    observation, _ = env.reset(seed=0)
    ended = np.zeros(n, bool)

    def unit() -> int:
        nonlocal observation, ended
        n_resets = 0
        for t in range(T):
            action, _, _ = policy.act(network, torch.from_numpy(observation), noise[t])
            n_resets += int(ended.sum())
            observation, _, terminated, truncated, _ = env.step(action.numpy())
            ended = terminated | truncated
        return n * T - n_resets

    return unit


def subproc_vec_env(policy: Policy, n: int, T: int, stack: ExitStack) -> Unit:
    """Stable-Baselines3's worker processes, one for each environment; this process acts."""
    from stable_baselines3.common.vec_env import SubprocVecEnv

    env = stack.enter_context(closing(SubprocVecEnv([CARTPOLE] * n)))
    network, noise = policy.network(), policy.noise(T, n)
    observation = np.asarray(env.reset())

    def unit() -> int:
        nonlocal observation
        for t in range(T):
            action, _, _ = policy.act(network, torch.from_numpy(observation), noise[t])
            observation = np.asarray(env.step(action.numpy())[0])
        return n * T

    return unit
