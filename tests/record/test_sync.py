"""sync=URI: the copy can be resumed at every moment, and neither a failing nor a hanging remote touches the run."""

import json
import logging
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from fsspec.registry import known_implementations

from rlframe.core.errors import ConfigError, RecordError
from rlframe.record import codec, logger_context, rank_state
from rlframe.record import sync as sync_module
from rlframe.record.directory import add_choices, add_resumed, resumed_session, write_params
from rlframe.record.mirror import Mirror, is_complete
from rlframe.record.rank_state import list_snapshots
from rlframe.record.remote import Remote, check_uri
from rlframe.record.run import Run
from rlframe.record.snapshot import load_newest, remove_snapshot, save_snapshot
from rlframe.record.sync import Sync, make_sync
from tests.processes import until
from tests.record.filesystems import Fault, Store
from tests.tables import read_csv

SWEEPS = [  # the file system, and at which operations it fails: every one, or every n-th
    ("torn", 4),
    pytest.param("torn", 1, marks=pytest.mark.slow),
    pytest.param("store", 1, marks=pytest.mark.slow),
]
STEPS = (10, 20, 30)


@pytest.fixture(autouse=True)
def _working() -> Iterator[None]:
    Fault.reset()
    yield
    Fault.gate.set()
    for thread in threading.enumerate():
        if thread.name == "sync":
            thread.join(20)


def state(env_steps: int) -> dict[str, object]:
    """A small array that differs, and a large one of which most stays."""
    large = (np.arange(3_000) % 251).astype(np.uint8)  # three chunks
    large[-1] = env_steps
    return {"small": np.full(3, env_steps), "large": large}


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A run directory at three moments, with the newest snapshots: 10; 10 and 20; 30."""
    folder = tmp_path_factory.mktemp("stages")
    run = folder / "run"
    run.mkdir()
    write_params(run / "params.json", {"algo": "ppo"})
    found = []
    patch = pytest.MonkeyPatch()
    patch.setattr(rank_state, "LARGE_BYTES", 1_000)
    patch.setattr(codec, "CHUNK_BYTES", 1_000)
    for n, env_steps in enumerate(STEPS):
        (run / "progress.csv").write_text("env_steps\n" + "".join(f"{step}\n" for step in STEPS[: n + 1]))
        save_snapshot(run / "snapshot", state(env_steps), {"env_steps": env_steps, "score": None})
        for snapshot in list_snapshots(run / "snapshot")[:-1]:
            if n != 1:
                remove_snapshot(snapshot)
        found.append(shutil.copytree(run, folder / f"stage_{n}", symlinks=True))
    patch.undo()
    return found


def put(stage: Path, directory: Path) -> Path:
    """Make a directory be as at a moment; files that do not change stay."""
    if directory.exists():
        shutil.rmtree(directory)
    return Path(shutil.copytree(stage, directory, symlinks=True))


def connect(protocol: str) -> Remote:
    return Remote(f"{protocol}://place/run_0", lambda: None)


def copy(directory: Path, protocol: str) -> None:
    """As a process that has just started."""
    Mirror(directory, connect(protocol)).copy(list_snapshots(directory / "snapshot"))


def fetched(protocol: str, folder: Path) -> Path:
    remote = connect(protocol)
    files = remote.files()
    remote.fetch({name: size for name, size in files.items() if is_complete(files, name)}, folder)
    return folder


def content(directory: Path) -> dict[str, bytes]:
    paths = [path for path in directory.rglob("*") if path.is_file() and not path.is_symlink()]
    found = {str(path.relative_to(directory)): path.read_bytes() for path in paths if path.name != "debug.log"}
    return {name: data for name, data in found.items() if not name.startswith("snapshot/last")}


def newest(directory: Path) -> int:
    """env_steps of the snapshot that a resume takes, whose log has all rows up to it; 0 if there is none."""
    found = list_snapshots(directory / "snapshot")
    if not found:
        return 0
    path, saved, meta = load_newest(directory)
    assert path == found[-1].resolve(), "the newest is intact"
    env_steps = meta["env_steps"]
    assert saved["small"].tolist() == [env_steps] * 3
    rows = (directory / "progress.csv").read_text().split("\n")[1:-1]
    assert {str(step) for step in STEPS if step <= env_steps} <= set(rows)
    return int(env_steps)


@pytest.mark.parametrize(("protocol", "every"), SWEEPS)
def test_whenever_a_copy_is_killed_what_is_there_can_be_resumed_and_completed(
    protocol: str, every: int, stages: list[Path], tmp_path: Path
) -> None:
    def copy_all(at: int) -> int:
        """The stage at which operation `at` fails, after which nothing more is written."""
        Fault.reset()
        Fault.at = at
        mirror = Mirror(put(stages[0], tmp_path / "run"), connect(protocol))
        for n, stage in enumerate(stages):
            run = put(stage, tmp_path / "run")
            try:
                mirror.copy(list_snapshots(run / "snapshot"))
            except ConnectionError:
                return n
        return len(stages)

    at, reached = 0, set[int]()
    while (n := copy_all(at)) < len(stages):
        folder = fetched(protocol, tmp_path / f"fetched_{at}")
        reached.add(found := newest(folder) if (folder / "progress.csv").exists() else 0)
        assert found >= (STEPS[n - 1] if n else 0), f"operation {at}, {Fault.log[-1]}: the last complete copy is there"
        copy(tmp_path / "run", protocol)
        assert content(fetched(protocol, tmp_path / f"again_{at}")) == content(stages[n])
        at += every
    assert at > 20
    assert reached >= {10, 20, 30}


def test_chunks_that_are_there_are_copied_there_and_unchanged_files_not_sent_again(
    stages: list[Path], tmp_path: Path
) -> None:
    mirror = Mirror(put(stages[0], tmp_path / "run"), connect("store"))
    for stage in stages[:2]:
        run = put(stage, tmp_path / "run")
        Fault.log.clear()
        mirror.copy(list_snapshots(run / "snapshot"))
    sent = [line for line in Fault.log if "/chunks/" in line]
    assert sorted(line.partition(" ")[0] for line in sent if "000020/" in line) == ["cp", "cp", "put"]
    Fault.log.clear()
    copy(run, "store")
    assert not [line for line in Fault.log if "snapshot" in line], "another process finds them by their manifests"


def test_the_run_of_another_is_neither_overwritten_nor_mixed(stages: list[Path], tmp_path: Path) -> None:
    run = put(stages[0], tmp_path / "run")
    copy(run, "store")
    before = dict(Store.content)
    other = tmp_path / "other"
    other.mkdir()
    write_params(other / "params.json", {"algo": "ppo"})
    with pytest.raises(RecordError, match="another run is there"):
        copy(other, "store")
    assert Store.content == before
    add_resumed(run / "params.json", resumed_session(run / "params.json", {})[0], {})  # on another machine
    copy(run, "store")
    with pytest.raises(RecordError, match="resumed elsewhere"):
        copy(put(stages[1], tmp_path / "run"), "store")


def write(run: Run, env_steps: int, final: bool = False) -> None:
    run.log({"env_steps": env_steps})
    run.snapshot(lambda: {"x": np.full(3, env_steps)}, env_steps, final=final)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def there(protocol: str, directory: Path, folder: Path) -> list[str]:
    """Names of the snapshots in the copy of a run, which is fetched."""
    place = json.loads((directory / "params.json").read_text())["chosen"]["sync"]
    remote = Remote(place, lambda: None)
    remote.fetch(remote.files(), folder)
    return [snapshot.name for snapshot in list_snapshots(folder / "snapshot")]


@pytest.mark.parametrize("protocol", ["torn", "store"])
def test_a_run_is_copied_as_it_is_at_its_end(protocol: str, tmp_path: Path) -> None:
    uri = f"{protocol}://bucket/mine"
    with logger_context(tmp_path / "a", console=False, sync=uri) as run:
        for env_steps in (1, 2, 3):
            write(run, env_steps, env_steps == 3)
        run.write_result({"ended": "completed"})
    place = json.loads((run.directory / "params.json").read_text())["chosen"]["sync"]
    assert place == f"{uri}{tmp_path}/a/run_0"
    there(protocol, run.directory, tmp_path / "fetched")
    assert content(tmp_path / "fetched") == content(run.directory)
    with logger_context(run.directory, console=False, sync=uri, resume=True) as run:
        write(run, 4)
    assert there(protocol, run.directory, tmp_path / "again") == ["step_000000000003", "step_000000000004"]
    assert not (tmp_path / "again/result.json").exists(), "the run was resumed and has not ended"


def test_a_resume_that_is_refused_copies_nothing_and_one_that_goes_on_is_copied_at_once(tmp_path: Path) -> None:
    with logger_context(tmp_path / "a", console=False) as run:
        write(run, 1, True)
        run.write_result({"ended": "completed"})
    before, place = (run.directory / "params.json").read_bytes(), f"store://bucket/on{run.directory}"
    with logger_context(run.directory, console=False, sync="store://bucket/on", resume=True):
        pass
    assert (run.directory / "params.json").read_bytes() == before
    assert not names(place)
    with logger_context(run.directory, console=False, sync="store://bucket/on", resume=True) as run:
        run.truncate_after(1)
        until(lambda: "params.json" in names(place))
        assert "result.json" not in names(place)


def names(place: str) -> list[str]:
    """The files at a place; empty if nothing was copied there yet."""
    try:
        return list(Remote(place, lambda: None).files())
    except FileNotFoundError:
        return []


def test_a_failing_remote_is_one_warning_and_gets_the_run_when_it_works_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sync_module, "_RETRY_S", 0.01)
    monkeypatch.setattr(Fault, "error", ConnectionError("x" * 10**6))
    Fault.always = True
    with logger_context(tmp_path, console=False, sync="store://bucket") as run:
        write(run, 1)
        until(lambda: run._sync.n_failed > 1)
        write(run, 2)
        Fault.always = False
    (text,) = warnings(caplog)
    assert "not copied to store://bucket" in text
    assert len(text) < 600
    assert float(read_csv(run.directory / "progress.csv")[1][-1]["record/not_copied"]) >= 2
    assert there("store", run.directory, tmp_path / "fetched") == ["step_000000000001", "step_000000000002"]


@pytest.mark.parametrize("kind", ["fails", "hangs"])
def test_the_end_of_a_run_waits_a_bounded_time_and_says_what_is_missing(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sync_module, "_END_S", 0.3)
    start_s = time.monotonic()
    with logger_context(tmp_path, console=False, sync="store://bucket") as run:
        write(run, 1)
        until(lambda: run._sync._copied == "step_000000000001")
        Fault.always = kind == "fails"
        if kind == "hangs":
            Fault.gate.clear()
        write(run, 2)
    assert time.monotonic() - start_s < 20
    assert "the run up to step_000000000001, not its end" in warnings(caplog)[-1]
    assert f"resume={run.directory} copies it" in warnings(caplog)[-1]


def test_a_copy_without_progress_is_given_up_and_another_takes_its_place(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    Fault.gate.clear()
    with logger_context(tmp_path, console=False, sync="torn://bucket") as run:
        write(run, 1)
        assert Fault.entered.wait(20)
        first = run._sync._thread
        monkeypatch.setattr(sync_module, "_HUNG_S", 0.0)
        hung, Fault.gate = Fault.gate, threading.Event()
        Fault.gate.set()
        write(run, 2)
        monkeypatch.setattr(sync_module, "_HUNG_S", 100.0)
        until(lambda: run._sync._copied == "step_000000000002")
        n = len(Fault.log)
        hung.set()
        until(lambda: not first.is_alive())
        assert len(Fault.log) == n, "the first one writes no more"
    assert "no progress" in warnings(caplog)[0]


def test_the_snapshot_that_is_copied_is_kept_until_then(tmp_path: Path) -> None:
    Fault.gate.clear()
    with logger_context(tmp_path, console=False, snapshot_keep=1, sync="torn://bucket") as run:
        until(Fault.entered.is_set)  # the first copy, of params.json
        write(run, 1)
        Fault.entered.clear()
        Fault.gate.set()
        until(lambda: run._sync._copied == "step_000000000001")
        Fault.gate.clear()
        run._sync._beat_s -= 10**6  # nothing was to be copied for long, which is no hang
        write(run, 2)
        until(Fault.entered.is_set)
        for env_steps in (3, 4, 5):
            write(run, env_steps)
        names = [snapshot.name for snapshot in list_snapshots(run.directory / "snapshot")]
        assert names == ["step_000000000002", "step_000000000005"]
        assert not run._sync.n_failed
        Fault.gate.set()
    assert there("torn", run.directory, tmp_path / "fetched")[-1] == "step_000000000005"


def test_a_snapshot_that_is_deleted_by_hand_while_it_is_copied_is_skipped(
    stages: list[Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = put(stages[1], tmp_path / "run")
    found = Sync(run, "torn://bucket/run")
    Fault.gate.clear()
    found.request()
    assert Fault.entered.wait(20)
    shutil.rmtree(run / "snapshot/step_000000000020")
    Fault.gate.set()
    found.close()
    files = Remote("torn://bucket/run", lambda: None).files()
    assert [name for name in files if name.endswith("manifest.json")] == ["snapshot/step_000000000010/manifest.json"]
    assert not warnings(caplog)


def test_a_run_directory_that_was_deleted_is_not_deleted_in_the_copy(stages: list[Path], tmp_path: Path) -> None:
    run = put(stages[1], tmp_path / "run")
    mirror = Mirror(run, connect("store"))
    mirror.copy(list_snapshots(run / "snapshot"))
    before = dict(Store.content)
    shutil.rmtree(run / "snapshot")
    mirror.copy([])
    shutil.rmtree(run)
    with pytest.raises(ConfigError):
        mirror.copy([])
    assert Store.content == before


@pytest.mark.parametrize(
    ("uri", "problem"),
    [
        ("sftpp://bucket", "no protocol 'sftpp' is known to fsspec; did you mean sftp"),
        ("s3:/bucket", "write s3://"),
        ("s3://", "name one folder"),
        ("s3://a/run_*", "name one folder"),
        ("simplecache::s3://a", "name one folder"),
        ("sftp://me:secret@host/runs", "password"),
        ("s3a://bucket", "needs another package: pip install s3fs"),
        ("absent://bucket", "needs another package: Install it"),
    ],
)
def test_a_place_that_cannot_be_used_is_one_line_with_the_remedy(
    uri: str, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for protocol in ("absent", "s3a"):
        monkeypatch.setitem(known_implementations, protocol, {"class": "absent_package.Files", "err": "Install it"})
    with pytest.raises(ConfigError, match=problem) as caught:
        check_uri(uri, "sync")
    assert "secret" not in str(caught.value)


def test_without_fsspec_its_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(ConfigError, match=r'pip install "rlframe\[sync\]"'):
        check_uri("s3://bucket", "sync")
    check_uri("", "sync")


def test_a_run_is_not_copied_into_itself(tmp_path: Path) -> None:
    (run := tmp_path / "a/run_0").mkdir(parents=True)
    for place in (run, run / "copy"):
        write_params(run / "params.json", {})
        add_choices(run / "params.json", {"sync": f"file://{place}"})
        with pytest.raises(ConfigError, match="hold each other"):
            make_sync(str(place.parent), run)


def test_the_place_in_a_run_directory_counts_only_below_the_place_that_is_given(tmp_path: Path) -> None:
    (run := tmp_path / "run_0").mkdir()
    for before, kept in {
        "memory://bucket/mine/run_7": True,
        "memory://other/run_7": False,
        "memory://bucket/../other": False,
        "memory://bucket/a::b": False,
    }.items():
        write_params(run / "params.json", {})
        add_choices(run / "params.json", {"sync": before})
        assert (make_sync("memory://bucket/", run).place == before) == kept
