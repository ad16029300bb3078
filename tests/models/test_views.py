"""Each network sees its own part of an observation; what is privileged reaches critics alone, in torch and NumPy."""

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import Space, spaces

from rlframe.agents import make_policy_agent
from rlframe.algos import ddpg, dqn, ppo, sac
from rlframe.core.errors import ConfigError
from rlframe.core.struct import map_tree
from rlframe.core.types import AgentInputs, BatchSpec
from rlframe.models import ModelConfig
from rlframe.models.views import View
from rlframe.replay import InMemory
from tests.algos.learners import SMALL, OneBatch, transitions

STATE, SECRET = spaces.Box(-9, 9, (3,), np.float32), spaces.Box(-9, 9, (2,), np.float32)
BOTH = spaces.Dict({"privileged": SECRET, "state": STATE})
BOX, TWO = spaces.Box(-1, 1, (1,), np.float32), spaces.Discrete(2)
MASKED = spaces.Dict({"action_mask": spaces.MultiBinary(2), "privileged": SECRET, "state": STATE})


def observed(space: Space, n: int, secret: float) -> dict[str, torch.Tensor]:
    whole = {"privileged": torch.full((n, 2), secret), "state": torch.linspace(-1, 1, 3 * n).view(n, 3)}
    return {"action_mask": torch.tensor([[1, 0]] * n), **whole} if "action_mask" in space.spaces else whole  # type: ignore[attr-defined]


def inputs(space: Space, secret: float, n: int = 4) -> AgentInputs:
    zeros = torch.zeros(n)
    return AgentInputs(observed(space, n, secret), torch.zeros(n, 1), zeros, zeros.bool())


@pytest.mark.parametrize(
    ("hidden", "space", "seen"),
    [
        ((), BOTH, {"privileged": 1, "state": 2}),
        (("privileged",), BOTH, 2),
        (("action_mask",), BOTH, {"privileged": 1, "state": 2}),
        (("privileged", "state"), spaces.Dict({**BOTH.spaces, "other": BOX}), 3),
        (("privileged",), STATE, None),
    ],
)
def test_a_view_leaves_out_entries_and_a_dict_of_one(hidden: tuple[str, ...], space: Space, seen: Any) -> None:
    observation = (
        None if space is STATE else {"privileged": 1, "state": 2, **({"other": 3} if len(space.spaces) == 3 else {})}
    )  # type: ignore[attr-defined]
    view = View(space, *hidden)
    assert view(observation) == seen
    assert isinstance(view.space, spaces.Dict) == isinstance(seen, dict)


@pytest.mark.parametrize("algo", [ppo, sac, ddpg])
def test_an_observation_that_is_for_critics_alone_leaves_a_policy_nothing(algo: Any) -> None:
    with pytest.raises(ConfigError, match="observation has only 'privileged', which a policy does not see"):
        algo.Config().make_agent(spaces.Dict({"privileged": SECRET}), BOX)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("memory", ["none", "lstm"])
@pytest.mark.parametrize(("space", "actions"), [(BOTH, BOX), (MASKED, TWO)], ids=["box", "masked"])
def test_policies_do_not_see_what_is_privileged_and_their_values_do(
    space: Space, actions: Space, memory: str, normalize: bool
) -> None:
    agent = make_policy_agent(space, actions, ModelConfig(hidden=(8,), memory=memory, normalize_observation=normalize))
    for secret in (-3.0, 3.0):
        agent.observe(observed(space, 4, secret))
    state = agent.initial_state(range(4))
    one, other = (agent(inputs(space, secret), state) for secret in (1.0, 2.0))
    assert torch.equal(one[0], other[0])
    assert not torch.equal(one[1], other[1])
    step = agent.numpy_step(4)
    assert step is not None
    noise = map_tree(np.zeros_like, agent.noise(np.random.default_rng(0), (4,)))
    numpy = step(inputs(space, 1.0).numpy(), map_tree(lambda x: x.numpy(), state), noise)
    torch.testing.assert_close(torch.from_numpy(numpy.info.value), one[1].detach(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("n", [1, 2])
def test_values_of_a_privileged_image_are_not_taken_from_the_policys_features(n: int) -> None:
    picture = spaces.Box(0, 255, (1, 10, 10), np.uint8)  # which NumPy does not encode
    space = spaces.Dict({"privileged": picture, "state": STATE})
    agent = make_policy_agent(space, TWO, ModelConfig(hidden=(8,), image_hidden=(8,)))
    assert agent.numpy_step(n) is None


@pytest.mark.parametrize("module", [ddpg, sac])
@pytest.mark.parametrize("normalize", [False, True])
def test_actors_do_not_see_what_is_privileged_and_their_critics_do(module: Any, normalize: bool) -> None:
    config = module.Config(replay=InMemory(size=100), **SMALL)
    agent = config.make_agent(BOTH, BOX, ModelConfig(hidden=(8,), normalize_observation=normalize))
    algo = config.make_algorithm(agent, BatchSpec(4, 2), 1000)
    one, other = (agent.model.normalized(observed(BOTH, 4, secret)) for secret in (1.0, 2.0))
    assert torch.equal(agent.model.params(one), agent.model.params(other))
    assert not torch.equal(algo.critic.q(one, torch.zeros(4, 1)), algo.critic.q(other, torch.zeros(4, 1)))
    batch = transitions([0.0] * 4, [0.1] * 4, [1.0] * 4, [0.9] * 4, [0.0] * 4)
    algo.replay = OneBatch(
        type(batch)(**{**vars(batch), "inputs": inputs(BOTH, 1.0), "next_inputs": inputs(BOTH, 2.0)})
    )
    assert torch.as_tensor(algo.update()["loss"]).isfinite()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: dqn.Config().make_agent(BOTH, TWO), "for critics alone, but a Q-network is the one that acts"),
        (
            lambda: ppo.Config().make_agent(BOTH, BOX, ModelConfig(shared=True)),
            "for a value network of its own, but policy and value share theirs",
        ),
    ],
)
def test_what_is_privileged_needs_a_network_of_its_own(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


def test_the_parameters_that_come_with_features_are_masked_too() -> None:
    model = sac.Config().make_agent(MASKED, TWO, ModelConfig(hidden=(8,))).model
    seen = observed(MASKED, 4, 1.0)
    params, features = model.with_features(seen)
    assert torch.equal(params, model(seen))
    assert torch.softmax(params, -1)[:, 1].eq(0).all()
    numpy = model.numpy_with_features(4)(map_tree(lambda x: x.numpy(), seen))
    torch.testing.assert_close(tuple(map(torch.from_numpy, numpy)), (params.detach(), features.detach()))
