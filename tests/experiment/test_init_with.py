"""init=: a new run begins with what another run has learned, as far as init_with says, or says why it cannot."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

import rlframe
from rlframe.core.config import AUTO
from rlframe.core.errors import ConfigError
from rlframe.core.struct import leaves
from rlframe.experiment.settings import from_flat
from rlframe.experiment.weights import load_networks, load_optimizers, saved_algorithm
from rlframe.record import codec

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
TD3: dict[str, Any] = {"algo.learning_starts": 0, "algo.batch_size": 4, "algo.replay_ratio": 1, "algo.replay.size": 500}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with rlframe.build("td3", "Pendulum-v1", n_steps=64, **KEYS, **TD3) as run:
        run.train()
        yield run.save(tmp_path_factory.mktemp("run") / "saved").parents[1]


SAC: dict[str, Any] = {"algo.normalize_return": True, "algo.temperature": 0.7, "model.norm": "batch"}


@pytest.fixture(scope="module")
def saved_sac(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with rlframe.build("sac", "Pendulum-v1", n_steps=64, **KEYS, **TD3, **SAC) as run:
        run.train()
        yield run.save(tmp_path_factory.mktemp("run") / "saved").parents[1]


@pytest.mark.parametrize("init_with", ["agent", "optimizers"])
def test_a_run_that_began_with_another_is_loaded_and_continued_like_any(
    init_with: str, saved: Path, tmp_path: Path
) -> None:
    begun = {**KEYS, **TD3, "init": str(saved), "init_with": init_with}
    with rlframe.build("td3", "Pendulum-v1", n_steps=64, **begun) as run:
        run.train()
        run.save(tmp_path)
    assert rlframe.load_policy(tmp_path).act([1.0, 0.0, 0.0]).shape == (1,)
    with rlframe.restore(tmp_path, n_steps=128) as run:
        assert run.train()["env_steps"] == 128
        assert run.config["init_with"] == init_with


def learned(algo: Any) -> dict[str, Any]:
    statistics = algo.scaled_returns.state_dict()["statistics"]
    return {"critic": algo.critic.state_dict(), "temperature": algo.temperature.state_dict(), "returns": statistics}


@pytest.mark.parametrize("init_with", ["networks", "agent"])
def test_a_new_run_has_the_critics_temperature_and_scale_of_the_other_one_unless_it_takes_the_agent_alone(
    init_with: str, saved_sac: Path
) -> None:
    again = {**KEYS, **TD3, **SAC, "n_steps": 64, "seed": 5, "algo.learning_starts": 50, "sampler.batch_B": 1}
    with (
        rlframe.restore(saved_sac, n_steps=128) as old,
        rlframe.build("sac", "Pendulum-v1", **again, init=str(saved_sac), init_with=init_with) as run,
    ):
        torch.testing.assert_close(run.agent.model.state_dict(), old.agent.model.state_dict(), rtol=0, atol=0)
        is_taken = init_with == "networks"
        before = learned(old.algo)
        for name, part in learned(run.algo).items():
            pairs = zip(leaves(part), leaves(before[name]), strict=True)
            assert all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in pairs) == is_taken, name
        assert state_of(run.algo, "critic_optimizer")[0]["step"] == 0
        assert not run.agent.random
        run.train()
        said = f"the agent, scaled_returns, critic, temperature of {saved_sac}" if is_taken else ""
        assert run.algo.origin == said


def test_no_row_of_the_other_replay_is_read(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "_decode_array", Mock(side_effect=AssertionError("read")))
    found = saved_algorithm(str(saved), "")
    assert {"critic", "optimizer"} < {*found}
    assert "replay" not in found


def test_a_policy_with_weights_acts_from_the_first_step_also_once_its_run_is_resumed() -> None:
    words = {"algo": "sac", "env": "Pendulum-v1"}
    for keys, steps in (({}, AUTO), ({"init": "RUN"}, 0), ({"init": "RUN", "algo.random_steps": 7}, 7)):
        experiment = from_flat({**words, **keys})
        assert experiment.without_init().algo.random_steps == experiment.acting_at_once().algo.random_steps == steps


def test_networks_that_the_other_run_has_not_begin_anew_and_the_log_says_which(saved: Path) -> None:
    with rlframe.build("sac", "Pendulum-v1", n_steps=64, **KEYS, **TD3) as run:
        before = learned(run.algo)
        load_networks(run.algo, {"progress": 1}, "RUN")
        torch.testing.assert_close(learned(run.algo), before, rtol=0, atol=0)
    assert run.algo.origin == "the agent of RUN; scaled_returns, critic, temperature begin anew, which that run has not"


def test_other_critics_are_refused_with_a_remedy(saved: Path) -> None:
    keys = {**KEYS, **TD3, "model.critic.hidden": [4], "init": str(saved)}
    with pytest.raises(ConfigError, match=r"has another critic: .*; use init_with=agent"):
        rlframe.build("td3", "Pendulum-v1", n_steps=64, **keys)
    rlframe.build("td3", "Pendulum-v1", n_steps=64, **keys, init_with="agent").close()


def state_of(algo: Any, name: str) -> Any:
    return vars(algo)[name].state_dict()["state"]


def test_a_new_run_has_the_moments_of_the_other_one(saved: Path) -> None:
    again = {**KEYS, **TD3, "init": str(saved)}
    with rlframe.restore(saved, n_steps=128) as old:
        with rlframe.build("td3", "Pendulum-v1", n_steps=64, **again, init_with="optimizers") as run:
            for name in ("optimizer", "critic_optimizer"):
                assert state_of(old.algo, name)[0]["step"] > 0
                torch.testing.assert_close(state_of(run.algo, name), state_of(old.algo, name), rtol=0, atol=0)
            assert run.config["init_with"] == "optimizers"
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
        rlframe.build("td3", "Pendulum-v1", n_steps=64, **KEYS, **TD3, **keys, init=str(saved), init_with="optimizers")
    assert str(error.value).startswith("init_with=optimizers: ")
    assert "\n" not in str(error.value)


def test_a_snapshot_without_such_an_optimizer_is_refused() -> None:
    with rlframe.build("td3", "Pendulum-v1", n_steps=64, **KEYS, **TD3) as run:
        state = run.algo.state_dict()
        del state["critic_optimizer"]
        with pytest.raises(ConfigError, match="RUN has no state of critic_optimizer; use init_with=networks"):
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
