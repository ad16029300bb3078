"""init=: a new run begins with another run's network, and init_optimizer=true its moments, or says why it cannot."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import rlframe
from rlframe.core.errors import ConfigError
from rlframe.experiment.weights import load_optimizers

KEYS: dict[str, Any] = {
    "sampler": "serial",
    "sampler.batch_T": 8,
    "sampler.batch_B": 2,
    "runner.log_interval_steps": 32,
    "eval.n_episodes": 0,
    "model.hidden": [8],
    "device": "cpu",
    "threads": 1,
    "affinity": "none",
}
TD3: dict[str, Any] = {"algo.learning_starts": 0, "algo.batch_size": 4, "algo.replay_ratio": 4, "algo.replay.size": 500}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with rlframe.build("td3", "Pendulum-v1", n_steps=64, **KEYS, **TD3) as run:
        run.train()
        yield run.save(tmp_path_factory.mktemp("run") / "saved").parents[1]


def state_of(algo: Any, name: str) -> Any:
    return vars(algo)[name].state_dict()["state"]


def test_a_new_run_has_the_moments_of_the_other_one(saved: Path) -> None:
    again = {**KEYS, **TD3, "init": str(saved)}
    with rlframe.restore(saved, n_steps=128) as old:
        with rlframe.build("td3", "Pendulum-v1", n_steps=64, **again, init_optimizer=True) as run:
            for name in ("optimizer", "critic_optimizer"):
                assert state_of(old.algo, name)[0]["step"] > 0
                torch.testing.assert_close(state_of(run.algo, name), state_of(old.algo, name), rtol=0, atol=0)
            assert run.config["init_optimizer"] is True
            run.train()
        with rlframe.build("td3", "Pendulum-v1", n_steps=64, **again) as run:
            assert state_of(run.algo, "optimizer")[0]["step"] == 0


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"algo.optimizer": "rmsprop"}, "has no square_avg of parameter 0, only step, exp_avg, exp_avg_sq"),
        ({"algo.optimizer": "muon", "algo.optimizer.smallest": 2}, "is not Muon; load a state of the same optimizer"),
        ({"algo.optimizer": "torch.optim:NAdam"}, "is not OwnOptimizer; load a state of the same optimizer"),
    ],
)
def test_a_state_of_another_kind_is_refused_in_one_line(saved: Path, keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        rlframe.build("td3", "Pendulum-v1", n_steps=64, **KEYS, **TD3, **keys, init=str(saved), init_optimizer=True)
    assert str(error.value).startswith("init_optimizer=true: ")
    assert "\n" not in str(error.value)


def test_a_snapshot_without_such_an_optimizer_is_refused() -> None:
    with rlframe.build("td3", "Pendulum-v1", n_steps=64, **KEYS, **TD3) as run:
        state = run.algo.state_dict()
        del state["critic_optimizer"]
        with pytest.raises(ConfigError, match="RUN has no state of critic_optimizer; use init= alone"):
            load_optimizers(run.algo, state, "RUN")


@pytest.mark.parametrize("explore", [{"explore": "gaussian"}, {"explore": "parameter_noise", "explore.sigma": 0.5}])
def test_a_new_run_has_the_network_of_the_other_one_and_its_own_exploration(
    explore: dict[str, Any], tmp_path: Path
) -> None:
    with rlframe.build("td3", "Pendulum-v1", n_steps=64, **KEYS, **TD3, explore="parameter_noise") as old:
        old.train()
        path = old.save(tmp_path / "saved")
        with rlframe.build("td3", "Pendulum-v1", n_steps=64, **KEYS, **TD3, **explore, init=str(path)) as run:
            torch.testing.assert_close(run.agent.model.state_dict(), old.agent.model.state_dict(), rtol=0, atol=0)
            found = run.agent.exploration.state_dict()
    assert float(found.get("sigma", 0.5)) == 0.5


def test_another_network_is_refused_in_one_line(saved: Path) -> None:
    with pytest.raises(ConfigError, match=r"holds another network: .*mlp") as error:
        rlframe.build("td3", "Pendulum-v1", n_steps=64, **KEYS, **TD3, explore="gsde", init=str(saved))
    assert "\n" not in str(error.value)
