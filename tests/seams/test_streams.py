"""Streams: who played a batch, rows where nobody acted, and batches that stay on their device."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from rlframe.algos import a2c, appo, dqn, impala, pg, ppo, pqn
from rlframe.core.struct import Struct, leaves, map_tree
from rlframe.core.types import BatchSpec, Samples
from rlframe.envs import EnvConfig, EnvOptions, make_envs
from rlframe.models import ModelConfig
from rlframe.replay import FixedSequence, NStep, OnDevice, ReplayBuffer
from rlframe.rewards.normalize import NormalizedRewards
from rlframe.samplers import SerialSampler
from rlframe.updates.optimizer_step import OptimizerStep
from tests.replay.buffers import replay_for, same
from tests.replay.history import History

N_ABSENT = 10  # rows


def two_streams(kind: str, reader: Any, alpha: float = 0.0) -> tuple[ReplayBuffer[Any], list[History]]:
    """A replay of two streams, with ten batches of each in turns."""
    histories = [History(2, kind, seed=number, stream=5 + number) for number in range(2)]
    replay = replay_for(histories[0], reader, L=200, alpha=alpha, previous=True, n_streams=2)
    for _ in range(10):
        for history in histories:
            replay.append(history.batch(4))
    return replay, histories


@pytest.mark.parametrize("alpha", [0.0, 0.6])
@pytest.mark.parametrize("kind", ["vector", "frames"])
@pytest.mark.parametrize("n", [1, 3])
def test_two_alternating_streams_in_one_replay_truncate_nothing(kind: str, n: int, alpha: float) -> None:
    replay, histories = two_streams(kind, NStep(0.5, n), alpha)
    assert replay.n_rows == sum(row["valid"] for h in histories for each in h.rows[:-1] for row in each)
    found, before = replay.sample(300), replay._storages[0].rows_before
    for i, index in enumerate(found.index):
        number, stream = divmod(int(index), 2)
        history, time, env = histories[stream], number // 2 - before, number % 2
        return_, bootstrap, after = history.transition(time, env, n, 0.5)
        assert (found.return_[i], found.bootstrap[i]) == (return_, bootstrap)
        assert same(found.inputs.observation[i], history.at(time, env)["observation"])
        assert same(found.next_inputs.observation[i], after["observation"])
    assert {int(index) % 4 for index in found.index} == {0, 1, 2, 3}


def test_sequences_of_two_streams_go_on_from_batch_to_batch() -> None:
    replay, histories = two_streams("vector", FixedSequence(7))
    found = replay.sample(60)
    for i, index in enumerate(found.index):
        number, stream = divmod(int(index), 2)
        time, env = number // 2 - 1, number % 2
        for t in range(7):
            row = histories[stream].at(time + t, env)
            assert found.reward[t, i] == row["reward"]
            assert found.truncated[t, i] == row["truncated"]
            assert same(found.inputs.observation[t, i], row["observation"])
    assert {int(index) % 2 for index in found.index} == {0, 1}


def test_priorities_of_streams_are_apart() -> None:
    replay, histories = two_streams("vector", NStep(0.5), 1.0)
    index = np.unique(np.concatenate([replay.sample(400).index for _ in range(20)]))
    assert len(index) == replay.n_choices
    replay.update_priorities(index, np.where(index == index[7], 1.0, 0.0))
    assert set(replay.sample(20).index) == {index[7]}
    replay.append(histories[1].batch(4))
    assert set(replay.newest() % 2) == {1}
    found = replay.read(replay.newest())
    assert same(found.index, replay.newest())


def test_a_restored_replay_of_two_streams_samples_the_same() -> None:
    replay, histories = two_streams("both", NStep(0.5, 2), 0.6)
    other = replay_for(histories[0], NStep(0.5, 2), L=200, alpha=0.6, previous=True, n_streams=2)
    other.load_state_dict(replay.state_dict())
    assert other.newest().tolist() == replay.newest().tolist(), "of the stream that came last"
    for history in histories:
        batch = history.batch(4)
        replay.append(batch)
        other.append(batch)
        assert same(replay.sample(20, 0.5), other.sample(20, 0.5))


def test_more_streams_than_declared_raise_an_error() -> None:
    replay = replay_for(History(2))
    replay.append(History(2, stream=3).batch(4))
    with pytest.raises(ValueError, match=r"stream 4, but this replay was made for 1, and has 3; .*n_streams=2"):
        replay.append(History(2, stream=4).batch(4))


def with_absences(samples: Samples, places: Sequence[int]) -> Samples:
    """The same steps with ten absent rows before the row places[b] of each environment b, in which nothing is true."""
    T, B = samples.valid.shape
    at, time = torch.tensor(places), torch.arange(T + 1 + N_ABSENT)[:, None]
    absent = (time >= at) & (time < at + N_ABSENT)
    shown = torch.where(absent, at, torch.where(time < at, time, time - N_ABSENT))

    def moved(x: torch.Tensor) -> torch.Tensor:
        return torch.stack([x[shown[: len(x) + N_ABSENT, b], b] for b in range(B)], 1)

    inputs = samples.inputs.map(moved)
    if isinstance(inputs.observation, torch.Tensor) and inputs.observation.is_floating_point():
        inputs.observation[absent] = 99.0  # but the row from which the batch's end bootstraps
    action, reward = (moved(x) for x in (samples.action, samples.reward))
    for t in range(len(action)):  # absent rows repeat the action and the reward of the row before
        action[t] = torch.where(absent[t], action[t - 1], action[t])
        reward[t] = torch.where(absent[t], reward[t - 1], reward[t])
    no = ~absent[:-1]
    return replace(
        samples,
        inputs=replace(inputs, first=inputs.first & ~absent),
        action=action,
        reward=reward,
        terminated=moved(samples.terminated) & no,
        truncated=moved(samples.truncated) & no,
        valid=moved(samples.valid) & no,
        info=map_tree(moved, samples.info) if isinstance(samples.info, Struct) else samples.info,
    )


def in_batches(samples: Samples, T: int) -> list[Samples]:
    """Batches of T time steps."""
    found = []
    for start in range(0, len(samples.valid), T):
        rows = slice(start, start + T)
        parts = {name: getattr(samples, name)[rows] for name in ("action", "reward", "terminated", "truncated")}
        valid = samples.valid[rows]
        inputs = samples.inputs[start : start + T + 1]
        numbers = {"n_env_steps": int(valid.sum()), "start": start}
        found.append(replace(samples, inputs=inputs, valid=valid, **parts, **numbers))
    return found


def absent_places(history: History, T: int) -> list[int]:
    """A row of each environment in the middle of an episode."""
    rows = [[history.at(t, b) for t in range(T)] for b in range(history.B)]
    return [
        next(
            t for t in range(12 + 3 * b, T) if of_env[t]["valid"] and of_env[t - 1]["valid"] and not of_env[t]["first"]
        )
        for b, of_env in enumerate(rows)
    ]


def transitions(replay: ReplayBuffer[Any]) -> dict[Any, Any]:
    """All transitions that can be sampled, by their observation."""
    found = replay.sample(2500)
    parts = found.inputs, found.action, found.return_, found.bootstrap, found.next_inputs.observation
    rows = {}
    for i in np.unique(found.index, return_index=True)[1]:  # each once
        key = np.concatenate([x[i].numpy().ravel() for x in leaves(found.inputs.observation)]).tobytes()
        known = float(found.bootstrap[i]) > 0  # else the next row may be any
        rows[key] = [x[i].tolist() for x in leaves(parts if known else parts[:-1])]
    return rows


@pytest.mark.parametrize(
    "kind", [*(pytest.param(kind, marks=pytest.mark.slow) for kind in ("vector", "frames")), "both"]
)
@pytest.mark.parametrize("config", [{}, {"kind": "device"}, {"compress": True}], ids=str)
@pytest.mark.parametrize(
    ("n", "T"), [(1, 1), (3, 5), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((1, 5), (3, 30)))]
)
def test_a_column_invalid_for_ten_rows_is_replayed_as_if_they_were_absent(
    kind: str, config: dict[str, Any], n: int, T: int
) -> None:
    if "compress" in config and kind == "vector":
        pytest.skip("there are no frames to compress")
    history = History(3, kind, ends=0.03, black=False, seed=n + T)
    whole = history.batch(80)
    absent = with_absences(whole, absent_places(history, 60))
    one, other = (replay_for(history, NStep(0.5, n), T, 300, config, previous=True) for _ in range(2))
    for batch in in_batches(whole, T):
        one.append(batch)
    for batch in in_batches(absent, T):
        other.append(batch)
    found = transitions(one)
    assert found == transitions(other)
    assert len(found) == one.n_choices if not config.get("kind") else True


ON_POLICY = pytest.mark.parametrize(
    "config",
    [
        ppo.Config(minibatches=1, epochs=1),
        a2c.Config(),
        pg.Config(),
        impala.Config(),
        appo.Config(minibatches=1, epochs=1),
        pqn.Config(minibatches=1, epochs=1),
    ],
    ids=["ppo", "a2c", "pg", "impala", "appo", "pqn"],
)


def played(config: Any, n_batches: int = 1) -> tuple[Any, Any, list[Samples]]:
    """An agent, its algorithm, and batches [40, 4] of CartPole."""
    envs = make_envs(EnvConfig("CartPole-v1", backend="python"), 4, range(4))
    model = ModelConfig(hidden=(8,), normalize_observation=True)
    agent = config.make_agent(envs.observation_space, envs.action_space, model, 0)
    with closing(SerialSampler(envs, agent, 40)) as sampler:
        batches = [sampler.collect().map(torch.clone) for _ in range(n_batches)]
        return agent, config.make_algorithm(agent, sampler.batch_spec, 10_000, 0), batches


@ON_POLICY
def test_a_column_invalid_for_ten_rows_trains_as_if_they_were_absent(config: Any) -> None:
    agents = []
    for absent in (False, True):
        agent, algo, (samples,) = played(config)
        places = [next(t for t in range(3, 40) if samples.valid[t - 2 : t + 2, b].all()) for b in range(4)]
        learn(algo, [with_absences(samples, places) if absent else samples])
        assert algo.progress.updates
        agents.append(agent.state_dict())
    for name, one in agents[0].items():
        torch.testing.assert_close(one, agents[1][name], rtol=1e-4, atol=1e-6)


REPLAYED = pytest.mark.parametrize(
    "config",
    [
        dqn.Config(replay=OnDevice(size=2_000), learning_starts=64, batch_size=16, replay_ratio=1.0, n_step=n)
        for n in (1, 3)
    ],
    ids=["n=1", "n=3"],
)


class Reached(Exception):
    """A loss."""


def learn(algo: Any, batches: Sequence[Samples]) -> None:
    for batch in batches:
        algo.receive(batch)
        while algo.updates_due():
            algo.update()


def reach_loss(config: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The loss of the first update from batches of the meta device, any copy of which to the host is an error."""
    losses: list[torch.Tensor] = []

    def minimize(self: OptimizerStep, loss: torch.Tensor, *more: Any, **named: Any) -> torch.Tensor:
        losses.append(loss)
        raise Reached

    monkeypatch.setattr(OptimizerStep, "minimize", minimize)
    agent, _, batches = played(config, 2)
    agent = agent.to("meta")
    algo = config.make_algorithm(agent, BatchSpec(40, 4), 10_000, 0)
    rewards = NormalizedRewards(0.9, EnvOptions(normalize_reward=True))
    with pytest.raises(Reached):
        learn(algo, [rewards(batch.to("meta")) for batch in batches])
    return losses[0].device


@ON_POLICY
def test_a_batch_on_another_device_reaches_the_loss_without_a_host_copy(
    config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert reach_loss(config, monkeypatch) == torch.device("meta")


@REPLAYED
def test_a_batch_on_another_device_reaches_the_loss_through_replay_without_a_host_copy(
    config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert reach_loss(config, monkeypatch) == torch.device("meta")


def test_a_replay_on_a_device_draws_every_valid_row_alike() -> None:
    history = History(3, ends=0.2)
    on_device, on_host = (replay_for(history, NStep(0.5, 2), 5, 21, {"kind": kind}) for kind in ("device", "memory"))
    for _ in range(9):
        batch = history.batch(5)
        on_device.append(batch)
        on_host.append(batch)
    rows, counts = np.unique(on_device.sample(20_000).index.numpy(), return_counts=True)
    assert same(rows, np.unique(on_host.sample(20_000).index))
    assert len(rows) == on_host.n_choices
    np.testing.assert_allclose(counts, 20_000 / len(counts), rtol=0.25)
