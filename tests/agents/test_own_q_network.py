"""A user's network as the Q-network of DQN and PQN: it acts, learns, and is normalised and masked as rlframe's is."""

from typing import Any

import chz
import pytest
import torch
from gymnasium import Space, spaces
from torch import Tensor, nn

from rlframe.algos import dqn, pqn
from rlframe.core.errors import ConfigError, ReadableError
from rlframe.core.struct import map_tree
from rlframe.core.types import BatchSpec
from rlframe.exploration import NoisyConfig
from rlframe.models import ModelConfig
from tests.algos.learners import collected, inputs_at, learn

VECTOR, THREE = spaces.Box(-1, 1, (1,)), spaces.Discrete(3)
MASKED = spaces.Dict({"x": VECTOR, "action_mask": spaces.MultiBinary(3)})


class Net(nn.Module):
    """One layer."""

    def __init__(self, n_inputs: int, *shape: int) -> None:
        super().__init__()
        self.layer, self.shape = nn.Linear(n_inputs, torch.Size(shape).numel()), shape

    def forward(self, observation: Any) -> Tensor:
        found: Tensor = self.layer(observation)
        return found.unflatten(-1, self.shape)


def with_net(module: Any, *shape: int) -> Any:
    """A Config whose Q-network is a Net that gives values of this shape."""

    @chz.chz
    class Config(module.Config):  # type: ignore[misc]
        def make_q_network(self, observation_space: Space, action_space: Any, n_atoms: int, model: ModelConfig) -> Net:
            return Net(observation_space.shape[0], *shape)  # type: ignore[index]

    return Config


SETTINGS: dict[str, Any] = {
    "dqn": {"batch_size": 8, "learning_starts": 0, "replay_ratio": 8.0},
    "pqn": {"minibatches": 2},
}


@pytest.mark.parametrize("module", [dqn, pqn])
def test_a_network_of_your_own_acts_and_learns(module: Any) -> None:
    config = with_net(module, 2)(**SETTINGS[module.__name__.rpartition(".")[2]])
    agent = config.make_agent(spaces.Box(-1, 1, (4,)), spaces.Discrete(2), ModelConfig(), 0)
    algo, net = config.make_algorithm(agent, BatchSpec(4, 2), 100, 0), agent.model.network
    assert type(net) is Net
    x = torch.rand(3, 2, 4)
    values, _ = agent.model(inputs_at(x), ())
    torch.testing.assert_close(values, net(x.view(6, 4)).view(3, 2, 2, 1))
    before = net.layer.weight.detach().clone()
    assert learn(algo, collected("CartPole-v1", agent, 2, (4, 2)))
    assert not torch.equal(net.layer.weight, before)


def test_it_gives_the_numbers_of_a_distribution_and_its_weights_follow_from_the_seed() -> None:
    config = with_net(dqn, 3, 5)(value="quantile", n_atoms=5)
    one, same, other = (config.make_agent(VECTOR, THREE, ModelConfig(), seed) for seed in (1, 1, 2))
    assert one.model(inputs_at(torch.zeros(2, 1)), ())[0].shape == (2, 3, 5)
    assert torch.equal(one.model.network.layer.weight, same.model.network.layer.weight)
    assert not torch.equal(one.model.network.layer.weight, other.model.network.layer.weight)


def test_its_observations_are_normalised_and_what_a_mask_forbids_is_never_chosen() -> None:
    agent = with_net(dqn, 3)().make_agent(MASKED, THREE, ModelConfig(normalize_observation=True))
    rows = {"action_mask": torch.tensor([[1, 0, 0], [0, 0, 1]], dtype=torch.int8), "x": torch.tensor([[3.0], [5.0]])}
    agent.observe(rows)
    expected = agent.model.network(torch.tensor([[-1.0], [1.0]]))
    torch.testing.assert_close(agent.model(inputs_at(rows), ())[0].squeeze(-1), expected, rtol=0, atol=1e-3)
    noise = map_tree(torch.from_numpy, agent.no_noise((2,)))
    assert agent.step(inputs_at(rows), agent.initial_state([0, 1]), noise).action.tolist() == [0, 2]


@pytest.mark.parametrize(
    ("shape", "settings", "model", "says"),
    [
        ((2,), {}, {}, r"Net gives \[2, 2\] for 2 observations; it must be \[2, 3\], of 3 actions and n_atoms=1"),
        ((3,), {"value": "quantile", "n_atoms": 5}, {}, r"it must be \[2, 3, 5\], of 3 actions and n_atoms=5"),
        ((3,), {"explore": NoisyConfig()}, {}, "algo.explore=noisy is for rlframe's Q-network, and make_q_network"),
        ((3,), {"value": "implicit"}, {}, "algo.value=implicit is for rlframe's Q-network"),
        ((3,), {"dueling": True}, {}, "algo.dueling=true is for rlframe's Q-network"),
        ((3,), {}, {"feed_back": True}, "model.feed_back=true is for rlframe's Q-network"),
    ],
)
def test_what_does_not_fit_is_refused(shape: tuple[int, ...], settings: Any, model: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        with_net(dqn, *shape)(**settings).make_agent(VECTOR, THREE, ModelConfig(**model))


@pytest.mark.parametrize(
    ("network", "says"),
    [
        (Net, r"make_q_network gives <class .*Net.*>; return a torch\.nn\.Module"),
        (Net(2, 3), "Net of make_q_network failed in forward: RuntimeError: mat1 and mat2 shapes"),
    ],
)
def test_what_is_no_network_of_these_observations_is_refused(network: Any, says: str) -> None:
    @chz.chz
    class Config(dqn.Config):
        def make_q_network(self, *given: Any) -> Any:
            return network

    with pytest.raises(ReadableError, match=says):
        Config().make_agent(VECTOR, THREE, ModelConfig())
