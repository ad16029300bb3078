"""What the loss of DQN is given: `outputs` of one's own, with the features that the values come from."""

from typing import Any

import pytest
import torch

from rlframe.algos import dqn
from rlframe.envs import debug_envs
from rlframe.exploration import NoisyConfig
from tests.algos.test_dqn import made


class WithFeatures(dqn.DQN):
    """A loss on the trunk's features too."""

    def outputs(self, batch: Any) -> Any:
        return self.agent.model.with_features(batch.inputs, (), 1.0, *self.tau(batch, 0))[:2]  # type: ignore[operator]

    def loss(self, values: Any, features: Any, batch: Any) -> Any:  # type: ignore[override]
        loss, *others = super().loss(values, batch)
        return loss + features.square().mean(-1), *others


@pytest.mark.parametrize("options", [{}, {"dueling": True, "explore": NoisyConfig()}, {"value": "implicit"}], ids=str)
def test_features_are_those_of_the_values_and_reach_the_loss(options: dict[str, Any]) -> None:
    sampler, agent, algo = made(debug_envs.Identity, 200, **options)
    algo.__class__ = WithFeatures
    for _ in range(3):
        algo.receive(sampler.collect())
    batch = algo.with_fractions(algo.replay.sample(16, 0.0))
    features = agent.model.trunk(batch.inputs.observation, batch.inputs, ())[0]
    (values,) = dqn.DQN.outputs(algo, batch)
    assert torch.equal(values, algo.outputs(batch)[0])
    plain = dqn.DQN.loss(algo, values, batch)[0]
    torch.testing.assert_close(algo.evaluate(batch)[0], plain + features.square().mean(-1))
