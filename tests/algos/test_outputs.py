"""What losses are given: `outputs` of one's own, whose further results come before the batch."""

from typing import Any

import pytest
import torch

from rlframe.algos import dqn, r2d1
from rlframe.core.errors import ConfigError
from rlframe.core.struct import Struct
from rlframe.envs import debug_envs
from rlframe.exploration import NoisyConfig
from tests.algos.learners import collected, learner
from tests.algos.test_compiled import CARTPOLE
from tests.algos.test_cuda_graph import batches, learned, made
from tests.algos.test_dqn import made as dqn_on

MARK = torch.ones(())


def marking(cls: Any, losses: list[str]) -> Any:
    """The class, with a further output, which must come to the loss behind the others, and just before the batch."""

    class Marking(cls):  # type: ignore[misc]
        def outputs(self, *inputs: Any) -> Any:
            return *super().outputs(*inputs), MARK

        def loss(self, *given: Any) -> Any:
            *outputs, mark, batch = given[: next(i for i, x in enumerate(given) if isinstance(x, Struct)) + 1]
            assert mark is MARK
            losses.append(cls.__name__)
            return super().loss(*outputs, batch, *given[len(outputs) + 2 :])

    return Marking


def recurrent(name: str) -> Any:
    model = {"hidden": (8,), "memory": "lstm", "memory_size": 8}
    return learner(r2d1, *CARTPOLE, model=model, burn_in=2, learn_T=4, state_interval=4)


@pytest.mark.parametrize("name", ["a2c", "pg", "ppo_kl", "appo", "impala", "pqn", "dqn", "r2d1", "bc", "marwil", "iql"])
def test_outputs_are_the_first_arguments_of_the_loss_and_may_have_more(name: str) -> None:
    make = recurrent if name == "r2d1" else made
    one, other = make(name), make(name)
    other.__class__ = marking(type(other), losses := [])
    data = collected("CartPole-v1", one.agent, 8, (4, 2)) if name == "r2d1" else batches(name)
    assert len(learned(one, data)) == len(learned(other, data)) >= 2
    assert len(losses) >= 8
    torch.testing.assert_close(other.agent.state_dict(), one.agent.state_dict(), rtol=0, atol=0)


class WithFeatures(dqn.DQN):
    """A loss on the trunk's features too."""

    def outputs(self, batch: Any) -> Any:
        return self.agent.model.with_features(batch.inputs, (), 1.0, *self.tau(batch, 0))[:2]  # type: ignore[operator]

    def loss(self, values: Any, features: Any, batch: Any) -> Any:  # type: ignore[override]
        loss, *others = super().loss(values, batch)
        return loss + features.square().mean(-1), *others


@pytest.mark.parametrize("options", [{}, {"dueling": True, "explore": NoisyConfig()}, {"value": "implicit"}], ids=str)
def test_features_are_those_of_the_values_and_reach_the_loss(options: dict[str, Any]) -> None:
    sampler, agent, algo = dqn_on(debug_envs.Identity, 200, **options)
    algo.__class__ = WithFeatures
    for _ in range(3):
        algo.receive(sampler.collect())
    batch = algo.with_fractions(algo.replay.sample(16, 0.0))
    features = agent.model.trunk(batch.inputs.observation, batch.inputs, ())[0]
    (values,) = dqn.DQN.outputs(algo, batch)
    assert torch.equal(values, algo.outputs(batch)[0])
    plain = dqn.DQN.loss(algo, values, batch)[0]
    torch.testing.assert_close(algo.evaluate(batch)[0], plain + features.square().mean(-1))


@pytest.mark.parametrize("name", ["dqn", "r2d1"])
def test_a_loss_that_would_be_broadcast_over_the_rows_is_refused(name: str) -> None:
    algo = recurrent(name) if name == "r2d1" else made(name)
    own = algo.loss
    algo.loss = lambda *given: (own(*given)[0][:, None] - own(*given)[0], *own(*given)[1:])
    with pytest.raises(ConfigError, match=r"shape \[8, 8\] and must be a number for each row, \[8\]"):
        learned(algo, collected("CartPole-v1", algo.agent, 8, (4, 2)))
