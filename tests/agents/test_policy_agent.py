"""What an agent answers when acting is what training computes again from the stored rows."""

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import Space, spaces

from rlframe.agents import PolicyAgent
from rlframe.agents.base import NoiseBuffer
from rlframe.algos import ppo
from rlframe.algos.on_policy import values
from rlframe.core.errors import ConfigError
from rlframe.core.struct import leaves, map_tree
from rlframe.core.types import AgentInputs
from rlframe.distributions import make_distribution
from rlframe.envs import EnvConfig, debug_envs, make_envs
from rlframe.models import ModelConfig, PolicyModel
from rlframe.rollout.inference import empty_batch
from rlframe.samplers import SerialSampler
from tests.envs.resumable import Pictures
from tests.samplers.made import agent_for, sampler_for

MODELS: list[dict[str, Any]] = [
    {},
    {"model_feed_back": True, "model_shared": True},
    {"model_memory": "lstm", "model_feed_back": True},
    {"model_memory": "gru", "model_shared": True, "model_normalize_observation": True},
    {"model_memory": "transformer", "model_memory_window": 4, "model_memory_layers": 2},
    {"model_norm": "layer", "model_state_dependent_std": True},
]


@pytest.mark.parametrize(
    ("env", "model"),
    [
        *itertools.product([debug_envs.memory, "Pendulum-v1"], MODELS),
        (Pictures, {"model_shared": False, "model_memory": "lstm"}),
    ],
    ids=lambda each: "-".join(each) or "plain" if isinstance(each, dict) else getattr(each, "__name__", each),
)
def test_training_sees_what_acting_saw(env: Any, model: dict[str, Any]) -> None:
    sampler, agent = sampler_for(env, T=7, B=3, **model)
    for _ in range(3):  # episodes of 5 steps and one more row begin at all places of the batches
        samples = sampler.collect()
        with torch.no_grad():
            params, value, final_state = agent(samples.inputs[:-1], samples.state)
        log_prob = agent.distribution.log_prob(params, samples.action)
        torch.testing.assert_close(log_prob, samples.info.log_prob, rtol=1e-4, atol=1e-5)  # type: ignore[attr-defined]
        torch.testing.assert_close(value, samples.info.value, rtol=1e-4, atol=1e-5)  # type: ignore[attr-defined]
        torch.testing.assert_close(final_state, samples.final_state, rtol=1e-4, atol=1e-5)
        agent.observe(samples.inputs.observation)  # only now may the statistics move


def test_a_squashed_policy_that_saturates_is_trained_on_the_log_prob_it_acted_with() -> None:
    squashed = {"model_distribution": "squashed_gaussian", "model_log_std": 1.5}
    sampler, agent = sampler_for(debug_envs.identity, action="box", T=20, B=4, **squashed)
    samples = sampler.collect()
    assert (samples.action.abs() > 0.999_99).any(), "nothing saturates"
    with torch.no_grad():
        params, _, _ = agent(samples.inputs[:-1], samples.state)
        ratio = (agent.distribution.log_prob(params, samples.action) - samples.info.log_prob).exp()  # type: ignore[attr-defined]
    torch.testing.assert_close(ratio, torch.ones(20, 4), rtol=0, atol=1e-4)


def test_the_bootstrap_is_the_value_the_next_batch_begins_with() -> None:
    sampler, agent = sampler_for(T=7, model_memory="lstm", model_feed_back=True)
    bootstrap = values(agent, sampler.collect())[-1].clone()
    after = sampler.collect().info.value[0]  # type: ignore[attr-defined]
    torch.testing.assert_close(bootstrap, after, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("action", ["discrete", "box", "dict"])
def test_without_exploration_a_policy_takes_its_mode_and_records_its_log_prob(action: str) -> None:
    envs = make_envs(EnvConfig(debug_envs.identity, {"action": action}, "python"), 3, [0, 1, 2])
    agent = ppo.Config(explore="none").make_agent(envs.observation_space, envs.action_space, ModelConfig(hidden=(8,)))
    samples = SerialSampler(envs, agent, 4).collect()
    params, zeros = agent(samples.inputs[:-1], ())[0], agent.noise(np.random.default_rng(0), (4, 3))
    assert not any(x.any() for x in leaves(zeros))
    mode = agent.distribution.sample(params, map_tree(torch.from_numpy, zeros))
    for taken, expected in zip(leaves(samples.action), leaves(mode), strict=True):
        torch.testing.assert_close(taken, expected)
    expected = agent.distribution.log_prob(params, samples.action)
    torch.testing.assert_close(samples.info.log_prob, expected.detach())  # type: ignore[attr-defined]
    envs.close()


def test_acting_tracks_no_gradient() -> None:
    sampler, agent = sampler_for(T=2)
    step = agent.step(sampler.collect().inputs[0], agent.initial_state(range(3)), torch.zeros(3, 2))
    assert not any(leaf.requires_grad for leaf in leaves(step))


def test_noise_of_an_environment_does_not_depend_on_its_company() -> None:
    agent = agent_for(spaces.Box(-1, 1, (3,)), debug_envs.identity("dict").action_space)
    alone, together = (
        NoiseBuffer(agent, 4, len(seeds), [np.random.default_rng(seed) for seed in seeds]) for seeds in ([7], [5, 7, 9])
    )
    for _ in range(2):
        alone.draw()
        together.draw()
        for one, many in zip(leaves(alone.arrays), leaves(together.arrays), strict=True):
            np.testing.assert_array_equal(one[:, 0], many[:, 1])
            assert not np.array_equal(many[:, 0], many[:, 1])


def test_spaces_that_no_agent_serves_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"observation space Text.*is not supported"):
        agent_for(spaces.Text(3), spaces.Discrete(2))
    with pytest.raises(ValueError, match=r"action space Text.*is not supported"):
        agent_for(spaces.Discrete(2), spaces.Text(3))


def test_images_share_one_network_unless_two_are_asked_for() -> None:
    image, secret = spaces.Box(0, 255, (40, 40, 1), np.uint8), spaces.Box(-1, 1, (2,))
    one, two = (agent_for(image, spaces.Discrete(2), **given) for given in ({}, {"shared": False}))
    assert one.model.critic is None
    assert two.model.critic is not None
    vector = [agent_for(secret, spaces.Discrete(2), **given).model.critic for given in ({}, {"shared": True})]
    assert [critic is None for critic in vector] == [False, True], "vectors have two unless one is asked for"
    n = [sum(p.numel() for name, p in each.named_parameters() if "head" not in name) for each in (one, two)]
    assert n[1] == 2 * n[0]
    both = spaces.Dict({"image": image, "privileged": secret})
    with pytest.raises(ConfigError, match=r"share theirs \(set model\.shared=false; auto shares for images"):
        agent_for(both, spaces.Discrete(2))
    agent_for(both, spaces.Discrete(2), shared=False)
    for wrong in ("both", 1):
        with pytest.raises(ConfigError, match=rf"model\.shared={wrong!r} must be true, false or auto"):
            ModelConfig(shared=wrong)  # type: ignore[arg-type]


def test_a_loss_that_leaves_something_out_gives_it_no_gradient() -> None:
    sampler, agent = sampler_for("CartPole-v1", T=6, B=3)
    samples = sampler.collect()
    agent.evaluate(samples.inputs[:-1], samples.state, samples.action)[2].sum().backward()
    for name, parameter in agent.named_parameters():
        assert (parameter.grad is not None) == ("value" in name or "critic" in name), name


@pytest.mark.parametrize("space", [spaces.Box(-1, 1, (2,)), spaces.Dict({"a": spaces.Box(-1, 1, (2,))})], ids=str)
def test_a_standard_deviation_that_depends_on_the_state_is_learned(space: Space) -> None:
    """Actions whose log standard deviation is -2 where the observation is -1, and 0 where it is 1; it starts at -1."""
    agent = agent_for(spaces.Box(-1, 1, (1,)), space, state_dependent_std=True, log_std=-1.0)
    observation = torch.tensor([[-1.0], [1.0]]).repeat(200, 1)
    nothing = torch.zeros(400)
    inputs = AgentInputs(observation, nothing, nothing, nothing.bool())
    assert torch.allclose(agent(inputs, ())[0].chunk(2, -1)[1], torch.tensor(-1.0), atol=0.05)
    noise = torch.randn(400, 2, generator=torch.Generator().manual_seed(0))
    action = (observation - 1).exp() * noise
    optimizer = torch.optim.Adam(agent.parameters(), 2e-2)
    for _ in range(150):
        optimizer.zero_grad()
        log_prob, _, _ = agent.evaluate(inputs, (), action if isinstance(space, spaces.Box) else {"a": action})
        (-log_prob.mean()).backward()
        optimizer.step()
    log_std = agent(inputs, ())[0].chunk(2, -1)[1]
    torch.testing.assert_close(log_std[:2], torch.tensor([[-2.0] * 2, [0.0] * 2]), rtol=0, atol=0.2)


def test_keys_of_gaussian_policies_are_refused_with_another_distribution() -> None:
    for key in ({"log_std": -1.0}, {"state_dependent_std": True}):
        with pytest.raises(ConfigError, match=r"are for Gaussian policies; leave them out with .*=a.b:Own"):
            ModelConfig(distribution="a.b:Own", **key)  # type: ignore[arg-type]


class Remembering(PolicyModel):
    def __init__(self, initial: Callable[[int], Any], after: Callable[[Any], Any]) -> None:
        super().__init__()
        self.linear, self.initial, self.after = torch.nn.Linear(3, 2), initial, after

    def initial_state(self, n: int) -> Any:
        return self.initial(n)

    def forward(self, inputs: AgentInputs, state: Any) -> Any:
        params = self.linear(inputs.observation)
        return params, params[..., 0], self.after(state)


@pytest.mark.parametrize(
    ("initial", "after", "says"),
    [
        (lambda n: torch.zeros(1, n, 4), None, r"Remembering gives \[1, 2, 4\] for two environments; its arrays are"),
        (lambda n: torch.zeros(()), None, r"Remembering gives \[\] for two environments"),
        (
            lambda n: torch.zeros(n, 4),
            lambda x: x.T,
            r"state of \[\[1, 4\]\] and returns one of \[\[4, 1\]\] after a row",
        ),
        (lambda n: (), lambda x: torch.zeros(1, 4), r"a state of no array and returns one of \[\[1, 4\]\]"),
    ],
)
def test_a_state_of_another_form_is_refused_with_its_network(initial: Any, after: Any, says: str) -> None:
    box, choice = spaces.Box(-1, 1, (3,), np.float32), spaces.Discrete(2)
    agent = PolicyAgent(Remembering(initial, after or (lambda x: x)), make_distribution(choice))
    with pytest.raises(ConfigError, match=says):
        empty_batch(box, choice, agent, 2, 3)
