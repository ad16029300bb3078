"""ActorAgent: greedy without noise, random in the warm-up, the same in NumPy; and what it refuses."""

import dataclasses
import math
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import Space, spaces

from rlframe.agents import ActorAgent, Choice, Deterministic, SquashedGaussian, make_actor_agent
from rlframe.core.errors import ConfigError
from rlframe.core.struct import map_tree, zeros_like
from rlframe.core.types import AgentInputs
from rlframe.models import ModelConfig
from tests.models.test_numpy_inference import IMAGE, MIXED, VECTOR, inputs_for

BOX, NUMBER = spaces.Box(-2, 4, (3,), np.float32), spaces.Box(-1, 1, (), np.float32)
GRID, DISCRETE = spaces.Box(-1, 1, (2, 2), np.float32), spaces.Discrete(4)
KINDS: list[tuple[Any, Space]] = [
    *((policy, space) for policy in (Deterministic, SquashedGaussian) for space in (BOX, NUMBER, GRID)),
    (Choice, DISCRETE),
]
every_kind = pytest.mark.parametrize(("policy", "space"), KINDS, ids=lambda each: str(getattr(each, "__name__", each)))


def agent_for(
    policy: Any, action: Space, observation: Space = VECTOR, seed: int = 0, explore: str = "", **model: Any
) -> ActorAgent:
    config = ModelConfig(**{"hidden": (16,), "activation": "relu"} | model)
    return make_actor_agent(
        observation,
        action,
        policy(action),
        config,
        explore or ("gaussian" if policy is Deterministic else "stochastic"),
        seed,
    )


def set_levels(agent: ActorAgent, random: float, std: float) -> None:
    agent.set_random(bool(random))
    agent.exploration.set_level(std, std, 1)


def act(agent: ActorAgent, n: int, noise: Any, observation: Space = VECTOR) -> torch.Tensor:
    inputs = inputs_for(observation, agent.action_space, n)
    return agent.step(inputs.torch(), agent.initial_state(range(n)), map_tree(torch.from_numpy, noise)).action


@every_kind
def test_zero_noise_acts_greedily_whatever_the_levels(policy: Any, space: Space) -> None:
    agent = agent_for(policy, space)
    noise = zeros_like(agent.noise(np.random.default_rng(0), ()), (8,))
    greedy = act(agent, 8, noise)
    params = agent.model(torch.from_numpy(inputs_for(VECTOR, space, 8).observation)).detach()
    expected = params.argmax(-1) if policy is Choice else params[:, : greedy[0].numel()].tanh().reshape(greedy.shape)
    torch.testing.assert_close(greedy, expected)
    set_levels(agent, 1.0, 0.7)
    assert torch.equal(act(agent, 8, noise), greedy)


@pytest.mark.parametrize("policy", [Deterministic, SquashedGaussian])
def test_random_actions_are_uniform(policy: Any) -> None:
    agent = agent_for(policy, BOX)
    with torch.no_grad():
        agent.model.mlp.layers.flat[-1][:3] = 5.0  # the policy itself would always choose 1
    noise = agent.noise(np.random.default_rng(0), (4000,))
    set_levels(agent, 1.0, 0.1)
    action = act(agent, 4000, noise)
    found = np.histogram(action.numpy(), bins=5, range=(-1, 1))[0] / action.numel()
    np.testing.assert_allclose(found, 0.2, atol=0.015)
    set_levels(agent, 0.0, 0.1)
    assert act(agent, 4000, noise).mean() > 0.9


def test_random_choices_are_uniform() -> None:
    agent = agent_for(Choice, DISCRETE)
    with torch.no_grad():
        agent.model.mlp.layers.flat[-1][2] = 50.0
    noise = agent.noise(np.random.default_rng(0), (4000,))
    set_levels(agent, 1.0, 0.0)
    np.testing.assert_allclose(np.bincount(act(agent, 4000, noise)) / 4000, 0.25, atol=0.03)
    set_levels(agent, 0.0, 0.0)
    assert (act(agent, 4000, noise) == 2).all()


def test_exploration_is_the_standard_deviation_of_the_noise_and_actions_stay_within_bounds() -> None:
    agent = agent_for(Deterministic, BOX)
    noise = agent.noise(np.random.default_rng(0), (4000,))
    greedy = act(agent, 4000, zeros_like(noise, ()))
    set_levels(agent, 0.0, 0.1)
    moved = act(agent, 4000, noise) - greedy
    inside = greedy.abs() < 0.6
    assert moved[inside].std().item() == pytest.approx(0.1, rel=0.05)
    set_levels(agent, 0.0, 3.0)
    assert act(agent, 4000, noise).abs().max() == 1.0


def test_a_gaussian_policy_acts_with_its_own_standard_deviation() -> None:
    agent = agent_for(SquashedGaussian, NUMBER, log_std=-2.0)
    with torch.no_grad():
        agent.model.mlp.layers.flat[-2].zero_()
        agent.model.mlp.layers.flat[-1].copy_(torch.tensor([0.0, -2.0]))
    action = act(agent, 4000, agent.noise(np.random.default_rng(0), (4000,)))
    assert action.atanh().std().item() == pytest.approx(np.exp(-2), rel=0.05)


def behaviour(agent: ActorAgent, n: int, seed: int = 0) -> tuple[Any, Any, Any]:
    """Observations, actions and their log-probabilities."""
    inputs = inputs_for(agent.observation_space, agent.action_space, n)
    noise = map_tree(torch.from_numpy, agent.noise(np.random.default_rng(seed), (n,)))
    step = agent.step(inputs.torch(), agent.initial_state(range(n)), noise)
    return inputs.torch().observation, step.action, step.info.log_prob


def test_the_log_probability_of_behaviour_is_that_of_the_policy_or_of_random_actions() -> None:
    agent = agent_for(SquashedGaussian, BOX)
    observation, action, log_prob = behaviour(agent, 8)
    policy = agent.policy
    assert isinstance(policy, SquashedGaussian)
    torch.testing.assert_close(log_prob, policy.distribution.log_prob(agent.model(observation).detach(), action))
    agent.set_random(True)
    assert behaviour(agent, 8)[2].tolist() == pytest.approx([-BOX.shape[0] * math.log(2)] * 8)


def test_the_log_probability_of_a_choice_is_that_of_its_logits_or_of_uniform_ones() -> None:
    agent = agent_for(Choice, DISCRETE)
    observation, action, log_prob = behaviour(agent, 8)
    logits = agent.model(observation).detach()
    expected = logits.log_softmax(-1).gather(-1, action.clone().unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(log_prob, expected)
    agent.set_random(True)
    assert behaviour(agent, 8)[2].tolist() == pytest.approx([-math.log(DISCRETE.n)] * 8)


def test_behaviour_has_no_log_probability_where_noise_is_added_or_the_policy_is_deterministic() -> None:
    assert behaviour(agent_for(Deterministic, BOX), 4)[2] == ()
    agent = make_actor_agent(MIXED, BOX, SquashedGaussian(BOX), ModelConfig(hidden=(8,)), "gaussian")
    assert behaviour(agent, 4)[2].isnan().all()


@pytest.mark.parametrize(("log_std", "used"), [(-50.0, -20.0), (50.0, 2.0)])
def test_log_std_stays_within_its_range(log_std: float, used: float) -> None:
    policy = SquashedGaussian(NUMBER)
    noise, params = torch.ones(1, 1), torch.tensor([[0.1, log_std]], requires_grad=True)
    action, log_prob = policy.distribution.sample_with_log_prob(params, noise)
    expected, expected_log_prob = policy.distribution.sample_with_log_prob(torch.tensor([[0.1, used]]), noise)
    assert torch.equal(action, expected)
    assert torch.equal(log_prob, expected_log_prob)
    (gradient,) = torch.autograd.grad(action.sum() + log_prob.sum(), params)
    assert gradient[0, 0] != 0.0
    assert gradient[0, 1] == 0.0, "beyond the range nothing moves it"


def test_tanh_brings_the_log_std_into_its_range_and_moves_it_everywhere() -> None:
    """log σ = -10 + 12 (1 + tanh x) / 2, in learning, in acting and in NumPy."""
    policy = SquashedGaussian(NUMBER, ModelConfig(least_log_std=-10.0, log_std_bound="tanh"))
    noise, params = torch.ones(2, 1), torch.tensor([[0.1, 0.0], [0.1, 3.0]], requires_grad=True)
    action, log_prob = policy.distribution.sample_with_log_prob(params, noise)
    plain = torch.tensor([[0.1, -4.0], [0.1, -10 + 6 * (1 + math.tanh(3.0))]])
    expected = SquashedGaussian(NUMBER).distribution.sample_with_log_prob(plain, noise)
    torch.testing.assert_close((action, log_prob), expected)
    torch.testing.assert_close(policy.sample(params, noise, torch.zeros(2, 1), torch)[:, 0], action)
    found = policy.sample(params.detach().numpy(), noise.numpy(), np.zeros((2, 1)), np)
    np.testing.assert_allclose(found[:, 0], action.detach(), rtol=1e-6)
    (gradient,) = torch.autograd.grad(log_prob.sum(), params)
    assert (gradient[:, 1] != 0.0).all()


def test_the_bounds_of_the_log_std_are_for_the_policy_that_has_one() -> None:
    with pytest.raises(ConfigError, match=r"model.log_std_bound=tanh is for Gaussian policies"):
        agent_for(Deterministic, BOX, log_std_bound="tanh")
    with pytest.raises(ConfigError, match=r"model.log_std_bound=tanh does not fit algo.explore=gsde; use clip"):
        agent_for(SquashedGaussian, BOX, explore="gsde", log_std_bound="tanh")


@pytest.mark.parametrize("n", [1, 2, 3, 4, 8])
@every_kind
def test_acting_in_numpy_is_acting_in_torch(policy: Any, space: Space, n: int) -> None:
    check_numpy(agent_for(policy, space), VECTOR, n)


@pytest.mark.parametrize("activation", ["tanh", "elu", "silu"])
@pytest.mark.parametrize("normalize", [False, True])
def test_every_model_of_vectors_acts_in_numpy(activation: str, normalize: bool) -> None:
    agent = agent_for(SquashedGaussian, BOX, MIXED, activation=activation, normalize_observation=normalize)
    agent.observe(inputs_for(MIXED, BOX, 4).torch().observation)
    check_numpy(agent, MIXED, 4)


def test_held_samples_keep_their_noise_and_are_those_of_the_policy() -> None:
    """tanh(μ + σ ε) with ε of the row that drew it, for its k steps or to the end of the episode."""
    agent = agent_for(SquashedGaussian, BOX, explore="sample_hold")
    inputs, state = inputs_for(VECTOR, BOX, 2).torch(), agent.initial_state(range(2))
    noises, step = [agent.noise(np.random.default_rng(t), (2,)) for t in range(4)], agent.numpy_step(2)
    assert step is not None
    other = map_tree(np.array, map_tree(np.asarray, state))
    held = [[0, 0], [0, 0], [0, 2], [3, 2]]  # whose noise each environment has: the second begins an episode at t = 2
    for t, noise in enumerate(noises):
        noise.explore.duration[:] = 3
        row = dataclasses.replace(inputs, first=torch.tensor([t == 0, t in (0, 2)]))
        taken = agent.step(row, state, map_tree(torch.from_numpy, noise))
        params, drawn = agent.model(row.observation), [noises[s].explore.normal[i] for i, s in enumerate(held[t])]
        expected = agent.policy.distribution.sample(params, torch.from_numpy(np.stack(drawn)))
        torch.testing.assert_close(taken.action, expected)
        of_numpy = step(map_tree(np.asarray, row), other, noise)
        np.testing.assert_allclose(of_numpy.action, taken.action.detach(), atol=1e-6)
        assert torch.isnan(taken.info.log_prob).all(), "that of one step, and not of those that share a noise"
        state, other = taken.state, of_numpy.state


def check_numpy(agent: ActorAgent, observation: Space, n: int) -> None:
    inputs, step = inputs_for(observation, agent.action_space, n), agent.numpy_step(n)
    assert step is not None
    for random, exploration in ((0.0, 0.0), (0.0, 0.3), (1.0, 0.3)):  # which are seen though the step was made before
        set_levels(agent, random, exploration)
        noise = agent.noise(np.random.default_rng(1), (n,))
        expected = agent.step(inputs.torch(), (), map_tree(torch.from_numpy, noise)).action
        found = step(inputs, (), noise).action
        assert found.dtype == expected.numpy().dtype
        np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-6)


def test_parameters_changed_in_place_are_seen_in_numpy() -> None:
    agent, inputs = agent_for(Deterministic, BOX), inputs_for(VECTOR, BOX, 4)
    step, noise = agent.numpy_step(4), zeros_like(agent.noise(np.random.default_rng(0), ()), (4,))
    assert step is not None
    before = step(inputs, (), noise).action
    with torch.no_grad():
        agent.model.mlp.layers.flat[0].mul_(-1.0)
    assert not np.allclose(step(inputs, (), noise).action, before, atol=1e-3)


@every_kind
def test_an_agent_sent_to_a_worker_takes_its_parameters_and_levels_from_the_board(policy: Any, space: Space) -> None:
    agent = agent_for(policy, space)
    sent = pickle.loads(pickle.dumps(agent))
    adopted = {name: tensor.detach().numpy().copy() for name, tensor in agent.state_dict().items()}
    for name, tensor in {**dict(sent.named_parameters()), **dict(sent.named_buffers())}.items():
        tensor.data = torch.from_numpy(adopted[name])  # as samplers.acting does
    step = sent.numpy_step(4)
    assert step is not None
    for array in adopted.values():
        array[...] = 1.0  # so that actions are random, by the levels, which the board has
    inputs, noise = inputs_for(VECTOR, space, 4), agent.noise(np.random.default_rng(0), (4,))
    set_levels(agent, 1.0, 1.0)
    np.testing.assert_allclose(step(inputs, (), noise).action, act(agent, 4, noise), atol=1e-6)


def test_an_image_acts_as_in_torch() -> None:
    space = spaces.Dict({"image": IMAGE, "place": VECTOR})
    check_numpy(agent_for(SquashedGaussian, BOX, space), space, 1)


def test_several_images_act_in_torch() -> None:
    space = spaces.Dict({"image": IMAGE, "place": VECTOR})
    for observation in (IMAGE, space):
        agent = agent_for(SquashedGaussian, BOX, observation)
        assert agent.numpy_step(3) is None
        assert act(agent, 3, agent.noise(np.random.default_rng(0), (3,)), observation).shape == (3, 3)


def test_levels_are_saved_with_the_agent() -> None:
    agent, other = agent_for(Deterministic, BOX), agent_for(Deterministic, BOX, seed=1)
    set_levels(agent, 1.0, 0.25)
    other.load_state_dict(agent.state_dict())
    assert (other.random.item(), other.exploration.level[0].item()) == (1.0, 0.25)


def test_the_seed_decides_the_weights() -> None:
    one, same, other = (agent_for(Deterministic, BOX, seed=seed).model.mlp.layers.flat[0] for seed in (3, 3, 4))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


def test_acting_tracks_no_gradient_and_has_no_state() -> None:
    agent = agent_for(SquashedGaussian, BOX)
    inputs: AgentInputs = inputs_for(VECTOR, BOX, 2).torch()
    step = agent.step(inputs, (), agent.noise(np.random.default_rng(0), (2,)).torch())
    assert not step.action.requires_grad
    assert not agent.recurrent


UNBOUNDED = spaces.Box(-np.inf, np.inf, (2,), np.float32)


@pytest.mark.parametrize(
    ("policy", "space", "message"),
    [
        (SquashedGaussian, UNBOUNDED, r"has no finite bounds.*TransformAction.*algo=ppo"),
        (Deterministic, spaces.Box(-1, np.inf, (2,), np.float32), "has no finite bounds"),
        (Deterministic, DISCRETE, r"Discrete\(4\).*one Box.*algo=ppo"),
        (SquashedGaussian, spaces.Dict({"a": BOX}), r"Dict.*one Box.*algo=ppo"),
        (SquashedGaussian, spaces.MultiDiscrete([2, 2]), r"MultiDiscrete.*one Box"),
        (Choice, BOX, "Discrete"),
    ],
)
def test_actions_that_no_policy_serves_are_refused_with_the_remedy(policy: Any, space: Space, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        agent_for(policy, space)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"memory": "lstm"}, r"model.memory=none \(with memory: algo=ppo"),
        ({"action_embedding": 4}, "action_embedding=4 is for Q-values and logits.*set model.action_embedding=0$"),
        ({"feed_back": True, "shared": True}, "model.feed_back=false and model.shared=auto"),
        ({"distribution": "squashed_gaussian"}, "model.distribution=squashed_gaussian is for Gaussian policies"),
        ({"state_dependent_std": True}, "model.state_dependent_std=true is for Gaussian policies"),
        ({"log_std": -1.0}, "model.log_std=-1 is for Gaussian policies"),
    ],
)
def test_models_that_would_not_be_used_are_refused(model: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        agent_for(Deterministic, BOX, **model)


def test_a_policy_that_squashes_takes_no_other_distribution() -> None:
    agent_for(SquashedGaussian, BOX, distribution="squashed_gaussian", state_dependent_std=True)
    with pytest.raises(ConfigError, match=r"model.distribution=auto \(they always squash\)"):
        agent_for(SquashedGaussian, BOX, distribution="gaussian")


@pytest.mark.parametrize("in_numpy", [False, True])
def test_without_exploration_random_first_actions_are_uniform_and_later_ones_greedy(in_numpy: bool) -> None:
    n, agent = 4_000, agent_for(Choice, DISCRETE, explore="none")
    noise, state = agent.noise(np.random.default_rng(0), (n,)), agent.initial_state(range(n))
    inputs, step = inputs_for(VECTOR, DISCRETE, n), agent.numpy_step(n)
    greedy = act(agent, n, zeros_like(agent.noise(np.random.default_rng(0), ()), (n,)))
    for random in (True, False):
        agent.set_random(random)
        taken = torch.from_numpy(step(inputs, state, noise).action) if in_numpy and step else act(agent, n, noise)
        if random:
            np.testing.assert_allclose(np.bincount(taken, minlength=4) / n, 0.25, atol=0.03)
        else:
            np.testing.assert_array_equal(taken, greedy)
