"""The whole network: one result for rows and sequences, null inputs where an episode begins, weights from the seed."""

from typing import Any

import pytest
import torch
from gymnasium import spaces
from torch import nn

from rlframe.core.struct import leaves, map_tree
from rlframe.core.types import AgentInputs
from tests.samplers.made import agent_for

OBSERVATION = spaces.Box(-1, 1, (3,))
ACTION = spaces.Dict({"level": spaces.Box(-1, 1, (2,)), "which": spaces.Discrete(3)})  # Gymnasium sorts keys


def inputs_for(T: int, B: int, seed: int = 0) -> AgentInputs:
    generator = torch.Generator().manual_seed(seed)
    return AgentInputs(
        observation=torch.rand(T, B, 3, generator=generator),
        prev_action={
            "level": torch.rand(T, B, 2, generator=generator),
            "which": torch.randint(0, 3, (T, B), generator=generator),
        },
        prev_reward=torch.rand(T, B, generator=generator),
        first=torch.rand(T, B, generator=generator) < 0.2,
    )


MODELS: list[dict[str, Any]] = [
    {"memory": memory, "shared": shared, "feed_back": feed_back}
    for memory in ("none", "lstm", "gru")
    for shared in (False, True)
    for feed_back in (False, True)
]


@pytest.mark.parametrize("model", MODELS, ids=lambda model: "-".join(map(str, model.values())))
def test_a_sequence_gives_what_rows_give(model: dict[str, Any]) -> None:
    agent = agent_for(OBSERVATION, ACTION, memory_size=4, normalize_observation=True, **model)
    inputs = inputs_for(6, 4)
    agent.observe(inputs.observation)
    start = state = agent.initial_state(range(4))
    rows = []
    for t in range(6):
        params, value, state = agent(inputs[t], state)
        rows.append((params, value))
    params, value, final = agent(inputs, start)
    assert value.shape == (6, 4)
    torch.testing.assert_close(params, torch.stack([p for p, _ in rows]), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(value, torch.stack([v for _, v in rows]), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(final, state, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shared", [True, False])
def test_the_state_is_empty_without_memory(shared: bool) -> None:
    agent = agent_for(OBSERVATION, ACTION, shared=shared)
    assert agent.initial_state(range(4)) == ()
    assert not agent.recurrent
    assert agent(inputs_for(2, 4), ())[2] == ()


@pytest.mark.parametrize("shared", [True, False])
def test_every_leaf_of_the_state_is_indexed_by_environment(shared: bool) -> None:
    agent = agent_for(OBSERVATION, ACTION, shared=shared, memory="lstm", memory_size=4)
    assert [tuple(leaf.shape) for leaf in leaves(agent.initial_state(range(5)))] == [(5, 4)] * (2 if shared else 4)


def test_what_preceded_an_episode_is_null() -> None:
    agent = agent_for(OBSERVATION, ACTION, feed_back=True)
    inputs = inputs_for(1, 4)[0]

    def value(first: bool, change: float) -> torch.Tensor:
        given = AgentInputs(
            observation=inputs.observation,
            prev_action={"level": inputs.prev_action["level"] + change, "which": inputs.prev_action["which"]},
            prev_reward=inputs.prev_reward + change,
            first=torch.full((4,), first),
        )
        return agent(given, ())[1]

    torch.testing.assert_close(value(True, 0.0), value(True, 5.0), rtol=0, atol=0)
    assert not torch.allclose(value(False, 0.0), value(False, 5.0))
    nothing = AgentInputs(
        inputs.observation,
        map_tree(torch.zeros_like, inputs.prev_action),
        torch.zeros(4),
        torch.ones(4, dtype=torch.bool),
    )
    torch.testing.assert_close(value(True, 0.0), agent(nothing, ())[1], rtol=0, atol=0)


def test_the_first_policy_is_nearly_uniform_and_the_values_head_has_gain_one() -> None:
    agent = agent_for(OBSERVATION, spaces.Discrete(3))
    heads = [agent.model.policy_head, agent.model.value_head]
    for head, gain in zip(heads, (0.01, 1.0), strict=True):
        assert isinstance(head, nn.Linear)
        singular = torch.linalg.svdvals(head.weight)
        torch.testing.assert_close(singular, torch.full_like(singular, gain))


def test_a_gaussian_policy_starts_with_the_deviation_asked_for() -> None:
    agent = agent_for(OBSERVATION, ACTION, log_std=-1.5)
    params, _, _ = agent(inputs_for(2, 4), ())
    torch.testing.assert_close(params[..., 2:4], torch.full((2, 4, 2), -1.5))


def test_one_seed_gives_one_network_and_another_another() -> None:
    one, same, other = (agent_for(OBSERVATION, ACTION, seed, memory="gru").state_dict() for seed in (0, 0, 1))
    assert all(torch.equal(one[key], same[key]) for key in one)
    assert any(not torch.equal(one[key], other[key]) for key in one)
