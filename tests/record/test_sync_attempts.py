"""The copy of a run whose earlier attempt failed, and was copied too."""

import json
from pathlib import Path

from rlframe.record.directory import write_params
from rlframe.record.snapshot import list_snapshots, save_snapshot
from tests.record.test_sync import _working, connect, copy, fetched, newest, put, stages, state

__all__ = ["_working", "stages"]  # fixtures


def test_a_new_try_takes_the_place_of_an_attempt_that_failed(stages: list[Path], tmp_path: Path) -> None:
    run = put(stages[1], tmp_path / "run_0")
    (run / "result.json").write_text('{"ended": "failed"}')
    copy(run, "store")
    run.rename(tmp_path / ".run_0.1")
    run.mkdir()
    write_params(run / "params.json", {"algo": "a2c"})
    copy(run, "store")
    there = connect("store").files()
    assert "result.json" not in there
    assert not [name for name in there if name.endswith("manifest.json")]
    save_snapshot(run / "snapshot", state(10), {"env_steps": 10, "score": None})
    copy(run, "store")
    found = fetched("store", tmp_path / "there")
    assert newest(found) == 10
    assert [path.name for path in list_snapshots(found / "snapshot")] == ["step_000000000010"]
    assert json.loads((found / "params.json").read_text())["config"] == {"algo": "a2c"}
