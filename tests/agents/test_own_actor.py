"""A user's network as the actor of DDPG, TD3 and SAC: it acts, learns, and is normalised and masked as rlframe's is."""

from types import SimpleNamespace
from typing import Any

import chz
import pytest
import torch
from gymnasium import Space, spaces
from torch import Tensor, nn

from rlframe.algos import ddpg, sac, td3
from rlframe.core.errors import ConfigError
from rlframe.exploration.gsde import GsdeConfig
from rlframe.models import ModelConfig
from rlframe.models.views import FORBIDDEN
from tests.algos.learners import learner, transitions, updated

VECTOR, BOX = spaces.Box(-1, 1, (1,)), spaces.Box(-1, 1, (1,))


@chz.chz
class OwnGsde(GsdeConfig):
    """A kind of a user's own."""


class Net(nn.Module):
    """One layer."""

    def __init__(self, n_params: int) -> None:
        super().__init__()
        self.layer = nn.Linear(1, n_params)

    def forward(self, observation: Any) -> Tensor:
        found: Tensor = self.layer(observation)
        return found


def with_net(module: Any) -> Any:
    """A Config whose actor is a Net."""

    @chz.chz
    class Config(module.Config):  # type: ignore[misc]
        def make_actor(self, observation_space: Space, action_space: Space, n_params: int, model: ModelConfig) -> Net:
            return Net(n_params)

    return Config


@pytest.mark.parametrize("module", [ddpg, td3, sac])
def test_a_network_of_your_own_acts_and_learns(module: Any) -> None:
    algo = learner(SimpleNamespace(Config=with_net(module)), policy_interval=1)
    net = algo.agent.model.network
    assert type(net) is Net
    observation = torch.tensor([[0.5]])
    u = net(observation).detach()[:, :1]
    assert torch.equal(algo.agent.policy.mode(algo.agent.model(observation)), u.tanh())
    before = net.layer.weight.detach().clone()
    updated(algo, transitions([1.0, 2.0], [0.5, -1.0], [0.25, 3.0], [0.9, 0.0], [1.0, 7.0]))
    assert not torch.equal(net.layer.weight, before)
    assert net.training
    with torch.no_grad():
        algo.agent.model(observation)
    assert not net.training


def test_its_weights_follow_from_the_seed() -> None:
    one, same, other = (
        with_net(td3)().make_agent(VECTOR, BOX, ModelConfig(), seed).model.network.layer.weight for seed in (1, 1, 2)
    )
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


def test_its_observations_are_normalised_and_its_logits_masked() -> None:
    masked = spaces.Dict({"x": VECTOR, "action_mask": spaces.MultiBinary(3)})
    agent = with_net(sac)().make_agent(masked, spaces.Discrete(3), ModelConfig(normalize_observation=True))
    rows = {"action_mask": torch.tensor([[1, 0, 1], [1, 1, 1]], dtype=torch.int8), "x": torch.tensor([[3.0], [5.0]])}
    agent.model.observe(rows)
    logits = agent.model(rows)
    assert torch.allclose(agent.model.normalized(rows)["x"], torch.tensor([[-1.0], [1.0]]), atol=1e-3)
    plain = agent.model.network(torch.tensor([[-1.0], [1.0]]))
    assert logits[0, 1] == FORBIDDEN
    assert torch.allclose(logits[1], plain[1], atol=1e-3)


@pytest.mark.parametrize(
    ("give", "says"),
    [
        (
            lambda n: nn.Linear(1, n - 1),
            r"make_actor: Linear gives \[2, 1\] for 2 observations; it must be \[2, 2\], of n_",
        ),
        (lambda n: Net, r"make_actor gives <class .*Net.*>; return a torch\.nn\.Module"),
    ],
)
def test_a_network_of_the_wrong_size_or_kind_is_refused(give: Any, says: str) -> None:
    @chz.chz
    class Config(sac.Config):
        def make_actor(self, observation_space: Space, action_space: Space, n_params: int, model: ModelConfig) -> Any:
            return give(n_params)

    with pytest.raises(ConfigError, match=says):
        Config().make_agent(VECTOR, BOX, ModelConfig())


def test_it_sees_neither_masks_nor_what_is_privileged() -> None:
    both = spaces.Dict({"privileged": VECTOR, "x": VECTOR})
    agent = with_net(td3)().make_agent(both, BOX, ModelConfig())
    x = torch.tensor([[0.5]])
    assert torch.equal(agent.model({"privileged": x, "x": x}), agent.model.network(x))


@pytest.mark.parametrize(
    ("settings", "model", "says"),
    [
        ({"explore": "gsde"}, {}, r"algo\.explore=gsde is for rlframe's actor, and make_actor gives another"),
        ({"explore": "parameter_noise"}, {}, r"algo\.explore=parameter_noise is for rlframe's actor"),
        ({"explore": OwnGsde()}, {}, r"is for rlframe's actor, and make_actor gives another; use gaussian"),
        ({}, {"log_std": -1.0}, r"model\.log_std=-1 is for "),
    ],
)
def test_what_needs_the_layers_of_rlframes_actor_is_refused(settings: Any, model: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        with_net(td3)(**settings).make_agent(VECTOR, BOX, ModelConfig(**model))
