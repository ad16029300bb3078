"""Parametric actions: values and logits are inner products with embeddings of the actions that each row describes."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import Tensor

from rlframe import launch, load_policy
from rlframe.agents import Agent, make_policy_agent, make_q_agent
from rlframe.algos import dqn
from rlframe.core.errors import ConfigError
from rlframe.core.struct import as_numpy, leaves, map_tree
from rlframe.core.types import AgentInputs, BatchSpec
from rlframe.critics import CategoricalValue, ExpectedValue, QuantileValue
from rlframe.envs import debug_envs
from rlframe.models import ModelConfig
from rlframe.replay import InMemory, Transitions
from rlframe.rollout.inference import rows_keep_their_bits
from tests.envs.test_restore import kinds, restored
from tests.runners.resumed import assert_resumed_exactly, words
from tests.samplers.made import assert_batches_equal, split
from tests.samplers.test_same_samples import history

A, D, S = 4, 2, 2
ENTRIES = {"available_actions": spaces.Box(-9, 9, (A, D), np.float32), "state": spaces.Box(-9, 9, (S,), np.float32)}
MASKED_ENTRIES = {**ENTRIES, "action_mask": spaces.MultiBinary(A)}
SPACE, MASKED = spaces.Dict(ENTRIES), spaces.Dict(MASKED_ENTRIES)
ACTIONS = spaces.Discrete(A)
IDENTITY = ModelConfig(hidden=(), activation="relu", action_embedding=D)
KINDS = [ExpectedValue(), CategoricalValue(5, -1.0, 2.0), QuantileValue(3)]
ROW_1 = [[1.0, 0.0], [0.0, 1.0], [2.0, 2.0], [0.0, 0.0]]
ROW_2 = [[0.0, 3.0], [1.0, 1.0], [0.0, 0.0], [2.0, 0.0]]


def rows(state: list[list[float]], available: list[list[list[float]]], mask: list[list[int]] | None = None) -> Any:
    n = len(state)
    masks = {"action_mask": torch.tensor(mask, dtype=torch.int8)} if mask else {}
    observation = {**masks, "available_actions": torch.tensor(available), "state": torch.tensor(state)}
    return AgentInputs(observation, torch.zeros(n, dtype=torch.int64), torch.zeros(n), torch.zeros(n).bool())


def be_the_identity(actions: Any) -> None:
    """Make w(a) = a, where no feature is negative."""
    with torch.no_grad():
        for weight, bias in actions.layers.parameters:
            weight.copy_(torch.eye(D))
            bias.zero_()


def embed_state(layer: Any, table: list[list[float]]) -> None:
    """Make u(s) = table s."""
    with torch.no_grad():
        layer.weight.copy_(torch.tensor(table))
        layer.bias.zero_()


def test_logits_are_inner_products_of_state_and_action_and_masked_like_all_logits() -> None:
    agent: Any = make_policy_agent(MASKED, ACTIONS, IDENTITY)
    policy = agent.model
    be_the_identity(policy.outputs.embed)
    embed_state(policy.policy_head, [[1.0, 0.0], [1.0, 2.0]])  # u(s) = (s_1, s_1 + 2 s_2)
    inputs = rows([[1.0, 1.0], [-1.0, 2.0]], [ROW_1, ROW_2], [[1, 1, 1, 0], [1, 1, 1, 1]])
    logits, value, _ = agent(inputs, ())
    torch.testing.assert_close(logits, torch.tensor([[1.0, 3.0, 8.0, -1e9], [9.0, 2.0, 0.0, -2.0]]))
    moved = dataclasses.replace(inputs, observation={**inputs.observation, "available_actions": torch.rand(2, A, D)})
    assert torch.equal(agent(moved, ())[1], value), "the value is that of the state"


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: type(k).__name__)
def test_each_atom_is_an_inner_product(kind: Any) -> None:
    agent: Any = make_q_agent(SPACE, ACTIONS, IDENTITY, kind, "epsilon")
    be_the_identity(agent.model.outputs.embed)
    state, available = torch.tensor([[1.0, -2.0], [0.5, 3.0]]), torch.tensor([ROW_1, ROW_2])
    values = agent(rows(state.tolist(), available.tolist()), ())[0]
    layer = agent.model.advantage.network.linears[0]
    u = layer(state).view(2, D, kind.n_atoms)
    expected = (available.unsqueeze(-1) * u.unsqueeze(1)).sum(2)
    torch.testing.assert_close(values, expected)
    values.square().sum().backward()
    assert all(x.grad.abs().sum() > 0 for x in (layer.weight, *agent.model.outputs.embed.layers.flat))


@pytest.mark.parametrize(("double", "expected"), [(False, [7.0, 3.0]), (True, [5.0, 3.0])])
def test_targets_are_over_the_next_rows_actions_and_mask(double: bool, expected: list[float]) -> None:
    config = dqn.Config(replay=InMemory(size=64), double=double, discount=0.5)
    agent = config.make_agent(MASKED, ACTIONS, IDENTITY, 0)
    algo: Any = config.make_algorithm(agent, BatchSpec(4, 2), 100)
    for model, table in ((agent.model, [[1.0, 0.0], [0.0, 0.0]]), (algo.target, [[0.0, 0.0], [0.0, 1.0]])):
        be_the_identity(model.outputs.embed)
        embed_state(model.advantage.network.linears[0], table)  # online values a_1, the target a_2
    now = rows([[1.0, 1.0]] * 2, [ROW_1] * 2, [[1] * A] * 2)
    next_available = [
        [[1.0, 2.0], [9.0, 9.0], [0.0, 7.0], [3.0, 5.0]],
        [[8.0, 8.0], [1.0, 3.0], [2.0, 9.0], [0.0, 1.0]],
    ]
    batch = Transitions(
        inputs=now,
        action=torch.tensor([0, 1]),
        return_=torch.zeros(2),
        bootstrap=torch.full((2,), 0.5),
        next_inputs=rows([[1.0, 1.0]] * 2, next_available, [[1, 0, 1, 1], [0, 1, 0, 1]]),
        weight=torch.ones(2),
        index=np.arange(2),
    )
    assert algo.next_values(batch).squeeze(-1).tolist() == pytest.approx(expected, rel=1e-5)


def agent_of(name: str, space: spaces.Dict) -> Agent:
    config = ModelConfig(hidden=(8,), action_embedding=5, normalize_observation=True)
    match name:
        case "policy":
            return make_policy_agent(space, ACTIONS, config)
        case "lstm":
            return make_policy_agent(space, ACTIONS, ModelConfig(action_embedding=5, memory="lstm", memory_size=4))
        case "noisy":
            return make_q_agent(space, ACTIONS, config, CategoricalValue(3, 0.0, 1.0), "noisy")
    return make_q_agent(space, ACTIONS, config, ExpectedValue(), "epsilon")


@pytest.mark.parametrize("space", [SPACE, MASKED], ids=["all", "masked"])
@pytest.mark.parametrize("n", [3, 8])
@pytest.mark.parametrize("name", ["policy", "lstm", "q", "noisy"])
def test_numpy_acts_as_torch(name: str, n: int, space: spaces.Dict) -> None:
    agent, rng = agent_of(name, space), np.random.default_rng(0)
    features, state = rng.standard_normal((n, A, D)) * 3, rng.standard_normal((n, S)) * 3
    mask = np.tile([1, 0, 1, 1], (n, 1)).astype(np.int8)
    entries = {"action_mask": mask, "available_actions": features, "state": state}
    observation = {key: entries[key].astype(space[key].dtype) for key in space.spaces}
    inputs = AgentInputs(observation, np.zeros(n, np.int64), np.zeros(n, np.float32), rng.random(n) < 0.5)
    agent.observe(map_tree(torch.from_numpy, observation))
    before, noise = agent.initial_state(range(n)), agent.noise(rng, (n,))
    expected = agent.step(inputs.torch(), before, map_tree(torch.from_numpy, noise))
    step = agent.numpy_step(n)
    assert step is not None
    found = step(inputs, map_tree(as_numpy, before), noise)
    for one, other in zip(leaves(found), leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-6)


@pytest.mark.same_bits
@pytest.mark.parametrize("space", [SPACE, MASKED], ids=["all", "masked"])
@pytest.mark.parametrize("name", ["policy", "lstm", "q", "noisy"])
def test_bits_of_a_row_do_not_depend_on_other_rows(name: str, space: spaces.Dict) -> None:
    agent = agent_of(name, space)
    assert rows_keep_their_bits(agent, space, ACTIONS, 8)


def test_weights_of_an_agent_without_a_mask_fit_one_with_a_mask_and_its_targets() -> None:
    plain, masked = (agent_of("q", space) for space in (SPACE, MASKED))
    changed: dict[str, Tensor] = {name: torch.rand_like(x) for name, x in plain.state_dict().items()}
    masked.load_state_dict(changed)
    found = masked.state_dict()
    assert found.keys() == changed.keys()
    assert all(torch.equal(found[name], x) for name, x in changed.items())
    config = dqn.Config(replay=InMemory(size=64))
    algo: Any = config.make_algorithm(masked, BatchSpec(4, 2), 100)
    assert algo.target.state_dict().keys() == {name.removeprefix("model.") for name in found if "model." in name}
    algo.load_state_dict(algo.state_dict())


STATE = ENTRIES["state"]
FEEDS_BACK, EMBEDS = {"feed_back": True, "action_embedding": 4}, {"action_embedding": 4}


@pytest.mark.parametrize(
    ("observation", "action", "model", "message"),
    [
        (STATE, ACTIONS, EMBEDS, "needs a Dict observation of 'available_actions'"),
        (spaces.Dict({"state": STATE}), ACTIONS, EMBEDS, "needs a Dict observation of 'available_actions'"),
        (SPACE, spaces.Discrete(5), EMBEDS, r"must be a Box of floats of shape \(5, d\)"),
        (spaces.Dict({**ENTRIES, "available_actions": STATE}), ACTIONS, EMBEDS, r"of shape \(4, d\)"),
        (spaces.Dict({**ENTRIES, "available_actions": spaces.MultiBinary((A, D))}), ACTIONS, EMBEDS, "Box of floats"),
        (spaces.Dict({"available_actions": ENTRIES["available_actions"]}), ACTIONS, EMBEDS, "available_actions alone"),
        (spaces.Dict({k: v for k, v in MASKED_ENTRIES.items() if k != "state"}), ACTIONS, EMBEDS, "and the state, got"),
        (SPACE, spaces.Box(-1, 1, (A,), np.float32), EMBEDS, "needs Discrete actions"),
        (SPACE, spaces.MultiDiscrete([A]), EMBEDS, "needs Discrete actions"),
        (SPACE, ACTIONS, FEEDS_BACK, "model.feed_back=true"),
    ],
)
def test_spaces_and_models_that_do_not_fit_are_refused_in_one_line(
    observation: Any, action: Any, model: dict[str, Any], message: str
) -> None:
    with pytest.raises((ConfigError, ValueError), match=message) as caught:
        make_policy_agent(observation, action, ModelConfig(**model))
    assert "\n" not in str(caught.value)


def test_without_the_key_available_actions_are_an_ordinary_observation() -> None:
    agent: Any = make_policy_agent(SPACE, ACTIONS, ModelConfig(hidden=(8,)))
    assert agent.model.actor.encoder.mlp.layers.flat[0].shape == (8, A * D + S)


HIDDEN = "env=rlframe.envs.debug_envs:hidden_cartpole env_kwargs.n=5 env_kwargs.size=3"
SMALL = "runner.n_steps=160 runner.log_interval_steps=60 sampler=serial sampler.batch_T=8 sampler.batch_B=2"
SMALL += " model.hidden=[8] model.action_embedding=4 eval.n_envs=2 eval.n_episodes=2"
DQN = f"algo=dqn {HIDDEN} {SMALL} algo.learning_starts=32 algo.batch_size=8 algo.replay.size=512 algo.replay_ratio=2"
DQN += " algo.double=true algo.n_step=3 algo.prioritized=true algo.value=quantile algo.n_atoms=5"
PPO = f"algo=ppo {HIDDEN} {SMALL} algo.epochs=1 algo.minibatches=2 env_kwargs.masked=true"
SAC = f"algo=sac {HIDDEN} {SMALL} algo.learning_starts=32"


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (f"{DQN} algo.dueling=true", "algo.dueling=true"),
        (f"{SAC}", "model.action_embedding=0"),
        (f"{DQN} env=CartPole-v1 env_kwargs={{}}", "needs a Dict observation of 'available_actions'"),
        (f"{DQN} env_kwargs.n=1", "env_kwargs.n=1"),
        (f"{DQN} model.action_embedding=-1", "model.action_embedding=-1"),
    ],
    ids=["dueling", "sac", "cartpole", "n", "negative"],
)
def test_a_command_that_does_not_fit_is_refused_before_anything_starts(
    case: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = dict(word.split("=", 1) for word in case.split())
    if given["env"] == "CartPole-v1":
        given = {key: value for key, value in given.items() if not key.startswith("env_kwargs")}
    assert launch.main([f"{key}={value}" for key, value in given.items()] + [f"log_dir={tmp_path / 'runs'}"]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert len(said.splitlines()) == 1


@pytest.mark.parametrize("case", [DQN, PPO], ids=["dqn", "ppo"])
def test_a_stopped_run_is_resumed_exactly_and_its_policy_acts(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_resumed_exactly(case, tmp_path, monkeypatch)
    policy = load_policy(tmp_path / "parts/run_0")
    env = debug_envs.hidden_cartpole(5, 3, masked="masked" in case)
    observation, _ = env.reset(seed=0)
    for _ in range(5):
        action = policy.act(observation)
        assert env.action_space.contains(int(action))
        observation, *_ = env.step(action)


def test_an_embedding_of_one_number_trains_to_the_end(tmp_path: Path) -> None:
    case = f"{PPO} {SMALL}".replace("action_embedding=4", "action_embedding=1").replace("masked=true", "masked=false")
    assert launch.main(words(" ".join(dict.fromkeys(case.split())), tmp_path)) == 0


@pytest.mark.same_bits
@pytest.mark.parametrize("how", ["cpu2", "gpu2"])
def test_samplers_with_workers_give_the_batches_of_the_serial_one(how: str) -> None:
    kwargs, model = {"n": 5, "size": 3, "max_episode_steps": 9}, {"action_embedding": 4}
    one = list(history(split("serial", debug_envs.hidden_cartpole, kwargs, 3, **model)))
    other = list(history(split(how, debug_envs.hidden_cartpole, kwargs, 3, **model)))
    assert_batches_equal(one, other)


@pytest.mark.parametrize("masked", [False, True])
def test_the_two_hidden_actions_are_those_of_cartpole(masked: bool) -> None:
    hidden, plain = debug_envs.hidden_cartpole(6, 4, masked), debug_envs.hidden_cartpole(6, 4, masked).unwrapped
    observation, _ = hidden.reset(seed=3)
    plain.reset(seed=3)
    left, right = np.array([1, -1, 1, -1]), np.array([1, 1, -1, -1])
    for action in (0, 1, 1, 0, 1):
        found = [np.flatnonzero((observation["available_actions"] == x).all(-1)) for x in (left, right)]
        assert [len(x) for x in found] == [1, 1]
        if masked:
            assert sorted(np.concatenate(found)) == np.flatnonzero(observation["action_mask"]).tolist()
        observation, *_ = hidden.step(found[action][0])
        expected, *_ = plain.step(action)
        np.testing.assert_array_equal(observation["observation"], expected)
    assert hidden.observation_space.contains(observation)


def test_the_hidden_actions_are_forbidden_or_random_and_restored_bit_for_bit() -> None:
    env = debug_envs.hidden_cartpole(6, 4, True)
    observation, _ = env.reset(seed=0)
    with pytest.raises(ValueError, match="are allowed"):
        env.step(int(np.flatnonzero(observation["action_mask"] == 0)[0]))
    assert restored(kinds(debug_envs.hidden_cartpole), 7)[0] == ["", ""]
