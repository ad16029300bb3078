"""sampler.wait_s: rows of environments that wait are absent, and everything else stands where it belongs."""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

from rlframe.algos import ddpg, ppo
from rlframe.core.seeding import Role, env_seeds
from rlframe.core.struct import as_numpy
from rlframe.core.types import Samples
from rlframe.envs import EnvConfig
from rlframe.exploration import OrnsteinUhlenbeckConfig
from rlframe.launch import main
from rlframe.models import ModelConfig
from rlframe.rollout.inference import BatchInference, empty_batch
from rlframe.rollout.worker_pool import WorkerPool
from rlframe.samplers import GpuSampler
from tests.samplers import faulty
from tests.samplers.batch_history import BatchHistory, without_diagnostics
from tests.samplers.faulty import Coded, Fault
from tests.samplers.made import agent_for, copied
from tests.samplers.supervised import FAULTY_SEED, collected, workers_for
from tests.variants import variants

B, SLOW_S = 4, 0.02
SEEDS = env_seeds(0, Role.ENV, B)


class Counting(gym.Env[Any, Any]):
    """Observes its step, the action before and its episode; the reward is 10 step + action. One of a seed is slow."""

    action_space = gym.spaces.Discrete(5)
    observation_space = gym.spaces.Box(-1e6, 1e6, (3,), np.float32)

    def __init__(self, slow: int, length: int = 7) -> None:
        self.slow_seed, self.length, self.episode, self.is_slow = slow, length, 0, False

    def _observation(self, action: int) -> np.ndarray:
        return np.array([self.t, action, self.episode], np.float32)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.is_slow = self.is_slow if seed is None else seed == self.slow_seed
        self.t, self.episode = 0, self.episode + 1
        if self.is_slow:
            time.sleep(SLOW_S)
        return self._observation(-1), {}

    def step(self, action: Any) -> Any:
        if self.is_slow:
            time.sleep(SLOW_S)
        self.t += 1
        return self._observation(int(action)), 10.0 * self.t + action, False, self.t == self.length, {"n": self.t}


@contextmanager
def sampling(T: int = 5, wait_s: float = 0.0, config: Any = None, n_groups: int = 1) -> Iterator[tuple[Any, Any]]:
    config = config or ppo.Config()
    env = EnvConfig(Counting, {"slow": SEEDS[0]}, "python")
    pool = WorkerPool(env, B, SEEDS, B)
    agent = config.make_agent(pool.observation_space, pool.action_space, ModelConfig(hidden=(8,), feed_back=True), 0)
    with closing(GpuSampler(pool, agent, T, n_groups=n_groups, wait_s=wait_s)) as sampler:
        yield sampler, agent


def in_a_row(batches: list[Samples], env: int) -> list[dict[str, Any]]:
    """The rows of an environment that acted or are last observations, each with its inputs."""
    rows = []
    for samples in batches:
        for t in range(len(samples.valid)):
            inputs = samples.inputs[t, env]
            row = {
                "observation": inputs.observation.tolist(),
                "previous": (int(inputs.prev_action), float(inputs.prev_reward)),
                "first": bool(inputs.first),
                "action": int(samples.action[t, env]),
                "reward": float(samples.reward[t, env]),
                "truncated": bool(samples.truncated[t, env]),
                "valid": bool(samples.valid[t, env]),
                "same": samples.inputs[t + 1, env],
                "inputs": inputs,
            }
            is_last = not row["valid"] and not row["first"] and bool(samples.inputs.first[t + 1, env])
            assert not (is_last and rows) or (rows[-1]["valid"] and rows[-1]["truncated"])
            if row["valid"] or is_last:
                rows.append(row)
            else:  # absent: it repeats its inputs, and its action and reward are those before it
                assert not row["truncated"]
                assert (row["action"], row["reward"]) == row["previous"]
                for one, other in zip(vars(row["same"]).values(), vars(inputs).values(), strict=True):
                    assert torch.equal(torch.as_tensor(one), torch.as_tensor(other))
    return rows


@pytest.mark.parametrize("n_groups", variants([1, 2], [1]))
def test_each_action_has_its_reward_and_next_observation_whoever_waits(n_groups: int) -> None:
    with sampling(n_groups=n_groups) as (sampler, agent):
        batches, episodes = [], []
        for _ in range(40):
            batches.append(samples := copied(sampler.collect()))
            episodes += sampler.trajectories()
            log_prob, _, value = agent.evaluate(samples.inputs[:-1], (), samples.action)
            for one, other in ((log_prob, samples.info.log_prob), (value, samples.info.value)):  # type: ignore[attr-defined]
                torch.testing.assert_close(one[samples.valid], other[samples.valid], rtol=1e-4, atol=1e-5)
    n_valid = [sum(int(samples.valid[:, env].sum()) for samples in batches) for env in range(B)]
    assert sum(n_valid) == sum(samples.n_env_steps for samples in batches)
    assert 0 < n_valid[0] < max(n_valid[1:]), "the slow one waited"
    for env in range(B):
        rows = in_a_row(batches, env)
        assert [samples.start for samples in batches] == [5 * i for i in range(40)]
        for row, after in pairwise(rows):
            if row["valid"]:
                t, action = row["observation"][0] + 1, row["action"]
                assert row["reward"] == 10 * t + action
                assert after["observation"] == [t, action, row["observation"][2]]
                assert after["previous"] == (action, row["reward"])
                assert row["truncated"] == (t == 7)
                assert not after["first"]
            else:
                assert (after["observation"], after["first"]) == ([0, -1, row["observation"][2] + 1], True)
    assert episodes
    assert all((each.length, each.diagnostics["n"]) == (7, 4.0) for each in episodes)


@pytest.mark.slow
def test_with_time_enough_nobody_waits_and_the_samples_are_those_of_waiting_for_all() -> None:
    with sampling(wait_s=60.0) as (one, _), sampling(wait_s=math.inf) as (other, _):
        for _ in range(4):
            a, b = one.collect(), other.collect()
            for x, y in zip((a.action, a.reward, a.valid), (b.action, b.reward, b.valid), strict=True):
                assert torch.equal(x, y)


def test_an_environment_that_waits_keeps_the_state_of_its_exploration() -> None:
    space, actions = gym.spaces.Box(-1, 1, (3,)), gym.spaces.Box(-1, 1, (2,))
    agent = ddpg.Config(explore=OrnsteinUhlenbeckConfig()).make_agent(space, actions, ModelConfig(hidden=(8,)))
    batch = empty_batch(space, actions, agent, 2, 3)
    inference = BatchInference(agent, batch, 0, [np.random.default_rng(i) for i in range(3)], True, 4)
    inference.draw_noise()
    inference.act(0)
    before, waits = np.copy(as_numpy(inference._step.state.own)), np.array([True, False, True])
    inference.act(1, waits)
    after = as_numpy(inference._step.state.own)
    np.testing.assert_array_equal(before[:3][waits], after[:3][waits])
    assert (before[1] != after[1]).all()


def test_batches_may_begin_with_a_last_observation() -> None:
    with sampling(T=7, wait_s=math.inf) as (sampler, _):  # the reset after seven steps is in the second batch
        sampler.collect()
        rows = in_a_row([copied(sampler.collect())], 1)
    assert [row["observation"][0] for row in rows] == [7, 0, 1, 2, 3, 4, 5]
    assert [row["valid"] for row in rows] == [False] + [True] * 6


def test_a_worker_that_dies_in_a_step_is_replaced_and_its_episodes_truncated(tmp_path: Path) -> None:
    faults = (Fault(faulty.kill, at=13, seed=FAULTY_SEED, path=str(tmp_path / "fault")),)
    with workers_for(Coded, {"faults": faults}) as envs:  # the others have answered before a process is replaced
        sampler = GpuSampler(envs, agent_for(envs.observation_space, envs.action_space), 8, wait_s=60.0)
        history = BatchHistory(collected(sampler, 4))
        assert without_diagnostics(sampler.trajectories()) == history.ended
    ((t, _), (same_t, _)) = history.interruptions
    assert history.interruptions == [(t, 2), (same_t, 3)]
    assert t == same_t
    assert t % 8, "so that the last row of the episodes is in the same batch"


@pytest.mark.slow
def test_a_worker_that_dies_while_its_environment_waits_is_replaced_and_the_others_go_on() -> None:
    with sampling(T=40) as (sampler, _):
        sampler.collect()
        worker = sampler.envs.workers[0]
        os.kill(worker.child.pid, signal.SIGKILL)
        worker.child._process.join(5)
        batches, deadline = [], time.monotonic() + 20
        while time.monotonic() < deadline and not (sampler.envs.restarts and batches[-1].valid[:, 0].any()):
            batches.append(copied(sampler.collect()))
        assert sampler.envs.restarts == 1
        rows, first = batches[-1], batches[-1].inputs.first[:, 0]
        assert first.any(), "its new episode begins"
        assert (rows.inputs.observation[first, 0, 0] == 0).all()
        for env in range(1, B):
            assert sum(row["valid"] for row in in_a_row(batches, env)) > 10


@pytest.mark.slow
def test_a_reset_drops_what_is_not_finished() -> None:
    with sampling() as (sampler, _):
        sampler.collect()
        sampler.collector.reset()
        samples = sampler.collect()
        assert samples.inputs.first[0].all()
        assert (samples.inputs.observation[0, :, 0] == 0).all()
        assert sampler.state_dict().keys() == {"noise"}


REFUSED = {
    "sampler.wait_s=0.1 sampler.complete_episodes=true": "sampler.wait_s=0.1 cannot be used with",
    "sampler.wait_s=0 sampler.env_restarts=2": "cannot be used with sampler.env_restarts; leave one out",
    "sampler.wait_s=-1": "sampler.wait_s=-1.0 must be at least 0",
    "sampler.wait_s=0 model.memory=lstm": "is for policies without memory",
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_it_cannot_be_used_with_is_refused(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env=CartPole-v1", "sampler=gpu", "sampler.n_workers=2", "eval.n_episodes=0", *words.split()]) == 2
    assert REFUSED[words] in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        "algo=ppo algo.minibatches=1 sampler.batch_T=16",
        "algo=dqn algo.learning_starts=50 algo.n_step=3 algo.prioritized=true sampler.batch_T=4",
        "algo=impala runner=async_rl sampler.batch_T=16",
        "algo=dqn algo.learning_starts=50 sampler.batch_T=4 sampler.n_groups=2",
    ],
)
def test_a_run_learns_and_is_resumed_with_new_episodes(words: str, tmp_path: Path) -> None:
    env = "env=tests.samplers.test_first_ready:make_slow sampler=gpu sampler.n_workers=4 sampler.batch_B=4"
    run = f"{env} sampler.wait_s=0.001 eval.n_episodes=0 model.hidden=[8] runner.log_interval_steps=200 {words}"
    assert main([*run.split(), "runner.n_steps=400", f"log_dir={tmp_path}"]) == 0
    assert main([f"resume={tmp_path}/run_0", "trust=true", "runner.n_steps=600", "sampler.wait_s=0.5"]) == 0
    log = (tmp_path / "run_0/debug.log").read_text(encoding="utf-8")
    assert "running episodes start anew" in log


def make_slow() -> Counting:
    return Counting(slow=SEEDS[0])


@pytest.mark.slow
def test_a_run_goes_on_from_the_state_of_a_sampler_that_waited_for_all() -> None:
    with sampling(wait_s=math.inf) as (one, _), sampling(wait_s=0.0) as (other, _):
        one.collect()
        last = copied(one.collect())
        assert other.load_state_dict(one.state_dict()) == [""] * B
        batches = [copied(other.collect()) for _ in range(10)]
    assert torch.equal(batches[0].inputs.observation[0], last.inputs.observation[-1])
    for env in range(B):
        rows = in_a_row(batches, env)
        for row, after in pairwise(rows):
            if row["valid"]:
                assert after["observation"][:2] == [row["observation"][0] + 1, row["action"]]
