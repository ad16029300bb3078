"""What an algorithm sets in its agent, parameters and exploration, reaches workers before they first act."""

from typing import Any

import numpy as np
import pytest
import torch

from rlframe.algos import dqn, pqn, r2d1, sac, td3
from rlframe.core.seeding import Role, env_seeds
from rlframe.envs import EnvConfig, make_envs
from rlframe.exploration import EpsilonConfig
from rlframe.models import ModelConfig
from rlframe.replay import InMemory
from rlframe.rollout.worker_pool import WorkerPool
from rlframe.runners import Learner, MinibatchRl, RunnerConfig
from rlframe.samplers import CpuSampler, SerialSampler
from tests.variants import variants

COMMON: dict[str, Any] = {"replay": InMemory(size=1_000), "learning_starts": 32}
LADDER: dict[str, Any] = {
    **COMMON,
    "explore": EpsilonConfig(epsilon="linear(0.5,0.4,0.02)", epsilon_last="linear(0.5,0.01,0.02)"),
}
MEMORY: dict[str, Any] = {"memory": "lstm", "memory_size": 8}
CASES: dict[str, Any] = {
    "dqn": (dqn, "CartPole-v1", {**LADDER, "n_step": 3, "prioritized": True}, {}),
    "r2d1": (r2d1, "CartPole-v1", {**LADDER, "batch_size": 4, "burn_in": 2, "learn_T": 6, "replay_ratio": 4.0}, MEMORY),
    "pqn": (pqn, "CartPole-v1", {"explore": LADDER["explore"], "minibatches": 5, "epochs": 1}, MEMORY),
    "td3": (td3, "Pendulum-v1", {**COMMON, "batch_size": 16, "replay_ratio": 4.0}, {}),
    "sac": (sac, "Pendulum-v1", {**COMMON, "batch_size": 16, "replay_ratio": 4.0}, {}),
}


def trained(case: str, n_workers: int) -> Any:
    module, env, settings, model = CASES[case]
    config, seeds = EnvConfig(env, backend="python"), env_seeds(0, Role.ENV, 5)
    envs: Any = WorkerPool(config, 5, seeds, n_workers, ()) if n_workers else make_envs(config, 5, seeds)
    algo_config = module.Config(**settings)
    agent = algo_config.make_agent(envs.observation_space, envs.action_space, ModelConfig(hidden=(16,), **model), 0)
    sampler = (CpuSampler if n_workers else SerialSampler)(envs, agent, 4)
    algo = algo_config.make_algorithm(agent, sampler.batch_spec, 200, 0)
    with MinibatchRl(sampler, Learner(agent, algo), RunnerConfig(n_steps=200, log_interval_steps=200)) as runner:
        row = runner.train()
    assert row["updates"] > 10
    return agent


@pytest.mark.same_bits
@pytest.mark.parametrize("case", variants(CASES, ("dqn", "r2d1", "sac")))  # pqn explores as dqn, td3 as sac
def test_two_workers_learn_what_one_process_learns(case: str) -> None:
    one, other = trained(case, 0), trained(case, 2)
    for name, tensor in one.state_dict().items():
        np.testing.assert_array_equal(tensor.numpy(), other.state_dict()[name].numpy(), err_msg=name)
    assert any(bool(torch.any(p != 0)) for p in one.parameters())
