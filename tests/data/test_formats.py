"""Datasets on disk: what is written is read back bit for bit, here and by Minari; what is damaged is one line."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from pathlib import Path

import gymnasium
import h5py
import numpy as np
import pyarrow as pa
import pytest
from gymnasium import spaces

from rlframe.core.errors import ConfigError
from rlframe.core.spaces import action_decoder
from rlframe.core.struct import leaves
from rlframe.data import Dataset, DatasetWriter, NewDataset, open_dataset, tools
from rlframe.data.episodes import SAMPLED_ACTION, sampled_actions, sampled_numbers
from rlframe.data.reading import check_spaces, fitted
from tests.data.episodes import CARTPOLE, NESTED, arrays, episodes, stored

BOX = spaces.Box(-2, 2, (2,))
SPEC = gymnasium.spec("CartPole-v1").to_json()


@pytest.mark.parametrize(
    ("kind", "compression"),
    [("arrow", "lz4"), ("hdf5", "zstd"), pytest.param("parquet", "zstd", marks=pytest.mark.slow)],
)
def test_rows_are_read_back_bit_for_bit_here_and_by_minari(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, compression: str
) -> None:
    import minari

    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    given = episodes([5, 1, 8, 2], NESTED, BOX)
    tools.write(NewDataset("group/test-v0", NESTED, BOX, SPEC, {}, kind, compression), given)
    assert json.loads((tmp_path / "group/test-v0/data/metadata.json").read_text())["dataset_size"] > 0, (
        "Minari lists it"
    )
    dataset, theirs = open_dataset("group/test-v0"), minari.load_dataset("group/test-v0")
    assert (dataset.n_episodes, dataset.n_steps, dataset.env_id) == (4, 16, "CartPole-v1")
    assert (theirs.total_episodes, theirs.total_steps, theirs.env_spec.id) == (4, 16, "CartPole-v1")
    assert (theirs.observation_space, theirs.action_space) == (NESTED, BOX)
    for own, found, by_minari in zip(given, dataset.episodes(), theirs, strict=True):
        for x, y in zip(arrays(own), arrays(found), strict=True):
            assert x.dtype == y.dtype
            assert np.array_equal(x, y)
        columns = by_minari.observations, by_minari.actions, by_minari.rewards
        read = (*columns, by_minari.terminations, by_minari.truncations)
        expected = own.observation, own.action, own.reward, own.terminated, own.truncated
        for x, y in zip(leaves(expected), leaves(read), strict=True):
            assert np.array_equal(x, y)


def test_entries_are_in_the_order_of_the_environments_space(tmp_path: Path) -> None:
    box = spaces.Box(-1, 1, (1,))
    space = spaces.Dict(wrench=box, arm=box)  # keywords, which Gymnasium does not sort
    action = {"wrench": np.full((2, 1), 1.5, np.float32), "arm": np.full((2, 1), 0.25, np.float32)}
    (played,) = episodes([2], BOX, space)
    info = {SAMPLED_ACTION: sampled_numbers(space, action)}
    name = stored(tmp_path, [replace(played, action=action_decoder(space)(action), info=info)], BOX, space)
    dataset = open_dataset(name)
    (found,) = dataset.episodes()
    drawn = sampled_actions(found, dataset.action_space)
    assert [*dataset.action_space] == [*found.action] == ["wrench", "arm"]
    assert {key: x.tolist() for key, x in drawn.items()} == {key: x.tolist() for key, x in action.items()}


def test_merged_datasets_have_the_order_of_the_first(tmp_path: Path) -> None:
    parts = {"wrench": spaces.Box(-1, 1, (1,)), "arm": spaces.Box(-1, 1, (1,)), "mode": spaces.Discrete(2, start=3)}
    found, drawn = [], {"wrench": np.full((2, 1), 1.5, np.float32), "arm": np.full((2, 1), 0.25, np.float32)}
    action = {**drawn, "mode": np.zeros(2, np.int64)}
    for i, names in enumerate((["wrench", "mode", "arm"], ["arm", "wrench", "mode"])):
        space = spaces.Dict([(name, parts[name]) for name in names])
        (played,) = episodes([2], space, space)
        own = {name: action[name] for name in names}
        info = {SAMPLED_ACTION: sampled_numbers(space, own)}
        played = replace(played, action=action_decoder(space)(own), info=info)
        found.append(open_dataset(stored(tmp_path / str(i), [played], space, space)))
    name = f"{tmp_path}/merged-v0"
    tools.write(tools.like(found[0], name), tools.merged(found))
    for own, each in zip(found, (merged := open_dataset(name)).episodes(), strict=True):
        (before,) = own.episodes()
        assert {key: x.tolist() for key, x in each.observation.items()} == {
            key: x.tolist() for key, x in before.observation.items()
        }
        actions = sampled_actions(each, merged.action_space)
        assert {key: x.tolist() for key, x in actions.items()} == {key: x.tolist() for key, x in action.items()}


@pytest.mark.parametrize("kind", ["arrow", "parquet", "hdf5"])
@pytest.mark.parametrize(
    "space",
    [
        spaces.Box(-1, 1, (2,), np.float16),
        spaces.Box(*(np.finfo(np.float64).max * np.array([-1, 1])), (2,), np.float64),
    ],
    ids=["half", "largest"],
)
def test_floats_of_every_size_are_read_back(tmp_path: Path, kind: str, space: spaces.Box) -> None:
    given = episodes([3, 1], space, spaces.Discrete(2))
    tools.write(NewDataset(f"{tmp_path}/test-v0", space, spaces.Discrete(2), format=kind), given)
    for own, found in zip(given, open_dataset(f"{tmp_path}/test-v0").episodes(), strict=True):
        assert own.observation.dtype == found.observation.dtype
        assert np.array_equal(own.observation, found.observation)


def test_datasets_may_lie_in_a_relative_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MINARI_DATASETS_PATH", "here")
    tools.write(NewDataset("test-v0", NESTED, BOX, SPEC, {}, "arrow", "lz4"), episodes([5, 1], NESTED, BOX))
    assert open_dataset("test-v0").n_steps == 6
    assert (tmp_path / "here/test-v0").is_dir()


@pytest.mark.parametrize("kind", ["arrow", "hdf5"])
def test_numbers_that_count_from_elsewhere_are_stored_as_the_environments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    import minari

    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    seen = spaces.Dict(a=spaces.Discrete(3, start=5), b=spaces.MultiDiscrete([2, 3], start=[1, 4]))
    done = spaces.Discrete(2, start=3)
    (own,) = (replace(each, action=each.action % 2 + 3) for each in episodes([4], seen, spaces.Discrete(2)))
    tools.write(NewDataset("test-v0", seen, done, SPEC, {}, kind), [own])
    (theirs,) = minari.load_dataset("test-v0")
    assert set(theirs.observations["a"]) <= {5, 6, 7}
    assert all(done.contains(action) for action in theirs.actions)
    (found,) = open_dataset("test-v0").episodes()
    for name in ("a", "b"):
        assert np.array_equal(found.observation[name], own.observation[name]), "agents count from 0"
        assert np.array_equal(theirs.observations[name] - np.asarray(seen[name].start), own.observation[name])
    assert np.array_equal(found.action, own.action)


def test_what_minari_writes_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import minari
    from minari.data_collector.episode_buffer import EpisodeBuffer

    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    image = spaces.Box(0, 255, (40, 40, 3), np.uint8)
    (own,) = episodes([6], image, CARTPOLE[1])
    flat = np.full_like(own.observation, 90)  # JPEG keeps it
    columns = {"observations": flat, "actions": own.action, "rewards": own.reward.astype(np.float64)}
    buffer = EpisodeBuffer(None, 3, terminations=own.terminated, truncations=own.truncated, infos={}, **columns)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it wants an author and more
        minari.create_dataset_from_buffers("m-v0", [buffer], observation_space=image, action_space=CARTPOLE[1])
    dataset = open_dataset("m-v0")
    (found,) = dataset.episodes()
    assert (dataset.format, dataset.jpeg, dataset.n_steps) == ("hdf5", True, 6)
    assert np.array_equal(found.observation, flat)
    assert np.array_equal(found.reward, own.reward)


def damaged(folder: Path, **changes: object) -> Path:
    """A dataset of two episodes whose metadata are changed; None removes an entry."""
    path = Path(stored(folder, episodes([3, 4], *CARTPOLE), *CARTPOLE))
    file = path / "data/metadata.json"
    content = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))
    return path


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"action_space": None}, "lacks action_space"),
        ({"total_steps": -1}, "which are no counts"),
        ({"data_format": "pickle"}, "not one of arrow, hdf5, parquet"),
        ({"observation_space": '{"type": "Box", "shape": [1000000000000], "dtype": "float32"}'}, "has more than"),
        ({"observation_space": '{"type": "Graph"}'}, "a space of type Graph"),
        ({"total_episodes": 9}, "episode 2 .* its folder is missing"),
    ],
)
def test_metadata_that_cannot_be_are_one_line(tmp_path: Path, changes: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        list(open_dataset(damaged(tmp_path, **changes)).episodes())


def _table(path: Path) -> pa.Table:
    with pa.memory_map(str(path)) as file:
        return pa.ipc.open_file(file).read_all()


def _rewrite(path: Path, **columns: object) -> None:
    table = _table(path)
    for name, column in columns.items():
        at = table.column_names.index(name)
        table = table.remove_column(at) if column is None else table.set_column(at, name, column)
    path.unlink()
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)


NAN, HUGE = (
    pa.FixedSizeListArray.from_arrays(pa.array(np.full(16, x, dtype)), 4)
    for x, dtype in ((np.nan, np.float32), (1e300, np.float64))
)


@pytest.mark.parametrize(
    ("columns", "says"),
    [
        ({"rewards": pa.array(np.full(4, np.nan))}, "rewards have NaN or Inf"),
        ({"observations": NAN}, "observation has NaN or Inf"),
        ({"observations": HUGE}, "observation has NaN or Inf"),
        ({"actions": None}, "it lacks actions"),
        ({"actions": pa.array([0, 1, 2, 0])}, r"action goes from 0 to 2, and Discrete\(2\) does not"),
        ({"actions": pa.array([b"\x80\x04."] * 4)}, "a column holds binary, not numbers"),
        ({"observations": pa.array(np.zeros(4, np.float32))}, "cannot reshape array of size 4"),
    ],
)
def test_columns_that_do_not_fit_are_one_line(tmp_path: Path, columns: dict[str, object], says: str) -> None:
    path = damaged(tmp_path)
    _rewrite(next((path / "data/0").glob("*.arrow")), **columns)
    with pytest.raises(ConfigError, match=f"episode 0 of the dataset {path}.*{says}"):
        list(open_dataset(path).episodes())


def test_integers_that_the_dtype_of_their_space_does_not_hold_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^observation goes from 0 to 300, which uint8 does not hold$"):
        fitted(spaces.Box(0, 255, (2,), np.uint8), np.array([[0, 300]]), 1, "observation")


def test_a_writer_of_episodes_one_by_one_refuses_hdf5(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="format='hdf5' is not one of arrow, parquet"):
        DatasetWriter(NewDataset(f"{tmp_path}/test-v0", *CARTPOLE, format="hdf5"))
    assert not list(tmp_path.iterdir())


def test_a_torn_or_missing_file_of_hdf5_is_one_line(tmp_path: Path) -> None:
    tools.write(NewDataset(str(tmp_path / "torn"), *CARTPOLE, SPEC, {}, "hdf5"), episodes([3, 4], *CARTPOLE))
    file = next((tmp_path / "torn/data").glob("*.hdf5"))
    file.write_bytes(file.read_bytes()[:-400])
    for says in ("truncated file", "main_data.hdf5"):
        with pytest.raises(ConfigError, match=f"the dataset {tmp_path}/torn is damaged: .*{says}"):
            list(open_dataset(tmp_path / "torn").episodes())
        file.unlink(missing_ok=True)


def test_a_torn_table_and_a_link_are_one_line(tmp_path: Path) -> None:
    path = damaged(tmp_path)
    file = next((path / "data/1").glob("*.arrow"))
    file.write_bytes(file.read_bytes()[:-40])
    with pytest.raises(ConfigError, match=r"episode 1 of the dataset .* is damaged"):
        list(open_dataset(path).episodes())
    file.rename(tmp_path / "elsewhere")
    file.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match="has no table"):
        list(open_dataset(path).episodes())


def hdf5(folder: Path) -> tuple[Path, h5py.File]:
    path = folder / "test-v0"
    tools.write(NewDataset(str(path), *CARTPOLE, format="hdf5"), episodes([3, 4], *CARTPOLE))
    return path, h5py.File(path / "data/main_data.hdf5", "a")


@pytest.mark.parametrize("attack", ["claims", "link", "external", "object"])
def test_hdf5_that_claims_links_or_pickles_is_one_line(tmp_path: Path, attack: str) -> None:
    path, file = hdf5(tmp_path)
    with file:
        group = file["episode_0"]
        del group["rewards"]
        match attack:
            case "claims":
                group.create_dataset("rewards", shape=(10**12,), dtype="f4", chunks=(10**6,))
            case "link":
                group["rewards"] = h5py.ExternalLink("/etc/passwd", "/x")
            case "external":
                group.create_dataset("rewards", shape=(3,), dtype="u1", external=[("/etc/passwd", 0, 3)])
            case "object":
                group.create_dataset("rewards", data=np.array([b"x"] * 3, dtype="S9"))
    says = {"claims": "claims", "link": "is a link", "external": "another file", "object": "not numbers"}[attack]
    with pytest.raises(ConfigError, match=f"episode 0 of the dataset .*{says}"):
        list(open_dataset(path).episodes())


def test_spaces_that_differ_are_named_with_the_difference(tmp_path: Path) -> None:
    dataset = open_dataset(stored(tmp_path, episodes([2], NESTED, BOX), NESTED, BOX))
    check_spaces(dataset, NESTED, BOX, "it")
    other = spaces.Dict({**NESTED.spaces, "b": spaces.Discrete(5)})
    with pytest.raises(ConfigError, match=r"does not fit it: observation\['b'\]: Discrete\(4\) and Discrete\(5\)"):
        check_spaces(dataset, other, BOX, "it")
    with pytest.raises(ConfigError, match=r"action: Box\(-2.* and Box\(-1"):
        check_spaces(dataset, NESTED, spaces.Box(-1, 1, (2,)), "it")


def test_an_id_is_looked_up_and_a_wrong_one_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    stored(tmp_path, episodes([2], *CARTPOLE), *CARTPOLE)
    assert isinstance(open_dataset("test-v0"), Dataset)
    with pytest.raises(ConfigError, match=r"there is no dataset .*/other-v0"):
        open_dataset("other-v0")
    for folder, name in ((tmp_path.parent, "outside-v0"), (tmp_path, "test")):  # they are there
        tools.write(NewDataset(f"{folder}/{name}", *CARTPOLE), episodes([2], *CARTPOLE))
    (tmp_path / "a").mkdir()
    for name in ("a/../../outside-v0", "test"):
        with pytest.raises(ConfigError, match="is no dataset; give an id such as name-v0, or a path"):
            open_dataset(name)
    with pytest.raises(ConfigError, match="a dataset is there already"):
        DatasetWriter(NewDataset("test-v0", *CARTPOLE))
