"""IMPALA and APPO against numbers worked out by hand, and against A2C where they agree."""

import math
from typing import Any

import pytest
import torch

from rlframe.algos import a2c, appo, impala
from rlframe.core.errors import ConfigError
from rlframe.core.types import BatchSpec, Samples
from rlframe.envs import debug_envs
from rlframe.optimizers import AdamConfig
from tests.algos.table import one_step_episodes, table_agent
from tests.samplers.made import copied, sampler_for

HALF = math.log(0.5)  # log-probability of either action in the untrained table
PLAIN: dict[str, Any] = {"learning_rate": 6e-4, "entropy_coef": 0.0, "max_grad_norm": math.inf}

# The policy now gives 0.5; the one that sampled gave a third, all and half of it, so π/μ is 1.5, 0.5 and 1; and 2 on a
# row that does not count. Values are zero now, whatever they were: the advantage is the reward.
SAMPLED = [HALF - math.log(1.5), HALF - math.log(0.5), HALF, HALF - math.log(2)]


def stale() -> Samples:
    return one_step_episodes([1.0, -2.0, 3.0, 99.0], [7.0, 7.0, 7.0, 7.0], SAMPLED, [True, True, True, False])


def impala_update(samples: Samples, **config: Any) -> tuple[Any, dict[str, float]]:
    agent = table_agent(samples.reward.shape[1])
    algo = impala.IMPALA(agent, 1000, impala.Config(**{**PLAIN, **config}))
    algo.receive(samples)
    return agent.model, {name: float(value) for name, value in algo.update().items()}


def appo_update(samples: Samples, **config: Any) -> tuple[Any, dict[str, float]]:
    agent = table_agent(samples.reward.shape[1])
    settings = {**PLAIN, "epochs": 1, "minibatches": 1, "normalize_advantage": False, **config}
    algo = appo.APPO(agent, BatchSpec(*samples.reward.shape), 1000, appo.Config(**settings))
    algo.receive(samples)
    return agent.model, {name: float(value) for name, value in algo.update().items()}


def test_impala_weighs_rows_by_the_clipped_ratio_and_learns_values_of_the_new_policy() -> None:
    _, metrics = impala_update(stale(), value_coef=0.0)
    # ρ = 1, 0.5, 1 times A = 1, -2, 3; log π = log 0.5
    assert metrics["policy_loss"] == pytest.approx(-HALF * (1.0 - 1.0 + 3.0) / 3, abs=1e-6)
    # vs - V = ρ A
    assert metrics["value_loss"] == pytest.approx(0.5 * (1 + 1 + 9) / 3, abs=1e-6)
    assert metrics["clip_fraction"] == pytest.approx(1 / 3)
    assert metrics["kl"] == pytest.approx((0.5 - math.log(1.5) - 0.5 - math.log(0.5)) / 3, abs=1e-6)
    # d log p / d logits = (0.5, -0.5) for each row, times ρ A = 1, -1, 3, over 3 rows
    assert metrics["grad_norm"] == pytest.approx(math.sqrt(0.5 * (1 + 1 + 9)) / 3, abs=1e-6)


def test_a_higher_rho_clip_lets_ratios_through() -> None:
    _, metrics = impala_update(stale(), value_coef=0.0, rho_clip=2.0)
    assert metrics["policy_loss"] == pytest.approx(-HALF * (1.5 - 1.0 + 3.0) / 3, abs=1e-6)
    assert metrics["clip_fraction"] == 0.0


def test_appos_first_gradient_is_impalas() -> None:
    one, of_impala = impala_update(stale(), optimizer="adam")
    other, of_appo = appo_update(stale(), learning_rate=6e-4)
    assert of_appo["grad_norm"] == pytest.approx(of_impala["grad_norm"], abs=1e-6)
    torch.testing.assert_close(one.logits, other.logits)
    torch.testing.assert_close(one.value, other.value)
    assert of_appo["clip_fraction"] == 0.0
    assert of_appo["policy_loss"] == pytest.approx(-(1.0 - 1.0 + 3.0) / 3, abs=1e-6), "every ratio is 1 at first"


def test_appo_clips_what_has_moved_since_the_batch_arrived() -> None:
    _, metrics = appo_update(stale(), epochs=40, learning_rate=0.1, clip=0.1)
    assert 0.5 < metrics["clip_fraction"] < 1.0


def test_appo_and_impala_forget_rows_that_are_not_valid() -> None:
    for update in (impala_update, appo_update):
        model, metrics = update(stale())
        assert model.logits[3].tolist() == [0.0, 0.0]
        assert float(model.value[3].detach()) == 0.0
        assert all(math.isfinite(value) for value in metrics.values())


@pytest.mark.parametrize("memory", ["none", "lstm"])
def test_impala_on_the_newest_policy_is_a2c_with_n_step_returns(memory: str) -> None:
    def learned(module: Any, **more: Any) -> tuple[Any, dict[str, float]]:
        sampler, agent = sampler_for(
            debug_envs.time_limit, T=7, B=3, length=4, model_memory=memory, model_memory_size=4
        )
        settings = {**PLAIN, "learning_rate": 1e-2, "optimizer": "adam", **more}
        algo = module.Config(**settings).make_algorithm(agent, sampler.batch_spec, 1000, 0)
        for _ in range(4):
            algo.receive(copied(sampler.collect()))
            metrics = algo.update()
        return agent, {name: float(value) for name, value in metrics.items()}

    (one, of_one), (other, of_other) = learned(a2c), learned(impala, optimizer=AdamConfig(epsilon=1e-5))
    for name, tensor in one.state_dict().items():
        torch.testing.assert_close(tensor, other.state_dict()[name], rtol=1e-4, atol=1e-5)
    for name in ("policy_loss", "value_loss", "entropy", "grad_norm"):
        assert of_other[name] == pytest.approx(of_one[name], rel=1e-3, abs=1e-5)
    assert of_other["kl"] == pytest.approx(0.0, abs=1e-6)


def test_settings_out_of_range_are_refused() -> None:
    agent, spec = table_agent(2), BatchSpec(4, 2)
    with pytest.raises(ValueError, match=r"rho_clip=0.5 must be at least algo.c_clip=1.0"):
        impala.IMPALA(agent, 10, impala.Config(rho_clip=0.5))
    with pytest.raises(ConfigError, match=r"algo.minibatches=3 must divide"):
        appo.APPO(agent, spec, 10, appo.Config(minibatches=3))
