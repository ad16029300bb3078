"""ES and ARS: steps of known size on known returns, a quadratic that is climbed, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from rlframe.algos import ars, es
from rlframe.algos.evolution import EvaluationInfo, Evolution, ReturnsTooLarge, flat_parameters
from rlframe.core.errors import ConfigError
from rlframe.core.struct import as_numpy
from rlframe.core.types import AgentInputs, Samples
from rlframe.experiment.checks import check_parts
from rlframe.experiment.settings import from_flat
from rlframe.models import ModelConfig
from rlframe.models.base import CriticConfig
from rlframe.ops.evolution import perturbation

BOX = spaces.Box(-1, 1, (3,), np.float32)
LINEAR = ModelConfig(hidden=())
N = 4  # parameters of the linear policy of one action


def algorithm(config: Any, n_steps: int = 10_000) -> Evolution:
    agent = config.make_agent(BOX, spaces.Box(-1, 1, (1,), np.float32), LINEAR, 0)
    made: Evolution = config.make_algorithm(agent, None, n_steps, 0)
    return made


def tell(algo: Evolution, returns: np.ndarray, length: int = 1) -> dict[str, Any]:
    """Let it learn from the returns [D, 2] of the generation it asks for."""
    reward = torch.as_tensor(returns.reshape(1, -1), dtype=torch.float32)
    rows, ends = torch.zeros(2, reward.shape[1]), torch.ones_like(reward, dtype=torch.bool)
    info = EvaluationInfo(torch.full(reward.shape, length), ())
    inputs = AgentInputs((), (), rows, rows > 0)
    parts = rows[:1], reward, ends, ~ends, ends, info, (), ()
    algo.receive(Samples(inputs, *parts, n_env_steps=int(info.length.sum()), start=0))
    return dict(algo.update())


def both(algo: Evolution) -> np.ndarray:
    """The policies [D, 2, n] of the generation it asks for."""
    population = algo.ask()
    policy, std = as_numpy(population.policy), float(population.noise_std[0])
    epsilon = np.stack([perturbation(seed, len(policy)) for seed in population.seeds.tolist()])
    return np.stack([policy + std * epsilon, policy - std * epsilon], 1)


def test_ars_steps_along_the_differences_of_its_top_directions() -> None:
    algo = algorithm(ars.Config(directions=3, top_directions=2, noise_std=0.1, learning_rate=0.5))
    seeds, returns = algo.ask().seeds, np.array([[1.0, 2.0], [9.0, 5.0], [3.0, 3.5]])
    metrics = tell(algo, returns)
    expected = 0.5 / (2 * returns[1:].std()) * (4 * perturbation(seeds[1], N) - 0.5 * perturbation(seeds[2], N))
    np.testing.assert_allclose(flat_parameters(algo.agent), expected, rtol=1e-5)
    assert metrics["return_std"] == pytest.approx(returns[1:].std())
    tell(algo, np.full((3, 2), 500.0))
    np.testing.assert_allclose(flat_parameters(algo.agent), expected, rtol=1e-5, err_msg="equal returns tell nothing")


@pytest.mark.parametrize("config", [es.Config(directions=3), ars.Config(directions=3)], ids=["es", "ars"])
def test_returns_beyond_float32_are_an_error_with_their_number(config: Any) -> None:
    algo = algorithm(config)
    algo.ask()
    tell(algo, np.array([[3e38, -3e38], [1.0, 2.0], [3.0, 4.0]]))
    assert np.isfinite(as_numpy(flat_parameters(algo.agent))).all(), "the largest that fit are learned from"
    says = "at env_steps 12 2 of 6 returns are beyond float32, 3.4e[+]38, .* env.reward_scale"
    with pytest.raises(ReturnsTooLarge, match=says):
        tell(algo, np.array([[4e38, -4e38], [1.0, 2.0], [3.0, 4.0]]))


def test_es_estimates_the_gradient_from_centred_ranks() -> None:
    algo = algorithm(es.Config(directions=2, noise_std=0.5, weight_decay=0.0))
    seeds = algo.ask().seeds
    metrics = tell(algo, np.array([[100.0, -3.0], [7.0, 8.0]]))  # ranks 0.5, -0.5, -1/6, 1/6
    gradient = (1.0 * perturbation(seeds[0], N) - 1 / 3 * perturbation(seeds[1], N)) / (4 * 0.5)
    assert float(metrics["grad_norm"]) == pytest.approx(float(np.linalg.norm(gradient)), rel=1e-5)
    decayed = algorithm(es.Config(directions=2, noise_std=0.5, weight_decay=0.1))
    gradient -= 0.1 * as_numpy(flat_parameters(decayed.agent))
    metrics = tell(decayed, np.array([[100.0, -3.0], [7.0, 8.0]]))
    assert float(metrics["grad_norm"]) == pytest.approx(float(np.linalg.norm(gradient)), rel=1e-5)


@pytest.mark.parametrize(
    "config",
    [
        es.Config(directions=8, noise_std=0.1, learning_rate=0.05),
        ars.Config(directions=8, noise_std=0.1, learning_rate=0.05, top_directions=4),
    ],
    ids=["es", "ars"],
)
def test_a_quadratic_is_climbed(config: Any) -> None:
    algo, goal = algorithm(config), np.array([1.0, -2.0, 0.5, 0.0])
    for _ in range(150):
        tell(algo, -np.square(both(algo) - goal).sum(-1))
    assert np.abs(as_numpy(flat_parameters(algo.agent)) - goal).max() < 0.15
    assert algo.progress.updates == 150
    assert algo.progress.env_steps == 150 * 16


def test_generations_have_seeds_of_their_own_that_a_run_with_this_seed_has_again() -> None:
    algo, other = algorithm(es.Config(directions=4)), algorithm(es.Config(directions=4))
    first = algo.ask().seeds
    assert np.array_equal(first, algo.ask().seeds)
    tell(algo, np.zeros((4, 2)))
    assert not set(first.tolist()) & set(algo.ask().seeds.tolist())
    other.load_state_dict(algo.state_dict())
    assert np.array_equal(other.ask().seeds, algo.ask().seeds)


WRONG = {
    "algo=es": "algo=es needs runner=evolution, not runner=minibatch_rl_eval",
    "runner=evolution": "runner=evolution is for algo=es or ars, not algo=ppo",
    "runner=evolution reward.bonus=rnd": "runner=evolution is for algo=es or ars, not algo=ppo",
    "algo=es runner=evolution reward.bonus=rnd": "reward.bonus=rnd changes rewards step by step",
    "algo=es runner=evolution sampler=gpu sampler.n_workers=2": "sampler=gpu has no meaning",
    "algo=es runner=evolution sampler.decorrelation_steps=3": "sampler.decorrelation_steps=3 has no meaning",
    "algo=es runner=evolution sampler.statistics=a:B": r"sampler.statistics=\[a:B\] has no meaning",
    "algo=es runner=evolution sampler.complete_episodes=true": "sampler.complete_episodes=true has no meaning",
    "algo=es runner=evolution sampler.env_restarts=2": "sampler.env_restarts=2 has no meaning",
    "algo=es runner=evolution env.normalize_reward=true": "env.normalize_reward=true has no meaning",
    "algo=es runner=evolution threads=auto": "threads=auto has no meaning",
}


@pytest.mark.parametrize("words", WRONG)
def test_parts_that_are_not_made_for_each_other_are_refused(words: str) -> None:
    with pytest.raises(ConfigError, match=WRONG[words]):
        check_parts(from_flat(dict(word.split("=", 1) for word in words.split())))


def test_what_it_cannot_act_with_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"top_directions=3 must be at most algo\.directions=2"):
        ars.Config(directions=2, top_directions=3)
    with pytest.raises(ConfigError, match=r"model\.memory=none"):
        es.Config().make_agent(BOX, BOX, ModelConfig(memory="lstm"), 0)
    with pytest.raises(ConfigError, match=r"^evolution strategies .* model\.action_embedding=0"):
        es.Config().make_agent(BOX, spaces.Discrete(2), ModelConfig(action_embedding=4), 0)
    for settings, remedy in (
        ({"norm": "batch"}, "model.norm=layer"),
        ({"norm": "renorm"}, "model.norm=layer"),
        ({"unit_rows": True}, "model.unit_rows=false and model.unit_gains=false"),
        ({"unit_rows": True, "unit_gains": True, "norm": "layer"}, "model.unit_rows=false and model.unit_gains=false"),
    ):
        with pytest.raises(ConfigError, match=f"set {remedy}$"):
            es.Config().make_agent(BOX, BOX, ModelConfig(**settings), 0)
    with pytest.raises(ConfigError, match=r"model\.critic is for .* but evolution strategies have none"):
        es.Config().make_agent(BOX, BOX, ModelConfig(critic=CriticConfig(hidden=(8,))), 0)
    with pytest.raises(ConfigError, match="one Discrete action or bounded Box"):
        es.Config().make_agent(BOX, spaces.MultiDiscrete([2, 2]), LINEAR, 0)
    algo = algorithm(es.Config())
    rows = torch.zeros(2, 1)
    with pytest.raises(ConfigError, match="ES learns from whole episodes of a population: use runner=evolution"):
        algo.receive(Samples((), rows, rows, rows, rows, rows, (), (), (), 0, 0))  # type: ignore[arg-type]
