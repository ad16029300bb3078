"""Agents and samplers on debug environments, for the tests of samplers, agents and algorithms."""

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from gymnasium import Space, spaces

from rlframe.agents import PolicyAgent, make_policy_agent
from rlframe.core.seeding import Role, env_seeds
from rlframe.core.struct import Tree, leaves
from rlframe.core.types import Samples
from rlframe.envs import EnvConfig, debug_envs, make_envs
from rlframe.models import ModelConfig
from rlframe.rollout.inference import rows_keep_their_bits
from rlframe.rollout.worker_pool import WorkerPool
from rlframe.samplers import CpuSampler, GpuSampler, SerialSampler
from rlframe.system.service import Supervision

Make = Callable[..., Any]


def agent_for(observation_space: Space, action_space: Space, seed: int = 0, **model: Any) -> PolicyAgent:
    """An agent with weights from `seed`."""
    return make_policy_agent(observation_space, action_space, ModelConfig(**({"hidden": (16,)} | model)), seed)


def sampler_for(
    env: Make | str = debug_envs.memory,
    T: int = 8,
    B: int = 3,
    seed: int = 0,
    decorrelation_steps: int = 0,
    **kwargs: Any,
) -> tuple[SerialSampler, PolicyAgent]:
    """A sampler and its agent; kwargs that start with `model_` are for the model, the others for the environment."""
    model = {key.removeprefix("model_"): kwargs.pop(key) for key in list(kwargs) if key.startswith("model_")}
    envs = make_envs(EnvConfig(env, kwargs, "python"), B, env_seeds(seed, Role.ENV, B))
    agent = agent_for(envs.observation_space, envs.action_space, seed, **model)
    return SerialSampler(envs, agent, T, seed, decorrelation_steps), agent


B, T = 5, 7  # of `split`


def split(
    how: str,
    env: Make | str,
    kwargs: dict[str, Any] | None = None,
    seed: int = 0,
    backend: str = "python",
    method: str = "forkserver",
    noise: Any = None,
    **model: Any,
) -> Any:
    """A sampler and its agent; `how` is serial, or a kind and a number of workers; `noise` replaces the agent's."""
    config, seeds = EnvConfig(env, kwargs or {}, backend), env_seeds(seed, Role.ENV, B)
    envs: Any
    if how == "serial":
        envs = make_envs(config, B, seeds)
    else:
        envs = WorkerPool(config, B, seeds, int(how[-1]), (), Supervision(timeout_s=30, start_method=method))
    agent = agent_for(envs.observation_space, envs.action_space, seed, **model)
    if noise:
        agent.noise = noise
    if how == "serial":
        return SerialSampler(envs, agent, T, seed, decorrelation_steps=3), agent
    if how.startswith("cpu"):
        return CpuSampler(envs, agent, T, seed, decorrelation_steps=3), agent
    return GpuSampler(envs, agent, T, seed, 3, 2 if how.startswith("alternating") else 1), agent


def assert_batches_equal(one: list[Any], other: list[Any]) -> None:
    """Assert that two lists of samples and episodes are equal, and that there are ends of episodes inside."""
    assert any(trajectories for _, trajectories in one)
    for (samples, trajectories), (others, other_trajectories) in zip(one, other, strict=True):
        assert_equal(samples, others)
        assert trajectories == other_trajectories


def copied(samples: Samples) -> Samples:
    """A copy, which the next `collect` does not overwrite."""
    return samples.map(torch.clone)


def assert_equal(one: Tree, other: Tree) -> None:
    """Assert that two trees have equal arrays, bit for bit."""
    pairs = list(zip(leaves(one), leaves(other), strict=True))
    assert pairs
    for a, b in pairs:
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def differ(one: Tree, other: Tree) -> bool:
    """Whether any array of two trees differs."""
    return any(not torch.equal(a, b) for a, b in zip(leaves(one), leaves(other), strict=True))


@cache
def keeps_bits(kind: str = "lstm") -> bool:
    """Whether this processor gives a row the same bits among any number of rows; kinds: lstm, transformer, images."""
    space = spaces.Box(0, 255, (4, 84, 84), np.uint8) if kind == "images" else spaces.Box(-1, 1, (17,), np.float32)
    model, choice = {"memory": "none" if kind == "images" else kind}, spaces.Discrete(6)
    agents = [agent_for(space, choice, hidden=hidden, **model) for hidden in ((64, 64), (400, 300))]
    return all(rows_keep_their_bits(agent, space, choice, 64) for agent in agents)
