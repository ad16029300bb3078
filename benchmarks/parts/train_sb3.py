"""Stable-Baselines3's side of `benchmarks.compare`, and SBX's, which has the same interface: their `learn`."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.env_util import make_atari_env, make_vec_env
from stable_baselines3.common.noise import NormalActionNoise
from stable_baselines3.common.vec_env import DummyVecEnv, VecEnv, VecFrameStack

from benchmarks.parts.gate import Gate
from benchmarks.parts.python_atari import UNPROCESSED
from benchmarks.parts.rows import PONG, PPO, OffPolicy, Row

ENDLESS = 10**9  # env steps


class Passing(BaseCallback):
    """Callback that calls the gate before every rollout, after the updates of the last one."""

    def __init__(self, gate: Gate) -> None:
        super().__init__()
        self.gate = gate

    def _on_rollout_start(self) -> None:
        self.gate(self.num_timesteps)

    def _on_step(self) -> bool:
        return True


def environments(row: Row, n: int) -> VecEnv:
    """Python environments in one process, as its users make them."""
    if row.env != PONG:
        return make_vec_env(row.env, n, seed=0, vec_env_cls=DummyVecEnv)
    return VecFrameStack(make_atari_env(row.env, n, seed=0, env_kwargs=UNPROCESSED), 4)


def train(package: str, row: Row, gate: Gate) -> None:
    """package: stable_baselines3 | sbx."""
    work = row.work
    name = "PPO" if isinstance(work, PPO) else work.algo.upper()
    cls = getattr(importlib.import_module(package), name)
    settings = _ppo(work) if isinstance(work, PPO) else _off_policy(work)
    if row.env != PONG:
        settings["policy_kwargs"] = {"net_arch": list(work.hidden)}
    env = environments(row, work.n_envs if isinstance(work, PPO) else 1)
    model = cls("CnnPolicy" if row.env == PONG else "MlpPolicy", env, device="cpu", seed=0, **settings)
    if isinstance(work, OffPolicy) and work.algo == "dqn" and package == "stable_baselines3":
        model.max_grad_norm = work.max_grad_norm
    gate.facts = "JAX, on all of its cores" if package == "sbx" else ""
    model.learn(ENDLESS, callback=Passing(gate))


def _ppo(work: PPO) -> dict[str, Any]:
    def rate(left: float) -> float:
        return left * work.learning_rate

    return {
        "learning_rate": rate,
        "n_steps": work.T,
        "batch_size": work.minibatch(),
        "n_epochs": work.epochs,
        "gamma": work.discount,
        "gae_lambda": work.gae_lambda,
        "clip_range": work.clip,
        "ent_coef": work.entropy_coef,
        "vf_coef": work.value_coef,
        "max_grad_norm": work.max_grad_norm,
    }


def _off_policy(work: OffPolicy) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "learning_rate": work.learning_rate,
        "buffer_size": work.replay_rows,
        "learning_starts": work.learning_starts,
        "batch_size": work.batch_size,
        "gamma": work.discount,
        "train_freq": work.every,
        "gradient_steps": 1,
    }
    if work.algo == "dqn":
        return settings | {
            "target_update_interval": work.target_every,
            "exploration_initial_eps": work.epsilon,
            "exploration_final_eps": work.epsilon,
        }
    settings["tau"] = work.tau
    return settings | (
        {"action_noise": NormalActionNoise(np.zeros(6), np.full(6, work.noise))} if work.algo == "td3" else {}
    )
