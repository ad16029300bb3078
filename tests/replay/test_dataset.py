"""algo.replay=dataset: rows of recorded datasets, in shares, mixed with live ones, and the same after a resume."""

from __future__ import annotations

import csv
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from rlframe import evaluate, launch
from rlframe.algos import bc, dqn
from rlframe.core.errors import ConfigError, ReadableError
from rlframe.core.spaces import FrameStack
from rlframe.core.types import BatchSpec
from rlframe.data import Episode, open_dataset
from rlframe.data.episodes import SAMPLED_ACTION, as_batches
from rlframe.distributions import executed
from rlframe.experiment.checks import check_parts
from rlframe.experiment.settings import from_flat
from rlframe.models import ModelConfig
from rlframe.record.snapshot import list_snapshots, load_snapshot
from rlframe.replay import FixedSequence, NStep, OfDatasets, ReturnsToGo, Transitions, make_replay
from rlframe.replay.dataset import MixedReplay
from tests.data.episodes import CARTPOLE, episodes, stored
from tests.runners.resumed import count_equal

SPEC = BatchSpec(4, 2)


def replay(config: OfDatasets, n_step: int = 1, **others: Any) -> Any:
    return make_replay(config, *CARTPOLE, SPEC, NStep(0.9, n_step), **others)


def reader_of(folder: Path, found: list[Episode], reader: Any) -> Any:
    """A replay of these episodes, read in this way."""
    folder.mkdir()
    return make_replay(OfDatasets(path=stored(folder, found, *CARTPOLE)), *CARTPOLE, SPEC, reader)


def of_all(found: list[Episode], value: float) -> list[Episode]:
    """The same episodes with one reward everywhere, by which a row's dataset is told."""
    return [Episode(**{**vars(each), "reward": np.full(len(each), value, np.float32)}) for each in found]


def test_every_row_is_sampled_with_its_next_observation_and_its_end(tmp_path: Path) -> None:
    given = episodes([3, 6, 5, 1], *CARTPOLE)
    made = replay(OfDatasets(path=stored(tmp_path, given, *CARTPOLE)))
    assert made.n_rows == 15
    batch: Transitions = made.sample(2_000)
    rows = {each.observation[t].tobytes(): (each, t) for each in given for t in range(len(each))}
    seen = set()
    for i, observation in enumerate(batch.inputs.observation.numpy()):
        episode, t = rows[observation.tobytes()]
        seen.add(observation.tobytes())
        assert batch.action[i] == episode.action[t]
        assert batch.return_[i] == episode.reward[t]
        assert batch.bootstrap[i] == (0 if episode.terminated[t] else np.float32(0.9))
        if not episode.terminated[t]:
            assert np.array_equal(batch.next_inputs.observation[i], episode.observation[t + 1])
    assert seen == rows.keys()


@pytest.mark.parametrize("n_step", [3, 8])
def test_the_last_rows_of_data_are_sampled_too_by_their_returns_to_the_end(tmp_path: Path, n_step: int) -> None:
    (given,) = of_all(episodes([4], *CARTPOLE), 1.0)
    batch: Transitions = replay(OfDatasets(path=stored(tmp_path, [given], *CARTPOLE)), n_step).sample(200)
    found = zip(batch.inputs.observation.numpy(), batch.return_.tolist(), batch.bootstrap.tolist(), strict=True)
    rows = {given.observation[t].tobytes(): t for t in range(4)}
    seen = {rows[observation.tobytes()]: (return_, bootstrap) for observation, return_, bootstrap in found}
    assert sorted(seen) == [0, 1, 2, 3]
    for t, (return_, bootstrap) in seen.items():
        n = min(n_step, 4 - t)
        assert return_ == pytest.approx(sum(0.9**k for k in range(n)))
        assert bootstrap == pytest.approx(0.9**n if t + n < 4 else 0)


@pytest.mark.parametrize(("T", "of"), [(1, [4]), (2, [4]), (12, [4]), (8, [20]), (16, [20]), (8, [30]), (4, [12, 8])])
def test_every_row_of_data_is_in_a_sequence_whatever_T_of_the_sampler(tmp_path: Path, T: int, of: Any) -> None:
    (given,) = episodes([21], *CARTPOLE)
    config, spec = OfDatasets(path=stored(tmp_path, [given], *CARTPOLE)), BatchSpec(T, 1)
    made: Any = make_replay(config, *CARTPOLE, spec, FixedSequence(*of), state=np.zeros((1, 1), np.float32))
    found = made.sample(200)
    seen = {row.tobytes() for row in found.inputs.observation[:-1][found.valid].numpy()}
    assert seen == {row.tobytes() for row in given.observation[:-1]}


@pytest.mark.parametrize("n_step", [1, 3])
def test_an_episode_that_was_cut_off_is_bootstrapped_from_and_not_continued(tmp_path: Path, n_step: int) -> None:
    given = of_all(episodes([3, 4], *CARTPOLE), 1.0)
    cut = [replace(each, truncated=np.zeros(len(each), bool), terminated=np.zeros(len(each), bool)) for each in given]
    batch = replay(OfDatasets(path=stored(tmp_path, [*cut, *given], *CARTPOLE)), n_step).sample(1_000)
    left = {each.observation[t].tobytes(): len(each) - t for each in given for t in range(len(each))}
    for observation, return_ in zip(batch.inputs.observation.numpy(), batch.return_.tolist(), strict=True):
        n = min(n_step, left[observation.tobytes()])
        assert return_ == pytest.approx(sum(0.9**k for k in range(n)))
    goes = reader_of(tmp_path / "more", cut, ReturnsToGo(0.9)).sample(1_000)
    assert {round(x, 4) for x in goes.return_.tolist()} == {1.0, 1.9, 2.71, 3.439}


def test_critics_see_actions_as_they_were_executed_and_densities_those_that_were_sampled(tmp_path: Path) -> None:
    box = CARTPOLE[0], spaces.Box(-2, 2, (1,), np.float32)
    given = [
        replace(each, info={SAMPLED_ACTION: np.full((len(each), 1), 3.0, np.float32)}) for each in episodes([9], *box)
    ]
    given = [replace(each, action=np.full((len(each), 1), 2.0, np.float32)) for each in given]
    config = OfDatasets(path=stored(tmp_path, given, *box))
    for sampled, seen in ((False, 1.0), (True, 3.0)):
        made: Any = make_replay(config, *box, SPEC, NStep(0.9), sampled=sampled)
        assert set(made.sample(50).action.flatten().tolist()) == {seen}
    assert executed(box[1], torch.tensor([[3.0], [-0.5]])).tolist() == [[1.0], [-0.5]]
    above = spaces.Box(np.float32([0, -np.inf]), np.float32([np.inf, 2]))
    assert executed(above, torch.tensor([[-3.0, 4.0], [3.0, -4.0]])).tolist() == [[0.0, 2.0], [3.0, -4.0]]


@pytest.mark.parametrize("lost_life", [False, True])
def test_stacks_are_read_as_they_were_recorded_also_after_a_lost_life(tmp_path: Path, lost_life: bool) -> None:
    rng, box, n = np.random.default_rng(0), spaces.Box(0, 255, (3, 8, 8), np.uint8), 12
    frames = np.concatenate([np.zeros((2, 8, 8), np.uint8), rng.integers(1, 255, (n, 8, 8), np.uint8)])
    stacks = np.stack([frames[i : i + 3] for i in range(n)])
    ends = [6, n - 1] if lost_life else [n - 1]  # the second episode begins with the stack that ended the first
    given = []
    for begin, end in zip([0, *ends], ends, strict=False):
        (each,) = episodes([end - begin], box, CARTPOLE[1])
        given.append(replace(each, observation=stacks[begin : end + 1]))
    path = stored(tmp_path, given, box, CARTPOLE[1])
    made = make_replay(OfDatasets(path=path), FrameStack(box, 3), CARTPOLE[1], SPEC, NStep(0.9, 1))
    assert made.n_rows == n - 1
    batch: Transitions = made.sample(200)
    after = {each.observation[t].tobytes(): each.observation[t + 1] for each in given for t in range(len(each))}
    for seen, following in zip(batch.inputs.observation.numpy(), batch.next_inputs.observation.numpy(), strict=True):
        assert np.array_equal(following, after[seen.tobytes()])


@pytest.mark.parametrize("place", ["memory", "disk", "device"])
def test_datasets_have_their_shares_of_each_batch(tmp_path: Path, place: str) -> None:
    one = stored(tmp_path / "a", of_all(episodes([30], *CARTPOLE), 1.0), *CARTPOLE)
    other = stored(tmp_path / "b", of_all(episodes([300], *CARTPOLE), 2.0), *CARTPOLE)
    made = replay(OfDatasets(path=f"{{{one}: 3, {other}: 1}}", place=place))
    counts = [int((made.sample(10).return_ == 1).sum()) for _ in range(400)]
    assert set(counts) == {7, 8}
    assert np.mean(counts) == pytest.approx(7.5, abs=0.1)


def test_live_rows_have_their_share_once_there_are_any(tmp_path: Path) -> None:
    data = stored(tmp_path, of_all(episodes([40], *CARTPOLE), 1.0), *CARTPOLE)
    made: MixedReplay[Transitions] = replay(OfDatasets(path=data, live=0.5, size=100), alpha=0.6)
    assert (made.sample(8).return_ == 1).all()
    stored(tmp_path / "live", of_all(episodes([9], *CARTPOLE), 5.0), *CARTPOLE)
    for batch in as_batches(open_dataset(tmp_path / "live/test-v0").episodes(), CARTPOLE[1], 4):
        made.append(batch.map(lambda x: np.repeat(x, 2, 1) if x.ndim > 1 else x).torch())
    found = made.sample(64, beta=0.4)
    assert int((found.return_ == 5).sum()) == 32
    made.update_priorities(found.index, np.ones(64))
    with pytest.raises(ValueError, match="must have the shape"):
        made.update_priorities(found.index, np.ones((64, 2)))


def test_observations_of_data_beside_which_it_plays_are_in_the_statistics_once(tmp_path: Path) -> None:
    path = stored(tmp_path, episodes([400], *CARTPOLE), *CARTPOLE)
    config = dqn.Config(replay=OfDatasets(path=path, live=0.5, size=100), learning_starts=1_000)
    agent = config.make_agent(*CARTPOLE, ModelConfig(hidden=(8,), normalize_observation=True))
    algo = config.make_algorithm(agent, SPEC, 1_000)
    statistics = agent.model.observation_norm.parts[0]
    live = list(as_batches(open_dataset(path).episodes(), CARTPOLE[1], 4))[:2]
    counts = []
    for batch in live:
        algo.receive(batch.map(lambda x: np.repeat(x, 2, 1) if x.ndim > 1 else x).torch())
        counts.append(int(statistics.count))
    assert counts == [1_008, 1_016], "1,000 rows of data are drawn, with repetition"


def test_rows_in_which_nobody_acted_are_in_no_statistics(tmp_path: Path) -> None:
    (given,) = episodes([21], *CARTPOLE)
    given.observation[-1] = 5.0  # a row of its own, which repeats to the end of the last sequence
    config = bc.Config(replay=OfDatasets(path=stored(tmp_path, [given], *CARTPOLE)), learn_T=20)
    model = ModelConfig(hidden=(8,), memory="lstm", memory_size=4, normalize_observation=True)
    agent = config.make_agent(*CARTPOLE, model)
    config.make_algorithm(agent, BatchSpec(1, 1), 1_000).observe_data()
    assert float(agent.model.observation_norm.parts[0].mean.max()) < 1


def test_shares_of_data_and_live_rows_hold_in_weights_of_prioritized_replay(tmp_path: Path) -> None:
    """With β = 1 the weights make the mean over a batch that of uniform draws from each part, by the parts' shares."""
    data = stored(tmp_path, of_all(episodes([200], *CARTPOLE), 1.0), *CARTPOLE)
    made: MixedReplay[Transitions] = replay(OfDatasets(path=data, live=0.5, size=400), alpha=1.0)
    live = stored(tmp_path / "live", of_all(episodes([200], *CARTPOLE), 5.0), *CARTPOLE)
    for batch in as_batches(open_dataset(live).episodes(), CARTPOLE[1], 4):
        made.append(batch.map(lambda x: np.repeat(x, 2, 1) if x.ndim > 1 else x).torch())
    rng = np.random.default_rng(0)
    for _ in range(40):
        found = made.sample(64, beta=1.0)
        of_live = (found.return_ == 5).numpy()
        made.update_priorities(found.index, np.where(of_live, np.exp(1.5 * rng.standard_normal(64)), 1.0))
    batch = made.sample(20_000, beta=1.0)
    assert float(batch.weight.max()) == 1
    assert float(batch.weight[batch.return_ == 5].sum() / batch.weight.sum()) == pytest.approx(0.5, abs=0.03)


def test_rewards_are_scaled_so_that_returns_span_a_range(tmp_path: Path) -> None:
    one = stored(tmp_path / "a", given := episodes([3, 6], *CARTPOLE), *CARTPOLE)
    other = stored(tmp_path / "b", more := episodes([9, 2], *CARTPOLE, seed=1), *CARTPOLE)
    made = replay(OfDatasets(path=f"{{{one}: 1, {other}: 1}}", return_range=1000.0))
    returns = [each.return_ for each in (*given, *more)]
    scale = 1000 / (max(returns) - min(returns))
    assert f"rewards times {scale:.6g}" in str(made)
    rewards = np.unique(made.sample(2_000).return_.numpy())
    expected = np.unique(np.concatenate([each.reward for each in (*given, *more)])) * np.float32(scale)
    np.testing.assert_allclose(rewards, expected, rtol=1e-6)
    with pytest.raises(ConfigError, match="all 1 episodes have the same"):
        replay(OfDatasets(path=stored(tmp_path / "c", given[:1], *CARTPOLE), return_range=1000.0))
    with pytest.raises(ConfigError, match=r"return_range=1000 scales recorded rewards alone"):
        OfDatasets(path=one, return_range=1000.0, live=0.5)


def test_what_cannot_be_read_names_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = stored(tmp_path, episodes([4], *CARTPOLE), *CARTPOLE)
    with pytest.raises(ConfigError, match=r"algo\.replay=dataset needs algo\.replay\.path=NAME"):
        replay(OfDatasets())
    with pytest.raises(ConfigError, match=r"needs the form {name-v0: 0.7, other-v0: 0.3}"):
        OfDatasets(path="{a-v0: -1}")
    with pytest.raises(ConfigError, match=r"empty/test-v0 has no episodes"):
        replay(OfDatasets(path=stored(tmp_path / "empty", [], *CARTPOLE)))
    with monkeypatch.context() as patch:
        patch.setattr("rlframe.replay.make.available_memory", lambda: 100)
        with pytest.raises(
            ConfigError, match=r"the dataset .* of 4 steps needs .*; use algo.replay.place=disk, or take"
        ):
            replay(OfDatasets(path=path))
    with pytest.raises(ConfigError, match=r"does not fit the environment of this run: action: Discrete\(2\)"):
        make_replay(OfDatasets(path=path), CARTPOLE[0], spaces.Discrete(3), SPEC, NStep(0.9, 1))
    with pytest.raises(ConfigError, match=r"initial_priority=td needs replay=memory, .* not dataset"):
        make_replay(OfDatasets(path=path), *CARTPOLE, SPEC, NStep(0.9, 1, td_priorities=True))


def without_the_last_step(episode: Episode) -> Episode | None:
    """For algo.replay.transform: episodes of one step are left out."""
    if len(episode) == 1:
        return None
    columns = {name: x[:-1] for name, x in vars(episode).items() if name != "info"}
    return Episode(**{**columns, "truncated": np.arange(len(episode) - 1) == len(episode) - 2}, info={})


def test_a_function_of_the_users_transforms_episodes_as_they_are_read(tmp_path: Path) -> None:
    path = stored(tmp_path, episodes([3, 1, 6], *CARTPOLE), *CARTPOLE)
    made = replay(OfDatasets(path=path, transform=f"{__name__}:without_the_last_step"))
    assert made.n_rows == 7
    for name, says in {
        "no_such": "has no no_such",
        "counted": "gave",
        "broken": "broken: KeyError",
        "short": "of 2 rows",
        "unknown": "fit: its reward has NaN or Inf",
        "nothing": "leaves no episode of the 3",
        "flat": r"does not fit: observation has the shape \[4, 1\], not \[4, 4\]",
        "unplayable": r"does not fit: action goes from 5 to \d, and Discrete\(2\) does not",
    }.items():
        with pytest.raises(ReadableError, match=rf"^algo\.replay\.transform\b.*{says}"):
            replay(OfDatasets(path=path, transform=f"{__name__}:{name}"))


def counted(episode: Episode) -> int:
    return 3


def short(episode: Episode) -> Episode:
    return replace(episode, observation=episode.observation[:2])


def unknown(episode: Episode) -> Episode:
    return replace(episode, reward=episode.reward * np.nan)


def flat(episode: Episode) -> Episode:
    return replace(episode, observation=episode.observation[:, :1])


def unplayable(episode: Episode) -> Episode:
    return replace(episode, action=episode.action % 2 + 5)


def nothing(episode: Episode) -> None:
    return None


def broken(episode: Episode) -> Episode:
    raise KeyError(len(episode))


def words(tmp_path: Path, *more: str) -> list[str]:
    return [
        *("algo=dqn", "algo.replay=dataset", "model.hidden=[8]", "algo.batch_size=8", "affinity=none"),
        *("runner.n_steps=40", "runner.log_interval_steps=20", "log_level=WARNING", "snapshot_mode=all"),
        *(f"log_dir={tmp_path / 'runs'}", *more),
    ]


def test_a_run_learns_from_data_alone_and_resumes_exactly(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = stored(tmp_path, episodes([30, 41], *CARTPOLE), *CARTPOLE)
    assert launch.main(words(tmp_path, f"algo.replay.path={path}", "env=none")) == 0
    run = tmp_path / "runs/run_0"
    first, last = list_snapshots(run / "snapshot")[-2:]
    expected = load_snapshot(last)[0]
    for file in last.iterdir():
        file.unlink()
    last.rmdir()
    assert int(first.name.removeprefix("step_")) == 20
    assert launch.main([f"resume={run}", "log_level=WARNING", "trust=true"]) == 0
    found = load_snapshot(last)[0]
    assert sum(count_equal(expected[part], found[part], part) for part in ("agent", "algo")) > 10
    assert evaluate.main([str(run), "trust=true"]) == 2
    said = capsys.readouterr()
    assert said.err.startswith("error: env=none cannot be played; give the environment of the dataset (env=ID")
    assert f"evaluate {run} trust=true env=ID\n" in said.out
    others = [replace(each, observation=each.observation / 2) for each in episodes([30, 41], *CARTPOLE)]
    stored(tmp_path / "other", others, *CARTPOLE)
    shutil.rmtree(path)
    (tmp_path / "other/test-v0").rename(path)
    assert launch.main([f"resume={run}", "runner.n_steps=60", "trust=true"]) != 0
    assert "bring back the dataset" in capsys.readouterr().err


def halved(episode: Episode) -> Episode:
    return replace(episode, observation=episode.observation / 2)


def test_estimates_are_by_the_data_as_they_are_learned_from(tmp_path: Path) -> None:
    given = [replace(each, info={"log_prob": np.full(len(each), np.log(0.5))}) for each in episodes([9, 12], *CARTPOLE)]
    one = stored(tmp_path, given, *CARTPOLE)
    other = stored(tmp_path / "halved", [halved(each) for each in given], *CARTPOLE)
    more = ["env=none", "algo=bc", "eval.estimate=[wis]", "eval.explore=true", "sampler.discount=0.9"]
    runs = {one: f"algo.replay.transform={__name__}:halved", other: "seed=0"}
    for i, (path, word) in enumerate(runs.items()):
        own = [each for each in words(tmp_path, *more, word, f"algo.replay.path={path}") if each != "algo=dqn"]
        assert launch.main([*own, f"run_ID={i}"]) == 0
    with (tmp_path / "runs/run_0/progress.csv").open() as a, (tmp_path / "runs/run_1/progress.csv").open() as b:
        found = [[row["estimate/wis"] for row in csv.DictReader(file)] for file in (a, b)]
    assert found[0] == found[1]
    assert len({*found[0]}) > 1


def test_few_rows_are_normalised_and_drawn_without_repetition(tmp_path: Path) -> None:
    path = stored(tmp_path, episodes([30, 41], *CARTPOLE), *CARTPOLE)
    settings = {"prioritized": True, "unique": True, "n_step": 40, "batch_size": 64}
    config = dqn.Config(replay=OfDatasets(path=path), **settings)
    agent = config.make_agent(*CARTPOLE, ModelConfig(hidden=(8,), normalize_observation=True))
    algo = config.make_algorithm(agent, SPEC, 1_000)
    algo.observe_data()
    assert agent.model.observation_norm.parts[0].count == 128, "two batches, of 71 rows"
    for _ in range(3):
        assert len({*algo.replay.sample(64, 0.4).index.tolist()}) == 64
    assert torch.as_tensor(algo.update()["loss"]).isfinite()


def test_returns_of_play_do_not_scale_those_of_data(tmp_path: Path) -> None:
    given = {"algo": "sac", "env": "Pendulum-v1", "algo.replay": "dataset", "algo.replay.path": "any-v0"}
    with pytest.raises(ConfigError, match="normalize_return=true would leave the rewards of"):
        check_parts(from_flat({**given, "algo.replay.live": 0.5, "algo.normalize_return": True}))


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (("algo.replay.live=0.5",), "runner=offline_rl, which plays nothing"),
        (("env.normalize_reward=true",), "would leave the rewards of algo.replay=dataset as they were recorded"),
        (("reward.bonus=rnd",), "reward.bonus=rnd would leave the rewards"),
        (("env.reward_scale=100",), "env.reward_scale=100 would leave the rewards"),
        (("env.reward_clip=sign",), "env.reward_clip=sign would leave the rewards"),
        (
            ("algo.replay.return_range=10", "model.feed_back=true"),
            "algo.replay.return_range does not work with a replay",
        ),
        (("stop=updates > 9 and env_steps > 9",), "plays nothing, so that env_steps is never known"),
        (("algo=ppo", "algo.replay=memory"), "needs an algorithm with replay"),
        (("algo.replay=memory",), "runner=offline_rl learns from data"),
        (("runner=minibatch_rl",), "algo.replay.live=0: the rows of runner=minibatch_rl would be lost"),
        (("algo.replay.path=", "runner=minibatch_rl"), "algo.replay=dataset needs algo.replay.path=NAME"),
        (("env=Acrobot-v1",), "does not fit the environment of this run: observation"),
    ],
)
def test_runners_and_replays_that_do_not_fit_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], more: tuple[str, ...], says: str
) -> None:
    path = stored(tmp_path, episodes([30, 12], *CARTPOLE), *CARTPOLE)
    given = dict(word.split("=", 1) for word in words(tmp_path, f"algo.replay.path={path}", "runner=offline_rl", *more))
    if given["algo"] == "ppo" or given["algo.replay"] == "memory":
        del given["algo.replay.path"]
    if given["algo"] == "ppo":
        del given["algo.replay"]
        del given["algo.batch_size"]
    assert launch.main([f"{key}={value}" for key, value in given.items()]) == 2
    assert says in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()
