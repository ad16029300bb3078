"""How a batch is cut into minibatches, and what the optimizer makes of the learning rate."""

import math
from typing import Any

import chz
import numpy as np
import pytest
import torch
from gymnasium import spaces

from rlframe.algos import bc, cql, maddpg, pqn, qmix, r2d1
from rlframe.algos import ppo as ppo_module
from rlframe.algos.a2c import Config as A2CConfig
from rlframe.algos.on_policy import as_minibatch, make_batch, minibatches, order_of_rows
from rlframe.algos.pg import Config as PGConfig
from rlframe.algos.ppo import PPO
from rlframe.algos.ppo import Config as PPOConfig
from rlframe.core.errors import ConfigError
from rlframe.core.struct import leaves, map_tree
from rlframe.core.types import BatchSpec, Samples
from rlframe.models import ModelConfig
from rlframe.models.base import CriticConfig
from tests.algos.table import one_step_episodes, table_agent
from tests.samplers.made import assert_equal, copied, sampler_for


def numbered(model: str = "none") -> tuple[Samples, torch.Tensor]:
    """A batch [6, 4] whose advantages number its rows."""
    sampler, _ = sampler_for(T=6, B=4, model_memory=model, model_shared=True)
    return copied(sampler.collect()), torch.arange(24.0).view(6, 4)


def test_rows_are_covered_exactly_once_an_epoch_in_a_new_order() -> None:
    samples, numbers = numbered()
    rng = np.random.default_rng(0)
    epochs = []
    for _ in range(2):
        parts = [part for part, _ in minibatches(make_batch(samples, numbers, numbers), (), 3, False, rng)]
        assert [part.advantage.shape for part in parts] == [(8,)] * 3
        epochs.append(torch.cat([part.advantage for part in parts]).tolist())
        assert sorted(epochs[-1]) == list(range(24))
    assert epochs[0] != epochs[1]


def test_what_belongs_to_a_row_stays_with_it() -> None:
    samples, numbers = numbered()
    flat = samples.inputs[:-1].map(lambda x: x.flatten(0, 1))
    for part, _ in minibatches(make_batch(samples, numbers, numbers), (), 3, False, np.random.default_rng(0)):
        rows = part.advantage.long()
        assert_equal(part.inputs, flat[rows])
        assert_equal(part.action, samples.action.flatten()[rows])
        assert_equal(part.valid, samples.valid.flatten()[rows])
        assert_equal(part.log_prob, samples.info.log_prob.flatten()[rows])  # type: ignore[attr-defined]
        assert_equal(part.value, samples.info.value.flatten()[rows])  # type: ignore[attr-defined]


@pytest.mark.parametrize("n_valid", [0, 1, 26, 59, 62, 64])
def test_most_rows_that_are_not_valid_are_left_out_and_valid_ones_never(n_valid: int) -> None:
    """Of 128 rows in 4 minibatches; an eighth of a minibatch is 4 rows."""
    valid = torch.zeros(128, dtype=torch.bool)
    valid[torch.randperm(128, generator=torch.Generator().manual_seed(0))[: 2 * n_valid]] = True
    order = order_of_rows(valid.view(8, 16), 4, np.random.default_rng(0), 2 * n_valid)
    assert order.shape == (4, 4 * max(1, math.ceil(n_valid / 8)))
    assert len(set(order.flatten().tolist())) == order.numel(), "no row is there twice"
    assert int(valid[order].sum()) == 2 * n_valid
    assert int(valid[order].sum(1).min()) >= n_valid // 4, "what fills up is spread over all of them"


def test_sequences_keep_their_order_and_their_state() -> None:
    samples, numbers = numbered("lstm")
    state = map_tree(lambda x: torch.arange(4.0)[:, None].expand_as(x).clone(), samples.state)
    batch = make_batch(samples, numbers, numbers)
    seen: list[int] = []
    for part, part_state in minibatches(batch, state, 2, True, np.random.default_rng(0)):
        columns = part.advantage[0].long().tolist()
        assert part.advantage.shape == (6, 2)
        assert_equal(part.advantage, numbers[:, columns])
        assert_equal(part.inputs, samples.inputs[:-1, columns])
        for leaf in leaves(part_state):
            assert leaf[:, 0].tolist() == columns
        seen += columns
    assert sorted(seen) == [0, 1, 2, 3]


@pytest.mark.parametrize(("n", "recurrent"), [(1, False), (1, True), (3, False), (2, True)])
def test_advantages_are_prepared_part_by_part(n: int, recurrent: bool) -> None:
    samples, numbers = numbered("lstm" if recurrent else "none")
    seen = []

    def prepared(advantage: torch.Tensor, valid: torch.Tensor) -> torch.Tensor:
        assert advantage.shape == valid.shape == (n, 24 // n)
        seen.append((advantage.clone(), valid))
        return -advantage

    batch = make_batch(samples, numbers, numbers)
    batch = as_minibatch(batch, prepared) if n == 1 else batch
    parts = [part for part, _ in minibatches(batch, samples.state, n, recurrent, np.random.default_rng(0), prepared)]
    ((advantage, valid),) = seen
    for part, own, marks in zip(parts, advantage, valid, strict=True):
        assert_equal(part.advantage.flatten(), -own)
        assert_equal(part.return_.flatten(), own)
        assert_equal(part.valid.flatten(), marks)
        assert_equal(part.weight.flatten(), marks / marks.sum())


@pytest.mark.parametrize(
    ("memory", "n", "message"),
    [
        (
            "none",
            5,
            r"algo.minibatches=5 must divide the 24 rows .*batch_T \* batch_B.*; use one of 1, 2, 3, 4, 6, 8, 12, 24",
        ),
        ("lstm", 3, r"algo.minibatches=3 must divide the 4 sequences .*sampler.batch_B.*; use one of 1, 2, 4"),
    ],
)
def test_minibatches_that_do_not_divide_are_refused_with_the_numbers(memory: str, n: int, message: str) -> None:
    _, agent = sampler_for(T=6, B=4, model_memory=memory)
    with pytest.raises(ConfigError, match=message):
        PPO(agent, BatchSpec(6, 4), 100, PPOConfig(minibatches=n))


def ppo(n_steps: int = 1000, **config: Any) -> tuple[PPO, Samples]:
    sampler, agent = sampler_for(T=6, B=4)
    return PPO(agent, BatchSpec(6, 4), n_steps, PPOConfig(**config)), copied(sampler.collect())


@pytest.mark.parametrize("norm", ["batch", "renorm"])
@pytest.mark.parametrize(
    ("algo", "memory", "why"),
    [
        (ppo_module, "none", "counts rows of a batch in which nobody acted"),
        (pqn, "none", "counts rows of a batch in which nobody acted"),
        (r2d1, "lstm", "counts rows of a batch in which nobody acted"),
        (bc, "lstm", "counts rows of a batch in which nobody acted"),
        (qmix, "none", "counts agents that are absent"),
        (maddpg, "none", "counts agents that are absent"),
        (cql, "none", "sets the gap between values that different rows have normalised"),
    ],
)
def test_normalisation_by_rows_that_do_not_count_is_refused(algo: Any, memory: str, why: str, norm: str) -> None:
    action_space = spaces.Box(-1, 1, (2,)) if algo is maddpg else spaces.Discrete(2)
    config = algo.Config()

    own = {"critic": CriticConfig(norm=norm)} if algo in (ppo_module, cql) else {"norm": norm}
    agent = config.make_agent(spaces.Discrete(3), action_space, ModelConfig(memory=memory, **own))
    make = getattr(config, "make_joint", None) or (lambda agent, n, *rest: config.make_algorithm(agent, *rest))
    with pytest.raises(ConfigError, match=rf"^model.(critic.)?norm={norm} {why}; use layer or none"):
        make(agent, 2, BatchSpec(32, 1), 10_000)


def test_a_policy_with_other_probabilities_in_learning_than_in_acting_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model.norm=batch gives the policy other action prob.*; use layer or none"):
        PPOConfig().make_agent(spaces.Discrete(3), spaces.Discrete(2), ModelConfig(norm="batch"))


def test_ppo_makes_epochs_times_minibatches_updates() -> None:
    algo, samples = ppo(epochs=3, minibatches=4)
    algo.receive(samples)
    algo.update()
    assert algo.progress.updates == 12


def test_ppo_stops_its_epochs_at_the_target_kl() -> None:
    algo, samples = ppo(epochs=10, minibatches=4, learning_rate=1e-2, target_kl=1e-4)
    algo.receive(samples)
    kl = float(algo.update()["kl"])
    assert 1 <= algo.progress.updates < 10
    assert math.isfinite(kl)
    algo.receive(samples)
    assert algo.updates_due() == 1, "it stops this batch, not the training"


def test_the_gradient_norm_is_of_the_steps_that_were_made(monkeypatch: pytest.MonkeyPatch) -> None:
    algo, samples = ppo(epochs=10, minibatches=4, learning_rate=1e-2, target_kl=1e-4)
    norms: list[float] = []

    def learn(inputs: Any) -> Any:
        found = learned(inputs)
        norms.append(float(found[1]))
        return found

    learned = algo.learn
    monkeypatch.setattr(algo, "learn", learn)
    algo.receive(samples)
    found = algo.update()
    assert norms[-1] == 0, "the KL forbade the last step"
    assert float(found["grad_norm"]) == pytest.approx(np.mean(norms[:-1]), rel=1e-5)


def test_ppo_tells_of_a_batch_whose_first_minibatch_is_beyond_the_target_kl_and_learns_nothing() -> None:
    algo, samples = ppo(epochs=2, minibatches=2, target_kl=1e-6)
    with torch.no_grad():  # another policy than that which acted
        for parameter in algo.agent.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    algo.receive(samples)
    found = algo.update()
    assert float(found["kl"]) > 1.5e-6
    assert float(found["grad_norm"]) == 0
    assert algo.progress.updates == 0


def test_recomputed_advantages_follow_the_new_values_and_the_value_clip_stays_with_the_old() -> None:
    algo, samples = ppo(
        epochs=2, minibatches=1, learning_rate=1e-1, recompute_advantage=True, normalize_advantage=False
    )
    algo.receive(samples)
    algo.update()
    with torch.no_grad():
        batch = algo.batch_of(samples, algo.agent(samples.inputs, samples.state)[1])
    with torch.no_grad():
        value = algo.agent(samples.inputs, samples.state)[1]
    fresh = samples.valid & samples.terminated
    torch.testing.assert_close(batch.advantage[fresh], (samples.reward - value[:-1])[fresh], rtol=1e-5, atol=1e-6)
    assert_equal(batch.value, samples.info.value)  # type: ignore[attr-defined]


ALL = pytest.mark.parametrize(
    "config", [PPOConfig(epochs=1, minibatches=1), A2CConfig(optimizer="adam"), PGConfig()], ids=["ppo", "a2c", "pg"]
)


@ALL
@pytest.mark.parametrize("rate", [1e-3, 1e-2])
def test_the_learning_rate_is_used_and_annealed_by_env_steps(config: Any, rate: float) -> None:
    config = chz.replace(config, learning_rate=f"linear({rate},0)", normalize_advantage=False)
    agent = table_agent(5)
    algo = config.make_algorithm(agent, BatchSpec(1, 5), 16)
    valid = [True] * 4 + [False]
    for batch in range(4):  # 4 env_steps each
        before = agent.model.value.detach().clone()
        algo.receive(one_step_episodes([100.0] * 5, [0.0] * 5, [math.log(0.5)] * 5, valid))
        assert algo.progress.env_steps == 4 * (batch + 1), "rows that are not valid are no env_steps"
        expected = rate * (1 - batch / 4)
        assert algo.update()["learning_rate"] == pytest.approx(expected)
        step = (agent.model.value.detach() - before)[:4]
        torch.testing.assert_close(step, torch.full((4,), expected), rtol=0.02, atol=0)  # Adam on a steady gradient


@ALL
def test_a_run_of_one_batch_learns(config: Any) -> None:
    agent = table_agent(2)
    algo = config.make_algorithm(agent, BatchSpec(1, 2), 2)
    algo.receive(one_step_episodes([1.0, 2.0], [0.0, 0.0], [math.log(0.5)] * 2))
    algo.update()
    assert agent.model.value.detach().ne(0).all()


def test_a_linear_clip_is_annealed_by_env_steps() -> None:
    agent = table_agent(2)
    config = PPOConfig(epochs=1, minibatches=1, clip="linear(0.2,0)", learning_rate=0.0)
    algo = PPO(agent, BatchSpec(1, 2), 4, config)
    fractions = []
    for _ in range(2):  # ratios 1.15 and 1 against a clip of 0.2, then 0.1
        algo.receive(one_step_episodes([1.0, 1.0], [0.0, 0.0], [math.log(0.5 / 1.15), math.log(0.5)]))
        fractions.append(float(algo.update()["clip_fraction"]))
    assert fractions == [0.0, 0.5]
