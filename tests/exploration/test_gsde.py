"""State-dependent exploration: what it adds to actions, how long a matrix is kept, and the probabilities it acts by."""

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from rlframe.agents import (
    ActorAgent,
    Choice,
    Deterministic,
    PolicyAgent,
    SquashedGaussian,
    make_actor_agent,
    make_policy_agent,
)
from rlframe.core.errors import ConfigError
from rlframe.core.struct import leaves, map_tree, write, zeros_like
from rlframe.core.types import AgentInputs
from rlframe.exploration import GsdeConfig
from rlframe.models import ModelConfig
from rlframe.rollout.inference import CudaInference
from tests.models.test_numpy_inference import VECTOR, inputs_for

BOX, F = spaces.Box(-2, 4, (2,), np.float32), 16
MODEL = ModelConfig(hidden=(8, F), activation="relu")


def actor(policy: Any = SquashedGaussian, model: ModelConfig = MODEL, **explore: Any) -> ActorAgent:
    given = {"sigma": 0.1} if policy is Deterministic else {"log_std": -2.0}
    return make_actor_agent(VECTOR, BOX, policy(BOX), model, GsdeConfig(**given | explore))


def policy_agent(squash: bool = False, **model: Any) -> PolicyAgent:
    config = ModelConfig(hidden=(8, F), distribution="squashed_gaussian" if squash else "gaussian", **model)
    return make_policy_agent(VECTOR, BOX, config, 0, GsdeConfig(log_std=-1.0))


def rows(n: int, first: bool) -> AgentInputs:
    inputs = inputs_for(VECTOR, BOX, n)
    return AgentInputs(inputs.observation, inputs.prev_action, inputs.prev_reward, np.full(n, first))


def drawn(agent: Any, n: int, seed: int = 0) -> Any:
    return map_tree(torch.from_numpy, agent.noise(np.random.default_rng(seed), (n,)))


def matrices(state: Any) -> torch.Tensor:
    return state.own[0] if hasattr(state, "own") else state.explore.own[0]


def test_an_action_is_the_squashed_mean_plus_features_times_the_matrix() -> None:
    agent, inputs, n = actor(), rows(4, True).torch(), 4
    noise = drawn(agent, n)
    action = agent.step(inputs, agent.initial_state(range(n)), noise).action
    with torch.no_grad():
        params, phi = agent.model.with_features(inputs.observation)
        sigma = agent.model.head.log_std.exp()
        added = torch.einsum("nf,fd,nfd->nd", phi, sigma, noise.explore.matrix)
    torch.testing.assert_close(action, (params[:, :2] + added).tanh())
    assert added.abs().max() > 0.01


def test_td3_adds_features_times_the_matrix_to_its_action_by_the_level() -> None:
    agent, inputs, n = actor(Deterministic), rows(4, True).torch(), 4
    agent.exploration.set_level(0.05, 0.05, 4)
    noise = drawn(agent, n)
    action = agent.step(inputs, agent.initial_state(range(n)), noise).action
    with torch.no_grad():
        params, phi = agent.model.with_features(inputs.observation)
        expected = params.tanh() + 0.05 * torch.einsum("nf,nfd->nd", phi, noise.explore.matrix)
    torch.testing.assert_close(action, expected.clip(-1, 1))


def test_a_ladder_gives_each_environment_its_own_sigma() -> None:
    agent = actor(Deterministic, sigma=0.1, sigma_last=0.001)
    agent.exploration.set_level(0.1, 0.001, 3)
    inputs, noise = rows(3, True).torch(), drawn(agent, 3)
    noise.explore.matrix[1:] = noise.explore.matrix[0]
    inputs.observation[1:] = inputs.observation[0] = inputs.observation[0] / 10
    moved = agent.step(inputs, agent.initial_state(range(3)), noise).action - agent.model(inputs.observation).tanh()
    torch.testing.assert_close(moved[0], 10 * moved[1], rtol=1e-3, atol=1e-6)
    torch.testing.assert_close(moved[1], 10 * moved[2], rtol=1e-2, atol=1e-6)


@pytest.mark.parametrize(
    ("interval", "fresh"), [(1, [0, 1, 2, 3, 4, 5, 6]), (3, [0, 3, 4]), (0, [0, 4]), (2, [0, 2, 4, 6])]
)
def test_a_matrix_is_kept_for_the_interval_and_drawn_anew_with_an_episode(interval: int, fresh: list[int]) -> None:
    agent = actor(interval=interval)
    state, found = agent.initial_state([0]), []
    for t in range(7):
        before = matrices(state)
        state = agent.step(rows(1, t in (0, 4)).torch(), state, drawn(agent, 1, seed=t)).state
        if not torch.equal(matrices(state), before):
            assert torch.equal(matrices(state), drawn(agent, 1, seed=t).explore.matrix)
            found.append(t)
    assert found == fresh


@pytest.mark.parametrize("policy", [SquashedGaussian, Deterministic])
def test_zero_noise_acts_greedily(policy: Any) -> None:
    agent, inputs = actor(policy), rows(4, True)
    agent.exploration.set_level(0.5, 0.5, 4)
    noise = map_tree(torch.from_numpy, zeros_like(agent.noise(np.random.default_rng(0), ()), (4,)))
    state = agent.step(inputs.torch(), agent.initial_state(range(4)), drawn(agent, 4)).state
    inputs.first[:] = False  # a matrix is kept
    action = agent.step(inputs.torch(), state, noise).action
    torch.testing.assert_close(action, agent.policy.mode(agent.model(inputs.torch().observation)).detach())


@pytest.mark.parametrize("n", [1, 3, 4, 8])
@pytest.mark.parametrize("kind", ["sac", "td3", "ppo", "squashed", "lstm", "shared"])
def test_acting_in_numpy_is_acting_in_torch(kind: str, n: int) -> None:
    agent: Any = {
        "sac": actor,
        "td3": lambda: actor(Deterministic),
        "ppo": policy_agent,
        "squashed": lambda: policy_agent(squash=True),
        "lstm": lambda: policy_agent(memory="lstm"),
        "shared": lambda: policy_agent(shared=True),
    }[kind]()
    agent.exploration.set_level(0.1, 0.1, n)
    step = agent.numpy_step(n)
    assert step is not None
    state = agent.initial_state(range(n))
    state_np = map_tree(lambda x: x.numpy(), state)
    for t in range(4):
        inputs, noise = rows(n, t == 0), agent.noise(np.random.default_rng(t), (n,))
        expected = agent.step(inputs.torch(), state, map_tree(torch.from_numpy, noise))
        found = step(inputs, state_np, noise)
        for one, other in zip(leaves(found), leaves(expected), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
            assert one.dtype == other.numpy().dtype
        state, state_np = expected.state, found.state


@pytest.mark.parametrize("make", [actor, policy_agent])
def test_acting_in_fixed_memory_as_on_a_gpu_is_acting_step_by_step(make: Any) -> None:
    agent = make()
    state = agent.initial_state(range(4))
    step = CudaInference(agent, rows(4, True), agent.initial_state(range(4)), drawn(agent, 4))
    for t in range(10):
        inputs, noise = rows(4, t in (0, 3)), drawn(agent, 4, seed=t)
        write(step.inputs, inputs)
        expected = agent.step(inputs.torch(), state, noise)
        np.testing.assert_allclose(step(noise)[0], expected.action, rtol=1e-5, atol=1e-6)
        state = expected.state


@pytest.mark.parametrize("squash", [False, True])
def test_a_policy_acts_with_the_log_probability_that_its_loss_computes(squash: bool) -> None:
    agent, inputs = policy_agent(squash), rows(8, True).torch()
    state = agent.initial_state(range(8))
    step = agent.step(inputs, state, drawn(agent, 8))
    log_prob, _, value = agent.evaluate(inputs, agent.memory(8), step.action)
    torch.testing.assert_close(step.info.log_prob, log_prob, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(step.info.value, value)


def test_actions_over_many_matrices_have_the_distribution_of_the_loss() -> None:
    agent, n = policy_agent(), 4000
    inputs = rows(1, True).torch().map(lambda x: x.expand(n, *x.shape[1:]))
    action = agent.step(inputs, agent.initial_state(range(n)), drawn(agent, n)).action
    mean, log_std = agent(inputs[:1], agent.memory(1))[0].detach().chunk(2, -1)
    torch.testing.assert_close(action.mean(0, keepdim=True), mean, rtol=0, atol=4 * float(log_std.exp().max()) / n**0.5)
    torch.testing.assert_close(action.std(0, keepdim=True), log_std.exp(), rtol=0.05, atol=0)


def test_a_policy_without_memory_is_not_recurrent() -> None:
    assert not policy_agent().recurrent
    assert not actor().recurrent
    assert policy_agent(memory="gru").recurrent


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: actor(sigma=0.1), r"algo.explore.sigma=0.1 is for td3.*algo.explore.log_std"),
        (lambda: actor(sigma_last=0.1), r"algo.explore.sigma_last=0.1 is for td3"),
        (lambda: actor(Deterministic, log_std=-1.0), r"algo.explore.log_std=-1: td3 learns no σ.*algo.explore.sigma"),
        (lambda: actor(model=ModelConfig(log_std=-1.0)), r"model.log_std=-1 has no meaning.*algo.explore.log_std"),
        (lambda: policy_agent(log_std=-1.0), r"model.log_std=-1 has no meaning"),
        (lambda: GsdeConfig(log_std=2.5), r"algo.explore.log_std=2.5 must be from -20 to 2"),
        (lambda: GsdeConfig(sigma=101), r"algo.explore.sigma=101 must be from 0 to 100"),
        (lambda: GsdeConfig(interval=-1), r"algo.explore.interval=-1 must be at least 0"),
        (
            lambda: make_actor_agent(
                VECTOR, spaces.Discrete(3), Choice(spaces.Discrete(3)), ModelConfig(), GsdeConfig(log_std=-2.0)
            ),
            r"algo.explore=gsde is for one Box of actions, not Discrete\(3\)",
        ),
        (
            lambda: make_policy_agent(VECTOR, spaces.Dict({"a": BOX, "b": BOX}), ModelConfig(), 0, "gsde"),
            r"algo.explore=gsde is for one Box of actions, not Dict",
        ),
        (
            lambda: make_policy_agent(VECTOR, BOX, ModelConfig(distribution="beta"), 0, "gsde"),
            r"algo.explore=gsde is for Gaussian policies, not model.distribution=beta",
        ),
    ],
)
def test_what_has_no_meaning_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


@pytest.mark.parametrize("log_std", [-20.0, 2.0])
def test_the_extremes_of_log_std_act_and_learn_with_finite_numbers(log_std: float) -> None:
    agent = make_policy_agent(VECTOR, BOX, ModelConfig(hidden=(8,)), 0, GsdeConfig(log_std=log_std))
    inputs = rows(8, True).torch()
    step = agent.step(inputs, agent.initial_state(range(8)), drawn(agent, 8))
    log_prob, entropy, _ = agent.evaluate(inputs, (), step.action)
    (log_prob + entropy).sum().backward()
    for x in (step.action, log_prob, *(p.grad for p in agent.parameters() if p.grad is not None)):
        assert x.isfinite().all()
