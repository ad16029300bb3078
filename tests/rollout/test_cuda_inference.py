"""CudaInference gives the same results as `agent.step`: on the CPU here, as a CUDA graph on a GPU."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rlframe.algos import dqn, ppo, sac, td3
from rlframe.core.seeding import Role, env_seeds
from rlframe.core.spaces import zeros
from rlframe.core.struct import map_tree, write
from rlframe.core.types import AgentInputs
from rlframe.envs import EnvConfig, make_envs
from rlframe.models import ModelConfig
from rlframe.rollout.inference import CudaInference
from rlframe.rollout.worker_pool import WorkerPool
from rlframe.samplers import GpuSampler, SerialSampler
from tests.samplers.made import agent_for, assert_equal, copied

OBSERVATION, ACTION = spaces.Box(-1, 1, (3,), np.float32), spaces.Box(-1, 1, (2,), np.float32)
CHOICE = spaces.Discrete(3)
MODELS: list[dict[str, Any]] = [{}, {"memory": "lstm", "feed_back": True}, {"normalize_observation": True}]


def rows(rng: np.random.Generator) -> AgentInputs:
    return AgentInputs(
        observation=rng.standard_normal((4, 3)).astype(np.float32),
        prev_action=rng.standard_normal((4, 2)).astype(np.float32),
        prev_reward=rng.standard_normal(4).astype(np.float32),
        first=rng.random(4) < 0.3,
    )


def check_steps(device: str, model: dict[str, Any], tolerance: float) -> CudaInference:
    """Several steps, with the parameters changed between, against the agent on the CPU."""
    agent, here = agent_for(OBSERVATION, ACTION, **model), agent_for(OBSERVATION, ACTION, **model)
    agent.to(device)
    rng = np.random.default_rng(0)
    state = here.initial_state(range(4))
    noise = torch.from_numpy(agent.noise(rng, (4,)))
    step = CudaInference(
        agent, rows(rng), map_tree(lambda x: x.to(device), agent.initial_state(range(4))), noise.numpy()
    )
    for _ in range(5):
        inputs, noise = rows(rng), torch.from_numpy(agent.noise(rng, (4,)))
        write(step.inputs, inputs)
        action, info = step(noise.numpy())
        expected = here.step(inputs.torch(), state, noise)
        state = expected.state
        np.testing.assert_allclose(action, expected.action.numpy(), atol=tolerance)
        np.testing.assert_allclose(info.log_prob, expected.info.log_prob.numpy(), atol=10 * tolerance)
        np.testing.assert_allclose(info.value, expected.info.value.numpy(), atol=tolerance)
        for each in (agent, here):
            each.observe(torch.from_numpy(inputs.observation).to(next(each.parameters()).device))
            for parameter in each.parameters():
                parameter.data += 0.01
    return step


@pytest.mark.parametrize("model", MODELS, ids=["plain", "lstm", "normalized"])
def test_without_a_graph_the_results_are_those_of_agent_step(model: dict[str, Any]) -> None:
    check_steps("cpu", model, 0.0)


class OnlyOn(TorchDispatchMode):
    """Refuses operations whose results are on another device: a CUDA graph cannot have them."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for x in tree_leaves(found):
            assert not isinstance(x, Tensor) or x.device.type == self.device, f"{func} makes a tensor on the CPU"
        return found


@pytest.mark.parametrize(
    ("make", "action"),
    [
        (ppo.Config(), ACTION),
        (ppo.Config(), CHOICE),
        (ppo.Config(explore="gsde"), ACTION),
        (dqn.Config(), CHOICE),
        (dqn.Config(explore="noisy", dueling=True), CHOICE),
        (dqn.Config(value="implicit"), CHOICE),
        (sac.Config(), ACTION),
        (sac.Config(), CHOICE),
        (sac.Config(explore="sample_hold"), ACTION),
        (td3.Config(), ACTION),
    ],
    ids=lambda each: type(each).__module__.rsplit(".", 1)[-1] if hasattr(each, "make_agent") else "",
)
def test_acting_makes_no_tensor_elsewhere(make: Any, action: Any) -> None:
    agent = make.make_agent(OBSERVATION, action, ModelConfig(hidden=(8,)), 0)
    drawn = map_tree(torch.from_numpy, agent.noise(np.random.default_rng(0), (4,)))
    inputs = rows(np.random.default_rng(0)).torch()
    inputs = replace(inputs, prev_action=torch.from_numpy(zeros(action, (4,))))
    there = [map_tree(lambda x: x.to("meta"), each) for each in (inputs, agent.initial_state(range(4)), drawn)]
    agent.to("meta")
    with OnlyOn("meta"):
        agent.step(*there)


@pytest.mark.gpu
@pytest.mark.parametrize("model", MODELS, ids=["plain", "lstm", "normalized"])
def test_with_a_graph_the_results_are_those_of_agent_step_with_new_parameters(model: dict[str, Any]) -> None:
    assert check_steps("cuda:0", model, 1e-4)._graph is not None


@pytest.mark.gpu
@pytest.mark.parametrize("n_groups", [1, 2])
def test_acting_on_a_gpu_for_workers_gives_the_serial_samples_of_that_gpu(n_groups: int) -> None:
    config, seeds = EnvConfig("CartPole-v1", {}, "python"), env_seeds(0, Role.ENV, 8)
    histories = []
    for parallel in (False, True):
        envs: Any = WorkerPool(config, 8, seeds, 2) if parallel else make_envs(config, 8, seeds)
        agent = agent_for(envs.observation_space, envs.action_space, memory="lstm").to("cuda:0")
        sampler: Any = GpuSampler(envs, agent, 16, n_groups=n_groups) if parallel else SerialSampler(envs, agent, 16)
        with closing(sampler):
            histories.append([copied(sampler.collect()) for _ in range(3)])
    for one, other in zip(*histories, strict=True):
        assert_equal(one.action, other.action)
        assert_equal(one.inputs.observation, other.inputs.observation)
