"""Parameter noise: the perturbed policy acts, the learned one stays clean, and the scale adapts to a distance."""

import copy
import itertools
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from gymnasium import spaces

import rlframe
from rlframe.agents import ActorAgent, Deterministic, make_actor_agent
from rlframe.core.errors import ConfigError
from rlframe.core.struct import map_tree
from rlframe.exploration import ParameterNoiseConfig
from rlframe.models import ModelConfig
from tests.models.test_numpy_inference import VECTOR, inputs_for

BOX = spaces.Box(-2, 4, (2,), np.float32)


def agent_for(n: int = 4, std: Any = 0.2, seed: int = 0, **explore: Any) -> ActorAgent:
    config = ModelConfig(hidden=(8, 8), activation="relu", normalize_observation=True)
    agent = make_actor_agent(VECTOR, BOX, Deterministic(BOX), config, ParameterNoiseConfig(std=std, **explore), seed)
    agent.exploration.set_level(std, explore.get("std_last", std), n)
    return agent


def act(agent: ActorAgent, n: int = 4, active: bool = True) -> torch.Tensor:
    noise = map_tree(torch.from_numpy, agent.noise(np.random.default_rng(0), (n,)))
    noise = noise if active else noise.map(torch.zeros_like)
    inputs = inputs_for(VECTOR, BOX, n).torch()
    return agent.step(inputs, agent.initial_state(range(n)), noise).action


def batch(n: int = 64, absent: int = 0) -> Any:
    """n rows of one agent, and behind them rows where it was absent."""
    rows = torch.from_numpy(inputs_for(VECTOR, BOX, n).observation)
    observation = torch.cat([rows, torch.full((absent, *rows.shape[1:]), 9.0)]).unsqueeze(1)
    return Mock(observation=observation, valid=(torch.arange(n + absent) < n).unsqueeze(1))


def test_the_policy_acts_with_noise_in_all_its_parameters() -> None:
    agent = agent_for(sigma=0.3)
    perturbed = copy.deepcopy(agent)
    with torch.no_grad():
        noises = agent.exploration.perturbation.buffers()
        for parameter, noise in zip(perturbed.model.mlp.layers.flat, noises, strict=True):
            parameter += 0.3 * noise
    torch.testing.assert_close(act(agent), act(perturbed, active=False), rtol=1e-4, atol=1e-5)
    assert (act(agent) - act(agent, active=False)).abs().max() > 0.05


def test_zero_noise_acts_greedily() -> None:
    agent = agent_for()
    expected = agent.policy.mode(agent.model(inputs_for(VECTOR, BOX, 4).torch().observation)).detach()
    torch.testing.assert_close(act(agent, active=False), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("std", [0.0, 1e-30])
def test_a_distance_of_zero_is_no_noise(std: float) -> None:
    agent = agent_for(std=std)
    torch.testing.assert_close(act(agent), act(agent, active=False), rtol=0, atol=1e-6)


@pytest.mark.parametrize("last", [0.0, 0.01])
@pytest.mark.parametrize("n", [1, 3, 8])
def test_acting_in_numpy_is_acting_in_torch(n: int, last: float) -> None:
    agent = agent_for(n, std_last=last)
    step, inputs = agent.numpy_step(n), inputs_for(VECTOR, BOX, n)
    assert step is not None
    agent.exploration.sigma.fill_(0.3)  # which is seen though the step was made before
    noise, state = agent.noise(np.random.default_rng(0), (n,)), agent.initial_state(range(n))
    found = step(inputs, map_tree(lambda x: x.numpy(), state), noise).action
    np.testing.assert_allclose(found, act(agent, n), rtol=2e-5, atol=2e-6)


def test_a_ladder_scales_the_noise_by_the_levels() -> None:
    agent = agent_for(3, std=0.1, std_last=0.001)
    noise, state = torch.ones(3), agent.initial_state(range(3))
    scales = agent.exploration.scales(noise, state, agent.exploration.level, agent.exploration.sigma, torch)
    torch.testing.assert_close(scales.flatten(), 0.05 * torch.tensor([1.0, 0.1, 0.01]), rtol=1e-3, atol=0)


@pytest.mark.parametrize(("first", "last", "shares"), [(0.0, 0.4, [0, 1]), (0.1, 0.4, [0.25, 1]), (0.0, 1e-9, [0, 0])])
def test_the_highest_level_of_a_ladder_has_the_whole_noise(first: float, last: float, shares: list[float]) -> None:
    agent = agent_for(2, std=first, std_last=last)
    part = agent.exploration
    scales = part.scales(torch.ones(2), agent.initial_state(range(2)), part.level, part.sigma, torch)
    torch.testing.assert_close(
        scales.flatten() / part.sigma, torch.tensor(shares, dtype=torch.float32), atol=2e-3, rtol=1e-5
    )


@pytest.mark.parametrize(("sigma", "absent"), [(1e-3, 0), (0.05, 0), (1.0, 0), (0.05, 200)])
def test_the_scale_comes_to_where_actions_differ_by_the_target(sigma: float, absent: int) -> None:
    agent, rows = agent_for(std=0.2, sigma=sigma, interval=10**6), batch(absent=absent)
    for t in range(700):
        agent.exploration.follow(agent.model, rows, t, t + 1)
    with torch.no_grad():
        moved = act(agent, 64) - act(agent, 64, active=False)
    assert moved.square().mean().sqrt().item() == pytest.approx(0.2, rel=0.03)


@pytest.mark.parametrize(("std", "bound"), [(0.0, 1e-6), (2.0, 100.0)])
def test_the_scale_stays_finite_whatever_the_target(std: float, bound: float) -> None:
    agent, rows = agent_for(std=std, interval=10**6, adaptation=2.0), batch()
    for t in range(50):
        agent.exploration.follow(agent.model, rows, t, t + 1)
    assert agent.exploration.sigma.item() == pytest.approx(bound)
    assert act(agent).isfinite().all()


def test_an_adaptation_of_one_keeps_the_scale() -> None:
    agent = agent_for(adaptation=1.0)
    agent.exploration.follow(agent.model, batch(), 0, 1)
    assert agent.exploration.sigma.item() == pytest.approx(0.05)


def test_a_perturbation_lasts_for_its_interval_and_follows_from_seed_and_time() -> None:
    def drawn(agent: ActorAgent) -> torch.Tensor:
        return torch.cat([noise.flatten() for noise in agent.exploration.perturbation.buffers()])

    agent, other, rows = agent_for(interval=4), agent_for(interval=4), batch()
    seen = [drawn(agent)]
    for t in range(0, 12, 2):
        agent.exploration.follow(agent.model, rows, t, t + 2)
        seen.append(drawn(agent))
    changed = [not torch.equal(a, b) for a, b in itertools.pairwise(seen)]
    assert changed == [False, True, False, True, False, True]
    other.exploration.follow(other.model, rows, 7, 8)
    assert torch.equal(drawn(other), seen[4]), "an agent that was resumed, or another rank, draws the same"
    assert not torch.equal(drawn(agent_for(interval=4, seed=1)), seen[0])


def test_everything_is_saved_with_the_agent() -> None:
    agent, other = agent_for(), agent_for(seed=1)
    agent.exploration.follow(agent.model, batch(), 0, 400)
    other.load_state_dict(agent.state_dict())
    assert torch.equal(act(agent), act(other))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"std": 2.1}, "algo.explore.std=2.1 must be from 0 to 2"),
        ({"sigma": 0.0}, "algo.explore.sigma=0.0 must be from 1e-06 to 100"),
        ({"sigma": 1e3}, "algo.explore.sigma=1000.0 must be from 1e-06 to 100"),
        ({"interval": 0}, "algo.explore.interval=0 must be at least 1"),
        ({"adaptation": 0.9}, "algo.explore.adaptation=0.9 must be from 1 to 10"),
    ],
)
def test_numbers_out_of_range_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ParameterNoiseConfig(**given)


def test_agents_that_share_an_environment_count_its_time_steps_once() -> None:
    words = {"env": "rlframe.envs.debug_agents:TwoStepGame", "env_kwargs.action": "box", "sampler": "serial"}
    words |= {"explore": "parameter_noise", "sampler.batch_T": 4, "sampler.batch_B": 2, "n_steps": 2_000}
    with rlframe.build("ddpg", **words) as run:
        algo = run.runner.learners.first.algo
        algo.agent.exploration.follow = Mock()
        for _ in range(3):
            ((_, samples),) = run.runner.learners.batches(run.runner.sampler.collect())
            algo.receive(samples)
        times = [call.args[2:] for call in algo.agent.exploration.follow.call_args_list]
        assert times[0][0] == 0
        assert times[-1][1] == algo.progress.env_steps // 2, "of each environment"
