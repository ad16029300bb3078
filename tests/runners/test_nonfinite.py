"""Updates with NaN or Inf are not applied, their batch is saved, and the run stops or continues."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from rlframe.agents import Agent
from rlframe.algos import Algorithm, a2c, ddpg, dqn, impala, ppo, pqn, sac, td3
from rlframe.core.types import Samples
from rlframe.envs import EnvConfig, make_envs
from rlframe.models import ModelConfig
from rlframe.models.normalize import RunningNorm
from rlframe.record import logger_context
from rlframe.record.snapshot import list_snapshots, load_snapshot, resolve_snapshot
from rlframe.replay import InMemory
from rlframe.runners import Learner, MinibatchRl, RunnerConfig
from rlframe.runners.learner import Diverged
from rlframe.samplers import SerialSampler
from tests.algos.played import graphs_of, play
from tests.variants import variants

OFF_POLICY: dict[str, Any] = {
    "learning_starts": 32,
    "batch_size": 32,
    "replay_ratio": 4.0,
    "replay": InMemory(size=256),
}
CONFIGS = {
    "ppo": ("CartPole-v1", ppo.Config(minibatches=2, epochs=1)),
    "a2c": ("CartPole-v1", a2c.Config()),
    "impala": ("CartPole-v1", impala.Config(optimizer="rmsprop")),
    "pqn": ("CartPole-v1", pqn.Config(minibatches=2, epochs=1)),
    "dqn": ("CartPole-v1", dqn.Config(**OFF_POLICY)),
    "prioritized": ("CartPole-v1", dqn.Config(prioritized=True, **OFF_POLICY)),
    "sac": ("Pendulum-v1", sac.Config(**OFF_POLICY)),
    "td3": ("Pendulum-v1", td3.Config(**OFF_POLICY)),
    "ddpg": ("Pendulum-v1", ddpg.Config(**OFF_POLICY)),
}
SMALL = ModelConfig(hidden=(8,))
BATCH = 4  # the first with a wrong value


class Poisoned(SerialSampler):
    """Puts one wrong value into every batch from the fourth on, as if the environment's checks had missed it."""

    field, value, n = "reward", np.nan, 0

    def collect(self) -> Samples:
        samples = super().collect()
        self.n += 1
        if self.n >= BATCH:
            target = samples.reward if self.field == "reward" else samples.inputs.observation
            target[5, 1] = self.value
        return samples


def parts(name: str, model: ModelConfig = SMALL) -> tuple[Poisoned, Agent, Algorithm]:
    env, config = CONFIGS[name]
    envs = make_envs(EnvConfig(env, backend="python"), 4, [0, 1, 2, 3])
    agent = config.make_agent(envs.observation_space, envs.action_space, model, 0)
    sampler = Poisoned(envs, agent, batch_T=16)
    return sampler, agent, config.make_algorithm(agent, sampler.batch_spec, 512, 0)


def all_finite(agent: Agent) -> bool:
    return all(bool(x.isfinite().all()) for x in agent.state_dict().values())


@pytest.mark.parametrize("name", variants(CONFIGS, ("ppo", "dqn", "sac")))
def test_a_reward_that_is_nan_is_not_learned_from_and_ends_the_run(name: str, tmp_path: Path) -> None:
    sampler, agent, algo = parts(name)
    wrong = pytest.raises(Diverged, match=r"loss nan.*reward|loss nan.*return_")
    with wrong as caught, logger_context(tmp_path, console=False) as run:
        MinibatchRl(sampler, Learner(agent, algo), RunnerConfig(n_steps=512, log_interval_steps=64)).train()
    assert all_finite(agent)
    snapshot = resolve_snapshot(run.directory)
    assert str(snapshot) in str(caught.value)
    assert load_snapshot(snapshot)[1]["env_steps"] < algo.progress.env_steps
    facts = json.loads(next(run.directory.glob("nonfinite_*.json")).read_text())
    assert facts["loss"] == "nan"
    assert sum(facts["not_finite_in_batch"].values()) >= 1
    arrays = load_file(next(run.directory.glob("nonfinite_*.safetensors")))
    assert any(not np.isfinite(array).all() for key, array in arrays.items() if ".batch." in key)


@pytest.mark.parametrize("name", variants(["ppo", "dqn", "prioritized", "sac"], ("ppo", "prioritized")))
@pytest.mark.parametrize("field", ["reward", "observation"])
def test_skipping_trains_to_the_end_with_finite_parameters_and_counts(name: str, field: str, tmp_path: Path) -> None:
    sampler, agent, algo = parts(name, ModelConfig(hidden=(8,), normalize_observation=True))
    sampler.field = field
    with logger_context(tmp_path, console=False) as run:
        row = MinibatchRl(
            sampler, Learner(agent, algo), RunnerConfig(n_steps=512, log_interval_steps=128, nonfinite="skip")
        ).train()
    assert row["env_steps"] >= 512
    assert row["algo/skipped"] >= 1
    assert all_finite(agent)
    assert len(list(run.directory.glob("nonfinite_*.safetensors"))) == 1, "the first is saved, the others are counted"


@pytest.mark.parametrize("name", ["ppo", "td3", "sac"])  # DQN's Huber loss tolerates it
def test_a_loss_that_explodes_is_handled_like_nan(name: str) -> None:
    sampler, agent, algo = parts(name)
    sampler.value = 1e38
    if name == "ppo":  # normalised advantages and a clipped gradient tolerate much
        algo.config = ppo.Config(minibatches=2, epochs=1, normalize_advantage=False)
    before: dict[str, torch.Tensor] = {}
    update = algo.update

    def remembering() -> Any:
        before.update({key: value.clone() for key, value in agent.state_dict().items()})
        return update()

    algo.update = remembering  # type: ignore[method-assign]
    with pytest.raises(Diverged, match="was not applied"):
        MinibatchRl(sampler, Learner(agent, algo), RunnerConfig(n_steps=512, log_interval_steps=512)).train()
    assert all_finite(agent)
    if name == "ppo":  # actors of the others learn from the unchanged critics
        assert all(torch.equal(value, before[key]) for key, value in agent.state_dict().items())


def test_a_critic_that_is_not_finite_is_in_no_snapshot(tmp_path: Path) -> None:
    sampler, agent, algo = parts("sac")
    with torch.no_grad():
        algo.online[0].fill_(torch.nan)  # a critic, which does not act
    with pytest.raises(Diverged, match="a parameter is NaN"), logger_context(tmp_path, console=False):
        MinibatchRl(sampler, Learner(agent, algo), RunnerConfig(n_steps=512, log_interval_steps=16)).train()
    assert not list_snapshots(tmp_path / "run_0/snapshot")


@pytest.mark.parametrize("name", ["ppo", "dqn", "sac"])
def test_a_nonfinite_update_of_a_cuda_graph_ends_the_run_and_is_saved(name: str, tmp_path: Path) -> None:
    sampler, agent, algo = parts(name, ModelConfig(hidden=(8,), activation="relu"))
    play(algo)
    wrong = pytest.raises(Diverged, match=r"loss nan.*(reward|return_|advantage)")
    with wrong, logger_context(tmp_path, console=False) as run:
        MinibatchRl(sampler, Learner(agent, algo), RunnerConfig(n_steps=512, log_interval_steps=64)).train()
    assert {graph.captured for graph in graphs_of(algo)} == {True}
    assert all_finite(agent)
    arrays = load_file(next(run.directory.glob("nonfinite_*.safetensors")))
    assert any(not np.isfinite(array).all() for key, array in arrays.items() if ".batch." in key)


def test_a_skipped_update_does_not_change_the_optimizer() -> None:
    sampler, _, algo = parts("ppo")
    for _ in range(BATCH - 1):
        algo.receive(sampler.collect())
        algo.update()
    before = json.dumps(algo.optimizer.state_dict()["state"], default=lambda x: x.tolist())
    algo.receive(sampler.collect())
    algo.update()
    assert algo.progress.skipped == CONFIGS["ppo"][1].minibatches
    assert json.dumps(algo.optimizer.state_dict()["state"], default=lambda x: x.tolist()) == before


def test_running_statistics_ignore_batches_that_are_not_finite() -> None:
    norm, twin = RunningNorm((2,)), RunningNorm((2,))
    good = torch.randn(16, 2, generator=torch.Generator().manual_seed(0))
    bad = good.clone()
    bad[3, 1] = torch.inf
    norm.update(bad)
    norm.update(good)
    norm.update(bad)
    twin.update(good)
    assert all(torch.equal(a, b) for a, b in zip(norm.buffers(), twin.buffers(), strict=True))
