"""The NumPy forward pass is torch's, for every part it knows, whatever the number of rows, and sees new parameters."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import Space, spaces

from rlframe.core.spaces import zeros
from rlframe.core.struct import Tree, as_numpy, leaves, map_tree
from rlframe.core.types import AgentInputs
from rlframe.models import numpy_inference
from tests.samplers.made import agent_for

VECTOR, IMAGE = spaces.Box(-9, 9, (5,), np.float32), spaces.Box(0, 255, (4, 36, 36), np.uint8)
MIXED = spaces.Dict(
    {
        "grid": spaces.Box(0, 7, (2, 3), np.uint8),
        "number": spaces.Box(-1, 1, (), np.float32),
        "pair": spaces.Tuple((spaces.Discrete(3), spaces.MultiBinary(4))),
        "which": spaces.MultiDiscrete([2, 5]),
    }
)
ACTIONS: dict[str, Space] = {
    "discrete": spaces.Discrete(3),
    "box": spaces.Box(-1, 1, (2,), np.float32),
    "number": spaces.Box(-1, 1, (), np.float32),
    "many": spaces.MultiDiscrete([3, 2]),
    "bits": spaces.MultiBinary(3),
    "dict": spaces.Dict({"level": spaces.Box(-1, 1, (2,), np.float32), "which": spaces.Discrete(3)}),
}
MODELS: list[dict[str, Any]] = [
    {"memory": memory, "shared": shared, "feed_back": feed_back, "normalize_observation": normalize, "hidden": hidden}
    for (memory, feed_back), shared, (normalize, hidden) in itertools.product(
        [("none", False), ("lstm", True), ("gru", False)], [False, True], [(True, (16, 8)), (False, ())]
    )
]


def random_rows(space: Space, n: int) -> Tree:
    """Canonical rows [n, ...] of a space, some far from zero."""
    space.seed(0)
    rng = np.random.default_rng(0)

    def fill(x: np.ndarray) -> np.ndarray:
        return (rng.standard_normal(x.shape) * 3).astype(x.dtype) if x.dtype.kind == "f" else (x + rng.random() > 0.5)

    return map_tree(lambda x: fill(x).astype(x.dtype), zeros(space, (n,)))


def inputs_for(observation: Space, action: Space, n: int) -> AgentInputs:
    rng = np.random.default_rng(1)
    return AgentInputs(
        observation=random_rows(observation, n),
        prev_action=random_rows(action, n),
        prev_reward=rng.standard_normal(n).astype(np.float32),
        first=rng.random(n) < 0.4,
    )


def check_steps(observation: Space, action: Space, n: int, **model: Any) -> None:
    """Two steps of both, the second from the states of the first, after the statistics have seen the rows."""
    agent = agent_for(observation, action, memory_size=4, **model)
    inputs = inputs_for(observation, action, n)
    agent.observe(map_tree(torch.from_numpy, inputs.observation))
    step = agent.numpy_step(n)
    assert step is not None
    state = agent.initial_state(range(n))
    state_np = map_tree(as_numpy, state)
    for seed in range(2):
        noise = agent.noise(np.random.default_rng(seed), (n,))
        expected = agent.step(inputs.torch(), state, map_tree(torch.from_numpy, noise))
        found = step(inputs, state_np, noise)
        for one, other in zip(leaves(found), leaves(expected), strict=True):
            np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-6)
        state, state_np = expected.state, found.state


@pytest.mark.parametrize("model", MODELS, ids=lambda model: "-".join(map(str, model.values())))
def test_every_kind_of_model_acts_as_in_torch(model: dict[str, Any]) -> None:
    check_steps(VECTOR, ACTIONS["box"], 8, **model)


@pytest.mark.parametrize("action", ACTIONS.values(), ids=ACTIONS)
def test_every_kind_of_space_acts_as_in_torch(action: Space) -> None:
    check_steps(MIXED, action, 4, memory="gru", feed_back=True, normalize_observation=True)


@pytest.mark.parametrize(
    ("action", "n", "model"),
    [
        *(("discrete", 8, {"activation": x, "hidden": (16, 16)}) for x in ("tanh", "relu", "elu", "silu", "gelu")),
        ("discrete", 8, {"activation": "relu", "hidden": (256, 256)}),  # so many numbers that torch computes their relu
        *(("dict", 8, {"norm": "layer", "hidden": (16, 8), "memory": memory}) for memory in ("none", "gru")),
        *(("discrete", n, {"memory": "lstm"}) for n in (1, 2, 3, 4, 7, 12)),
        ("dict", 8, {"state_dependent_std": True, "log_std": -1.0}),
        ("box", 4, {"distribution": "squashed_gaussian"}),
    ],
    ids=str,
)
def test_every_option_and_any_number_of_rows_act_as_in_torch(action: str, n: int, model: dict[str, Any]) -> None:
    check_steps(VECTOR, ACTIONS[action], n, **model)


def test_outliers_are_cut_as_in_torch() -> None:
    agent, inputs = agent_for(VECTOR, ACTIONS["discrete"], normalize_observation=True), inputs_for(VECTOR, VECTOR, 4)
    agent.observe(torch.from_numpy(inputs.observation))
    inputs.observation[:2] *= np.float32([[100], [-100]])
    assert (abs(agent.model.normalized(torch.from_numpy(inputs.observation))) == 10).any()
    step = agent.numpy_step(4)
    assert step is not None
    found = step(inputs, (), np.zeros((4, 3), np.float32)).info.value  # type: ignore[attr-defined]
    np.testing.assert_allclose(found, agent(inputs.torch(), ())[1].detach(), rtol=2e-5, atol=2e-6)


def test_features_beyond_the_range_of_float32_raise_no_warning() -> None:
    agent = agent_for(VECTOR, ACTIONS["discrete"], activation="silu", memory="lstm")
    inputs = inputs_for(VECTOR, ACTIONS["discrete"], 4)
    inputs.observation[...] = 1e30
    step = agent.numpy_step(4)
    assert step is not None
    found = step(inputs, map_tree(as_numpy, agent.initial_state(range(4))), np.zeros((4, 3), np.float32))
    assert np.isfinite(found.info.value).all()  # type: ignore[attr-defined]


@pytest.mark.same_bits
@pytest.mark.parametrize("hidden", [(64, 64), (256, 256), (400, 300)])
def test_a_row_has_the_same_bits_among_any_number_of_others(hidden: tuple[int, ...]) -> None:
    agent = agent_for(VECTOR, ACTIONS["box"], hidden=hidden, memory="lstm")
    inputs = inputs_for(VECTOR, ACTIONS["box"], 64)
    state = map_tree(as_numpy, agent.initial_state(range(64)))
    whole = agent.model.numpy_forward(64)(inputs, state)
    for n in (4, 8, 20, 32):
        part = agent.model.numpy_forward(n)(inputs[:n], map_tree(lambda x, n=n: x[:n], state))
        for one, other in zip(part[:2], whole[:2], strict=True):
            np.testing.assert_array_equal(one, other[:n])


def test_parameters_changed_in_place_are_seen() -> None:
    agent = agent_for(VECTOR, ACTIONS["discrete"], normalize_observation=True)
    step, inputs = agent.numpy_step(4), inputs_for(VECTOR, ACTIONS["discrete"], 4)
    assert step is not None
    noise = np.zeros((4, 3), np.float32)
    before = step(inputs, (), noise).info.value  # type: ignore[attr-defined]
    optimizer = torch.optim.SGD(agent.parameters(), 0.1)
    agent(inputs.torch(), ())[1].sum().backward()
    optimizer.step()
    learned = step(inputs, (), noise).info.value  # type: ignore[attr-defined]
    agent.observe(torch.from_numpy(inputs.observation))
    normalised = step(inputs, (), noise).info.value  # type: ignore[attr-defined]
    assert not np.allclose(before, learned, atol=1e-3)
    assert not np.allclose(learned, normalised, atol=1e-3)


@pytest.mark.parametrize(
    "space",
    [
        IMAGE,
        spaces.Box(0, 255, (40, 37, 3), np.uint8),
        spaces.Box(0, 255, (2, 36, 36, 3), np.uint8),
        spaces.Box(0, 1, (38, 38, 1), np.float32),
        spaces.Dict({"camera": IMAGE, "speed": spaces.Box(-1, 1, (2,), np.float32), "map": IMAGE}),
    ],
    ids=str,
)
def test_an_image_acts_as_in_torch(space: Space) -> None:
    check_steps(space, ACTIONS["discrete"], 1, memory="gru", image_hidden=(16,))
    check_steps(space, ACTIONS["discrete"], 1, image_hidden=())
    check_steps(space, ACTIONS["discrete"], 1, image_hidden=(), channels=(4, 6), kernels=(5, 3), strides=(3, 2))


def test_several_images_other_encoders_and_transformers_stay_with_torch() -> None:
    assert agent_for(IMAGE, ACTIONS["discrete"]).numpy_step(2) is None
    assert agent_for(IMAGE, ACTIONS["discrete"], encoder="impala").numpy_step(1) is None
    pooled = {"channels": (4,), "kernels": (5,), "strides": (3,), "pools": (2,)}
    assert agent_for(IMAGE, ACTIONS["discrete"], **pooled).numpy_step(1) is None
    assert agent_for(VECTOR, ACTIONS["discrete"], memory="transformer").numpy_step(4) is None
    assert numpy_inference.encoder(torch.nn.Linear(2, 2), 1) is None
