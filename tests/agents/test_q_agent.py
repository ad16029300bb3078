"""QAgent explores at the rate of its environment, acts greedily without noise, and the same in NumPy as in torch."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from rlframe.agents import QAgent, make_q_agent
from rlframe.core.errors import ConfigError
from rlframe.core.struct import leaves, map_tree
from rlframe.critics import CategoricalValue, ExpectedValue, ImplicitValue, QuantileValue
from rlframe.exploration import EpsilonConfig, NoisyConfig
from rlframe.models import ModelConfig
from rlframe.models.network import Linear
from rlframe.models.q_network import NoisyLinear
from tests.models.test_numpy_inference import MIXED, VECTOR, inputs_for

ACTION = spaces.Discrete(3)
LADDER = EpsilonConfig(epsilon=0.5, epsilon_last=0.1)  # so that environments have epsilons of their own
KINDS = [ExpectedValue(), CategoricalValue(5, -1.0, 2.0), QuantileValue(4), ImplicitValue(3, 8)]


def agent_for(kind: Any = KINDS[0], dueling: bool = False, noisy: bool = False, **model: Any) -> QAgent:
    config = ModelConfig(**({"hidden": (16, 8), "memory_size": 4} | model))
    explore = NoisyConfig(epsilon_last=0.1) if noisy else LADDER
    return make_q_agent(VECTOR, ACTION, config, kind, explore, 0, dueling)


def act(agent: QAgent, n: int, noise: Any, epsilon: tuple[float, float, int] = (0.0, 0.0, 1)) -> np.ndarray:
    agent.exploration.set_level(*epsilon)
    inputs = inputs_for(VECTOR, ACTION, n).torch()
    return agent.step(inputs, agent.initial_state(range(n)), map_tree(torch.from_numpy, noise)).action.numpy()


def noise_for(agent: QAgent, n: int) -> Any:
    return agent.noise(np.random.default_rng(0), (n,))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: type(kind).__name__)
@pytest.mark.parametrize(("dueling", "noisy"), list(itertools.product([False, True], repeat=2)))
@pytest.mark.parametrize("memory", ["none", "lstm"])
def test_numpy_acts_as_torch(kind: Any, dueling: bool, noisy: bool, memory: str) -> None:
    agent = agent_for(kind, dueling, noisy, memory=memory, feed_back=True, normalize_observation=True)
    agent.exploration.set_level(0.5, 0.1, 8)
    agent.model.resample(torch.Generator().manual_seed(0))
    inputs, step = inputs_for(VECTOR, ACTION, 8), agent.numpy_step(8)
    agent.observe(torch.from_numpy(inputs.observation))
    assert step is not None
    state = agent.initial_state(range(8))
    for seed in range(2):
        noise = agent.noise(np.random.default_rng(seed), (8,))
        expected = agent.step(inputs.torch(), state, map_tree(torch.from_numpy, noise))
        found = step(inputs, state.numpy(), noise)
        for one, other in zip(leaves(found), leaves(expected), strict=True):
            np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-6)
        state = expected.state


def test_a_network_of_any_observation_acts() -> None:
    agent = make_q_agent(MIXED, ACTION, ModelConfig(), ExpectedValue(), "epsilon")
    step = agent.numpy_step(4)
    assert step is not None
    found = step(inputs_for(MIXED, ACTION, 4), agent.initial_state(range(4)).numpy(), noise_for(agent, 4))
    assert found.action.shape == (4,)


def test_zero_noise_acts_greedily_at_any_epsilon() -> None:
    agent = agent_for()
    nothing = map_tree(np.zeros_like, noise_for(agent, 4))
    greedy = act(agent, 4, nothing)
    values, _ = agent(inputs_for(VECTOR, ACTION, 4).torch(), ())
    np.testing.assert_array_equal(greedy, values.squeeze(-1).argmax(-1))
    np.testing.assert_array_equal(act(agent, 4, nothing, (1.0, 1.0, 4)), greedy)


def test_zero_noise_takes_noisy_layers_at_their_mean() -> None:
    agent = agent_for(noisy=True)
    inputs, state = inputs_for(VECTOR, ACTION, 4).torch(), agent.initial_state(range(4))
    nothing = map_tree(torch.zeros_like, map_tree(torch.from_numpy, noise_for(agent, 4)))
    before = agent.step(inputs, state, nothing).info.q.clone()  # type: ignore[attr-defined]
    agent.model.resample(torch.Generator().manual_seed(0))
    after = agent.step(inputs, state, nothing).info.q  # type: ignore[attr-defined]
    torch.testing.assert_close(before, after)
    noisy = agent.step(inputs, state, map_tree(torch.from_numpy, noise_for(agent, 4))).info.q  # type: ignore[attr-defined]
    assert not torch.allclose(noisy, after, atol=1e-3)


def test_epsilon_is_the_rate_of_random_actions() -> None:
    agent, n = agent_for(), 30_000
    noise = noise_for(agent, n)
    greedy = act(agent, n, map_tree(np.zeros_like, noise))
    explored = act(agent, n, noise, (0.3, 0.3, n)) != greedy
    assert abs(explored.mean() - 0.3 * 2 / 3) < 0.01  # a third of the random actions are the greedy ones


def test_the_ladder_is_spaced_logarithmically_over_environments() -> None:
    agent = agent_for()
    agent.exploration.set_level(0.4, 0.4**8, 8)  # Horgan et al. 2018: 0.4^(1 + 7 i / (N - 1))
    n = 8
    for env, expected in enumerate(0.4 ** (1 + np.arange(8))):
        for just, random in ((0.999, True), (1.001, False)):
            noise = noise_for(agent, n)
            noise.explore.uniform[:] = 1 - expected * just
            inputs = inputs_for(VECTOR, ACTION, n).torch()
            state = agent.initial_state(range(n))
            greedy = agent.step(inputs, state, map_tree(torch.zeros_like, map_tree(torch.from_numpy, noise))).action
            noise.explore.action[:] = (greedy.numpy() + 1) % 3
            action = agent.step(inputs, state, map_tree(torch.from_numpy, noise)).action
            assert bool(action[env] != greedy[env]) == random


def test_factorised_noise_is_the_product_of_its_factors() -> None:
    layer = NoisyLinear(3, 2)
    layer.resample(torch.Generator().manual_seed(0))
    x = torch.randn(5, 3)
    weight = layer.weight + layer.weight_sigma * torch.outer(layer.noise_out, layer.noise_in)
    bias = layer.bias + layer.bias_sigma * layer.noise_out
    torch.testing.assert_close(layer(x, 1.0), x @ weight.T + bias)
    torch.testing.assert_close(layer(x, 0.0), x @ layer.weight.T + layer.bias)


def test_a_dueling_head_subtracts_the_mean_advantage() -> None:
    agent = agent_for(dueling=True)
    inputs = inputs_for(VECTOR, ACTION, 4).torch()
    values, _ = agent(inputs, ())
    features, _ = agent.model.trunk(inputs.observation, inputs, ())  # type: ignore[operator, union-attr]
    torch.testing.assert_close(values.mean(-2), agent.model.value(features, 1.0))  # type: ignore[operator]


def test_an_implicit_network_gives_the_quantiles_at_the_fractions_asked_for_and_acts_at_midpoints() -> None:
    agent, inputs = agent_for(ImplicitValue(4, 8), dueling=True), inputs_for(VECTOR, ACTION, 2).torch()
    middle, _ = agent(inputs, ())
    assert middle.shape == (2, 3, 4)
    order = torch.tensor([[7, 5, 3, 1], [1, 1, 7, 7]]) / 8  # reversed; the ends twice
    asked, _ = agent(inputs, (), order)
    torch.testing.assert_close(asked[0], middle[0].flip(-1))
    torch.testing.assert_close(asked[1], middle[1][:, [0, 0, 3, 3]])


@pytest.mark.slow
def test_an_implicit_network_learns_the_quantiles_of_a_uniform_distribution() -> None:
    kind, generator = ImplicitValue(8, 16, huber_delta=0.1), torch.Generator().manual_seed(0)
    agent, inputs = agent_for(kind), inputs_for(VECTOR, ACTION, 64).torch()
    optimizer = torch.optim.Adam(agent.parameters(), 3e-3)
    for _ in range(400):
        tau, return_ = torch.rand(64, 8, generator=generator), 2 * torch.rand(64, generator=generator)
        theta = agent(inputs, (), tau)[0][:, 0]
        loss, _ = kind.at(tau).loss(theta, torch.zeros(64, 8), return_, torch.zeros(64))
        optimizer.zero_grad()
        loss.mean().backward()
        optimizer.step()
    asked = torch.tensor([0.1, 0.3, 0.5, 0.7, 0.9])
    with torch.no_grad():
        values = agent(inputs, (), asked.expand(64, 5))[0][:, 0]
    torch.testing.assert_close(values.mean(0), 2 * asked, rtol=0, atol=0.15)
    torch.testing.assert_close(kind.q(values).mean(), torch.tensor(1.0), rtol=0, atol=0.1)


def test_dueling_and_plain_heads_are_equally_deep() -> None:
    plain, dueling = agent_for(), agent_for(dueling=True)
    assert len([m for m in plain.modules() if isinstance(m, Linear)]) == 3
    assert len([m for m in dueling.modules() if isinstance(m, Linear)]) == 1 + 2 + 2


def test_q_values_of_a_distribution_by_hand() -> None:
    values = torch.log(torch.tensor([[[0.25, 0.25, 0.5], [1.0, 1e-9, 1e-9]]]))
    torch.testing.assert_close(CategoricalValue(3, 0.0, 2.0).q(values), torch.tensor([[1.25, 0.0]]))
    torch.testing.assert_close(QuantileValue(3).q(torch.tensor([[[1.0, 2.0, 6.0]]])), torch.tensor([[3.0]]))


@pytest.mark.parametrize(
    ("space", "others"), [(spaces.Box(-1, 1, (2,)), "sac, td3 or ppo"), (spaces.MultiDiscrete([2, 2]), "ppo or a2c")]
)
def test_actions_that_are_not_discrete_are_refused_and_other_algorithms_named(space: Any, others: str) -> None:
    with pytest.raises(ConfigError, match=rf"Discrete actions.*; use {others}$"):
        make_q_agent(VECTOR, space, ModelConfig(), ExpectedValue(), "epsilon")


@pytest.mark.parametrize(
    ("settings", "given"),
    [
        ({"shared": True}, "shared=true"),
        ({"log_std": -1.0}, "log_std=-1"),
        ({"distribution": "beta"}, "distribution=beta"),
        ({"state_dependent_std": True}, "state_dependent_std=true"),
    ],
)
def test_settings_of_policies_are_refused(settings: dict[str, Any], given: str) -> None:
    with pytest.raises(ConfigError, match=f"model.{given} is for policies"):
        make_q_agent(
            spaces.Box(-1, 1, (2,), np.float32), spaces.Discrete(2), ModelConfig(**settings), ExpectedValue(), "epsilon"
        )
