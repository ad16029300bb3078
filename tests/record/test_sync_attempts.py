"""The copy of a run whose earlier attempt failed, and was copied too; or that goes on from an earlier snapshot."""

import json
from pathlib import Path

import pytest

from rlframe.core.errors import RecordError
from rlframe.record import logger_context
from rlframe.record.directory import add_resumed, resumed_session, write_params
from rlframe.record.snapshot import list_snapshots, save_snapshot
from tests.processes import until
from tests.record.filesystems import Store
from tests.record.test_sync import _working, connect, copy, fetched, newest, put, stages, state, write

__all__ = ["_working", "stages"]  # fixtures


def test_an_attempt_that_goes_on_elsewhere_keeps_its_copy(stages: list[Path], tmp_path: Path) -> None:
    run = put(stages[0], tmp_path / "run_0")
    copy(run, "store")
    elsewhere = put(stages[2], tmp_path / "elsewhere")
    add_resumed(elsewhere / "params.json", resumed_session(elsewhere / "params.json", {})[0], {})
    copy(elsewhere, "store")
    before = dict(Store.content)
    run.rename(tmp_path / ".run_0.1")
    run.mkdir()
    write_params(run / "params.json", {"algo": "a2c"})
    with pytest.raises(RecordError, match="another run is there"):
        copy(run, "store")
    assert Store.content == before


def test_a_new_try_takes_the_place_of_an_attempt_that_failed(stages: list[Path], tmp_path: Path) -> None:
    run = put(stages[1], tmp_path / "run_0")
    (run / "result.json").write_text('{"ended": "failed"}')
    copy(run, "store")
    run.rename(tmp_path / ".run_0.1")
    run.mkdir()
    write_params(run / "params.json", {"algo": "a2c"})
    copy(run, "store")
    there = connect("store").files()
    assert [name for name in there if not name.startswith("snapshot/")] == ["params.json"]
    assert not [name for name in there if name.endswith("manifest.json")]
    (run / "progress.csv").write_text("env_steps\n10\n")
    save_snapshot(run / "snapshot", state(10), {"env_steps": 10, "score": None})
    copy(run, "store")
    found = fetched("store", tmp_path / "there")
    assert newest(found) == 10
    assert [path.name for path in list_snapshots(found / "snapshot")] == ["step_000000000010"]
    assert json.loads((found / "params.json").read_text())["config"] == {"algo": "a2c"}


def test_a_run_that_goes_on_from_an_earlier_snapshot_is_copied_once_its_logs_are_trimmed(tmp_path: Path) -> None:
    with logger_context(tmp_path, console=False) as run:
        for env_steps in (1, 2):
            write(run, env_steps)
    later = "snapshot/step_000000000002/manifest.json"

    def is_there() -> bool:  # a look through a Remote may meet the thread's own files
        return any(name.endswith(later) for name in list(Store.content))

    with logger_context(run.directory, console=False, sync="store://bucket/on", resume=True) as run:
        truncate = run._retention.truncate_after

        def slowly(env_steps: int) -> None:
            until(lambda: is_there() and not run._sync._busy)
            truncate(env_steps)

        run._retention.truncate_after = slowly
        run.truncate_after(1)
        until(lambda: Store.content and not is_there())
