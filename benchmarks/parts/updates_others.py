"""The sides of Stable-Baselines3 and d3rlpy of benchmarks/updates.py."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import Any

import gymnasium
import numpy as np

from benchmarks.parts.turns import Unit
from benchmarks.parts.updates_ours import UPDATES, Case, random_observations


class Nowhere(gymnasium.Env):
    """An environment that has spaces only."""

    def __init__(self, case: Case) -> None:
        space = case.observation_space()
        self.observation_space = gymnasium.spaces.Box(space.low, space.high, dtype=space.dtype)  # type: ignore[arg-type]
        self.action_space = case.action_space()

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[np.ndarray, dict[str, Any]]:
        return np.zeros(self.observation_space.shape or (), self.observation_space.dtype), {}


def stable_baselines3(case: Case, stack: ExitStack) -> Unit:
    """Updates by `train`, as `learn` calls it, with replay full of random rows."""
    from stable_baselines3 import DQN, SAC, TD3

    cls = {"sac": SAC, "td3": TD3, "dqn": DQN}[case.algo]
    images = len(case.observation_shape) == 3
    model: Any = cls(
        "CnnPolicy" if images else "MlpPolicy",
        Nowhere(case),
        buffer_size=case.rows,
        batch_size=case.batch_size,
        policy_kwargs={} if images else {"net_arch": list(case.hidden)},
        device="cpu",
        seed=0,
    )
    model._setup_learn(total_timesteps=10**9)
    rng, buffer = np.random.default_rng(0), model.replay_buffer
    observations = random_observations(case, case.rows + 1)
    buffer.observations[:], buffer.next_observations[:] = observations[:-1], observations[1:]
    discrete = case.algo == "dqn"
    buffer.actions[:] = (
        rng.integers(0, case.n_actions, buffer.actions.shape) if discrete else rng.uniform(-1, 1, buffer.actions.shape)
    )
    buffer.rewards[:] = rng.standard_normal(buffer.rewards.shape, np.float32)
    buffer.full = True

    def unit() -> int:
        model.train(gradient_steps=UPDATES, batch_size=case.batch_size)
        return UPDATES

    return unit


def d3rlpy(case: Case, stack: ExitStack) -> Unit:
    """Updates by `update` of sampled batches, as `fit` makes them, of data of random rows; its log is left out."""
    import d3rlpy
    from d3rlpy.models import VectorEncoderFactory

    encoder = VectorEncoderFactory(list(case.hidden))
    networks: dict[str, Any] = {"actor_encoder_factory": encoder, "critic_encoder_factory": encoder}
    configs: dict[str, Any] = {
        "td3_bc": partial(d3rlpy.algos.TD3PlusBCConfig, **networks),
        "iql": partial(d3rlpy.algos.IQLConfig, value_encoder_factory=encoder, **networks),
        "cql": partial(d3rlpy.algos.CQLConfig, alpha_learning_rate=0.0, initial_alpha=1.0, **networks),
    }
    rng, n = np.random.default_rng(0), case.rows
    observations = random_observations(case, n)[:, 0]
    actions = rng.uniform(-1, 1, (n, case.n_actions)).astype(np.float32)
    rewards, ends = rng.standard_normal((n, 1), np.float32), np.zeros(n, np.float32)
    ends[-1] = 1
    data = d3rlpy.dataset.MDPDataset(observations, actions, rewards, ends)
    algo = configs[case.algo](batch_size=case.batch_size).create(device="cpu:0")
    algo.build_with_dataset(data)

    def unit() -> int:
        for _ in range(UPDATES):
            algo.update(data.sample_transition_batch(case.batch_size))
        return UPDATES

    return unit
