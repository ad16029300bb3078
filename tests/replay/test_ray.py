"""Replay in Ray actors: the rows and probabilities of one buffer, exact order, snapshots, deaths, and refusals."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from rlframe.core.errors import ConfigError, StateLost
from rlframe.core.types import AgentInputs, BatchSpec, Samples
from rlframe.record.codec import ChunkedArray
from rlframe.record.snapshot import load_snapshot, save_snapshot
from rlframe.replay import FixedSequence, NStep, OnRay, ShardedReplay, make_replay
from rlframe.replay import shard as shard_module
from rlframe.replay.make import InMemory, ReplaySpec
from rlframe.replay.shard import Shard, map_objects, stored
from rlframe.replay.shards import Division
from tests.clusters import ray as ray
from tests.clusters import with_cluster
from tests.processes import until
from tests.replay.buffers import ACTIONS, same, space_of
from tests.replay.history import History
from tests.runners.resumed import assert_resumed_exactly


def sharded(history: History, reader: Any = None, n_streams: int = 1, seed: int = 0, **options: Any) -> Any:
    """A replay of 40 time steps in two actors, for batches of four."""
    given = {"size": 40 * history.B * n_streams, "n_shards": 2, "prefetch": 0, **options}
    alpha = given.pop("alpha", 0.0)
    return make_replay(
        OnRay(**given),
        space_of(history),
        ACTIONS,
        BatchSpec(4, history.B, n_streams),
        reader or NStep(0.5, 2),
        alpha=alpha,
        state=(torch.zeros(history.B, 2),) if isinstance(reader, FixedSequence) else (),
        previous=True,
        seed=seed,
    )


def batch_of(history: History) -> Samples:
    return Samples(**{**vars(history.batch(4)), "info": ()})


def filled(replay: Any, history: History, n: int = 6) -> Any:
    for _ in range(n):
        replay.append(batch_of(history))
    return replay


def assert_of_history(batch: Any, histories: list[History], n: int, discount: float) -> None:
    """Every row is a transition of one of the histories, found by its counter and stream."""
    for k in range(len(batch.return_)):
        observation = batch.inputs.observation["vector"][k]
        t, b = divmod(int(observation[0]) - 1, histories[0].B)
        fits = []
        for history in histories:
            if t >= len(history.rows) - 1:
                continue
            row = history.at(t, b)
            if not row["valid"]:
                continue
            return_, bootstrap, after = history.transition(t, b, n, discount)
            fits.append(
                row["action"] == int(batch.action[k])
                and return_ == float(batch.return_[k])
                and bootstrap == float(batch.bootstrap[k])
                and np.array_equal(row["observation"]["frames"], batch.inputs.observation["frames"][k].numpy())
                and np.array_equal(after["observation"]["frames"], batch.next_inputs.observation["frames"][k].numpy())
            )
        assert any(fits)


@with_cluster
@pytest.mark.parametrize("n_streams", [pytest.param(1, marks=pytest.mark.ray), 2, 3])
def test_rows_of_environments_and_streams_are_those_that_were_played(ray: Any, n_streams: int) -> None:
    histories = [History(3, "both", seed=stream, stream=stream) for stream in range(n_streams)]
    replay = sharded(histories[0], n_streams=n_streams)
    for _ in range(14):  # so that the ring wraps around
        for history in histories:
            replay.append(batch_of(history))
    batch = replay.sample(300)
    assert_of_history(batch, histories, 2, 0.5)
    counters = {int(x) for x in batch.inputs.observation["vector"][:, 0]}
    assert len({(counter - 1) % 3 for counter in counters}) == 3, "of every environment"
    assert len(np.unique(batch.index)) > 80
    assert batch.weight.tolist() == [1.0] * 300


@pytest.mark.ray
@with_cluster
def test_draws_and_weights_are_those_of_the_priorities_of_all_shards(ray: Any) -> None:
    replay = filled(sharded(History(3, ends=0.0), NStep(0.5), alpha=0.5), History(3, ends=0.0))
    index = np.unique(replay.sample(2_000).index)
    assert len(index) == replay.n_rows == 72
    priority = np.where(index % 2 == 0, 9.0, 1.0) * (1 + np.arange(72) % 5)
    replay.update_priorities(index, priority)
    probability = priority**0.5 / (priority**0.5).sum()
    batch = replay.sample(20_000, 0.4)
    place = np.searchsorted(index, batch.index)
    found = np.bincount(place, minlength=72) / 20_000
    assert np.abs(found - probability).max() < 5 * np.sqrt(probability.max() / 20_000)
    weight = (probability[place] / probability[place].min()) ** -0.4
    np.testing.assert_allclose(batch.weight.numpy(), weight, rtol=1e-6)


def test_chunks_that_repeat_are_stored_once(monkeypatch: pytest.MonkeyPatch) -> None:
    put: list[np.ndarray] = []
    monkeypatch.setattr(shard_module, "imported", lambda: SimpleNamespace(put=lambda x: put.append(x) or len(put)))
    zeros = ChunkedArray(np.dtype(np.float32), (), [4] * 3, lambda i: np.zeros(4, np.float32), ["a", "a", "b"])
    assert stored(zeros).chunks == (1, 1, 2)
    assert len(put) == 2


def test_a_shard_has_no_mass_before_it_has_a_batch_of_different_rows() -> None:
    history, shard = History(2, ends=0.0), Shard()
    spec = ReplaySpec(80, space_of(history), ACTIONS, BatchSpec(4, 2), NStep(0.5), alpha=0.6, unique=12)
    shard.start(InMemory(size=80), spec)
    assert shard.append(batch_of(history), 1.0) == shard.draw(0).mass == 0, "of 8 rows"
    assert shard.draw(4).rows == ()
    assert shard.append(batch_of(history), 1.0) > 0
    (batch,) = shard.draw(12).rows
    assert len(np.unique(batch.index)) == 12


@with_cluster
def test_new_rows_get_the_highest_priority_of_all_shards(ray: Any) -> None:
    history = History(2, ends=0.0)
    replay = filled(sharded(history, NStep(0.5), alpha=1.0), history)
    index = replay.sample(1_000).index
    replay.update_priorities(mine := np.unique(index[index % 2 == 0]), np.full(len(mine), 50.0))
    replay.append(batch_of(history))
    new, batch = replay.newest(), replay.sample(2_000, 1.0)
    weights = [batch.weight[np.isin(batch.index, new[new % 2 == i])].unique() for i in (0, 1)]
    assert len(new) == 8
    assert weights[0].tolist() == weights[1].tolist()


def draws(history: History, **options: Any) -> list[np.ndarray]:
    replay = filled(sharded(history, alpha=0.6, **options), history)
    found = []
    for i in range(12):
        batch = replay.sample(8, 0.4)
        found += [batch.index, batch.weight.numpy()]
        replay.update_priorities(batch.index, np.arange(8.0) + i)
        if i % 3 == 0:
            replay.append(batch_of(history))
    return found


@with_cluster
def test_the_order_of_calls_decides_every_draw(ray: Any) -> None:
    one, other = (draws(History(2), prefetch=3) for _ in range(2))
    assert all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))


@with_cluster
def test_a_batch_that_was_drawn_ahead_knows_priorities_so_many_updates_older(ray: Any) -> None:
    history = History(2, ends=0.0)
    replay = filled(sharded(history, NStep(0.5), alpha=1.0, prefetch=2), history)
    index = np.unique(replay.sample(1_000).index)
    only = index[3]
    replay.update_priorities(index, np.where(index == only, 1.0, 1e-12))
    found = [np.unique(replay.sample(1_000).index) for _ in range(5)]
    assert min(map(len, found[:2])) > 20, "drawn before"
    assert only in found[2]
    assert found[4].tolist() == [only], "and the sums of the shards are older by as much again"


@with_cluster
@pytest.mark.parametrize(
    "reader",
    [
        pytest.param(NStep(0.5, 2), id="transitions", marks=pytest.mark.ray),
        pytest.param(FixedSequence(6), id="sequences"),
    ],
)
def test_a_loaded_snapshot_draws_the_same_batches(ray: Any, reader: Any, tmp_path: Path) -> None:
    history = History(2, "both")
    options = {"reader": reader, "alpha": 0.6, "prefetch": 2, "size": 20_000}
    replay, other = filled(sharded(history, **options), history), sharded(history, **options)
    for i in range(2):
        replay.update_priorities(replay.sample(8).index, np.arange(8.0) + i)
    save_snapshot(tmp_path, replay.state_dict(), {"env_steps": 1})
    other.load_state_dict(load_snapshot(tmp_path)[0])
    assert other.n_rows == replay.n_rows > 30
    for i in range(6):
        one, two = replay.sample(8, 0.4), other.sample(8, 0.4)
        assert same(one, two)
        for each in (replay, other):
            each.update_priorities(one.index, np.arange(8.0) * i)
        batch = batch_of(history)
        replay.append(batch)
        other.append(batch)


def images(T: int, start: int) -> Samples:
    """Rows of 16 kB of two environments."""
    rng, no = np.random.default_rng(start), np.zeros((T, 2), np.bool_)
    zeros, first = np.zeros((T + 1, 2)), np.zeros((T + 1, 2), np.bool_)
    observation = rng.random((T + 1, 2, 64, 64), np.float32)
    inputs = AgentInputs(observation, zeros.astype(np.int64), zeros.astype(np.float32), first)
    outcome = inputs.prev_action[1:], inputs.prev_reward[1:], no, no, ~no
    return Samples(inputs, *outcome, (), (), (), 2 * T, start)  # type: ignore[arg-type]


@with_cluster
def test_large_arrays_are_written_chunk_by_chunk_and_only_what_is_new(ray: Any, tmp_path: Path) -> None:
    space, options = spaces.Box(0, 1, (64, 64), np.float32), {"n_shards": 1, "prefetch": 0}
    replay, other = (
        make_replay(OnRay(size=2_000, **options), space, ACTIONS, BatchSpec(100, 2), NStep(0.5)) for _ in range(2)
    )
    for i in range(4):
        replay.append(images(100, 100 * i))
    first = save_snapshot(tmp_path, replay.state_dict(), {"env_steps": 1})
    replay.append(images(100, 400))
    second = save_snapshot(tmp_path, replay.state_dict(), {"env_steps": 2})
    names = [{path.name for path in (each / "chunks").iterdir()} for each in (first, second)]
    assert len(names[0]) == 4, "of 128 time steps"
    assert len(names[1] & names[0]) == 3
    other.load_state_dict(load_snapshot(tmp_path)[0])
    assert same(replay.sample(50), other.sample(50))
    large: list[ChunkedArray] = []
    map_objects(replay.state_dict(), ChunkedArray, large.append)
    ray.kill(replay.shards.actors[0])  # type: ignore[attr-defined]
    with pytest.raises(StateLost, match="actor 0 of replay=ray died while its rows were saved"):
        large[0].to_numpy()


@pytest.mark.ray
@with_cluster
def test_a_killed_shard_is_replaced_without_its_rows_and_the_others_go_on(
    ray: Any, caplog: pytest.LogCaptureFixture
) -> None:
    history = History(2, "both")
    replay: ShardedReplay[Any] = filled(sharded(history, prefetch=2, alpha=0.6), history)
    rows, old = replay.n_rows, replay.sample(64)
    ray.kill(replay.shards.actors[1])
    batches = [replay.sample(64)]
    while replay.shards.restarts.n == 0:  # a shard answers until its process is gone
        batches.append(replay.sample(64))
    batches += [replay.sample(64) for _ in range(3)]  # those drawn ahead are the dead one's, too
    assert all(len(batch.return_) == 64 for batch in batches)
    for batch in batches:
        assert_of_history(batch, [history], 2, 0.5)
    assert set(batches[-1].index % 2) == {0}
    assert 0 < replay.n_rows < rows
    assert replay.shards.restarts.n == 1
    replay.append(batch_of(history))  # nobody waits for the new one
    until(lambda: replay.shards.is_ready(1), 200.0)
    for _ in range(4):
        replay.append(batch_of(history))
    lost = old.index[old.index % 2 == 1]
    replay.update_priorities(lost, np.full(len(lost), 1e9))  # ignored
    for _ in range(3):
        after = replay.sample(256)
    assert set(after.index % 2) == {0, 1}
    assert not set(after.index) & set(lost), "an index is never used again"
    assert_of_history(after, [history], 2, 0.5)
    line = r"actor 1 of replay=ray: Actor(Died|Unavailable)Error; its rows are lost, and another starts \(restart 1\)"
    assert re.search(line, caplog.text)


@with_cluster
def test_when_all_shards_die_no_row_is_left_until_new_ones_come(ray: Any) -> None:
    history = History(2, "both")
    replay: ShardedReplay[Any] = filled(sharded(history), history)
    before = replay.sample(16)
    for actor in replay.shards.actors:
        ray.kill(actor)
    assert same(replay.sample(16), before), "the last batch again"
    assert replay.n_rows == 0
    replay.append(batch_of(history))
    assert replay.n_rows == 8
    assert_of_history(replay.sample(16), [history], 2, 0.5)
    assert len(replay.state_dict()["shards"]) == 2


@with_cluster
def test_rows_just_stored_are_read_back_in_the_order_of_their_index(ray: Any) -> None:
    history = History(3, ends=0.0)
    replay = filled(sharded(history, FixedSequence(4), alpha=0.5), history)
    index = replay.newest()
    batch = replay.read(index)
    assert batch.index.tolist() == index.tolist()
    first = batch.inputs.observation[0, :, 0].long() - 1
    assert sorted(first.tolist()) == [3 * 20 + b for b in range(3)]
    ray.kill(replay.shards.actors[0])
    assert len(replay.read(index).weight) == 3, "what a dead actor had is anything"


@with_cluster
def test_what_does_not_fit_is_refused_before_an_actor_starts(ray: Any) -> None:
    history = History(2)
    with pytest.raises(ValueError, match=r"algo.replay.size=8 holds 4 time steps .* use algo.replay.size="):
        sharded(history, size=8)
    with pytest.raises(ConfigError, match=r"size=1000000000000 needs .* of main memory for the actors on one node"):
        sharded(history, size=10**12)
    with pytest.raises(ConfigError, match=r"n_shards=2 wants 8 CPUs of the Ray cluster, which has 2"):
        sharded(history, cpus=4.0)
    other = sharded(history)
    with pytest.raises(ValueError, match="the saved replay is 1 shards of"):
        other.load_state_dict(sharded(history, n_shards=1).state_dict())
    with pytest.raises(ValueError, match=r"priorities are negative, NaN or infinite"):
        other.update_priorities(np.zeros(1, np.int64), np.array([np.nan]))


def test_streams_are_dealt_in_turn_and_else_environments() -> None:
    by_stream = Division(BatchSpec(4, 8, 3), 2)
    assert [by_stream.spec_of(i) for i in range(2)] == [(4, 8, 2), (4, 8, 1)]
    assert [by_stream.shards_of(place) for place in range(3)] == [[0], [1], [0]]
    by_environment = Division(BatchSpec(4, 8, 2), 3)
    assert [by_environment.columns(i) for i in range(3)] == [(0, 2), (2, 5), (5, 8)]
    assert [by_environment.spec_of(i).B for i in range(3)] == [2, 3, 3]
    with pytest.raises(ConfigError, match=r"algo.replay.n_shards=3 actors cannot divide 2 environments"):
        Division(BatchSpec(4, 2), 3).check()


@with_cluster
def test_without_a_cluster_one_line_says_what_to_call(ray: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(ConfigError, match=r"call rlframe.system.cluster.connect"):
        sharded(History(2))


@with_cluster
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            "algo=dqn env=CartPole-v1 algo.prioritized=true algo.n_step=2 explore.epsilon=0.3", marks=pytest.mark.ray
        ),
        "algo=sac env=Pendulum-v1 algo.replay.prefetch=0",
        "algo=r2d1 env=CartPole-v1 model.memory=gru model.memory_size=8 algo.burn_in=2 algo.learn_T=6",
    ],
)
def test_a_resumed_run_is_one_that_was_never_stopped(
    ray: Any, case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = (
        "sampler=serial sampler.batch_B=2 sampler.batch_T=4 algo.learning_starts=32 algo.batch_size=8 model.hidden=[8]"
    )
    run = "algo.replay_ratio=2 algo.replay.size=400 replay=ray runner.n_steps=320 runner.log_interval_steps=80"
    evaluation = "eval.n_episodes=1 eval.max_length=20 compile=false"
    assert_resumed_exactly(f"{case} {sizes} {run} {evaluation}", tmp_path, monkeypatch)
