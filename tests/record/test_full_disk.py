"""A disk that is really full and a directory that is really deleted: files, errors and continuation."""

import errno
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from rlframe.core.errors import RecordError
from rlframe.core.files import disk_error
from rlframe.record import logger_context
from rlframe.record.snapshot import load_newest
from tests.fork_server import run_python
from tests.tables import read_csv

ROOT = Path(__file__).parents[2]
PRELUDE = """
import logging, os, sys
from pathlib import Path
import numpy as np
from rlframe.record import logger_context
from rlframe.core.errors import RecordError
from rlframe.record.snapshot import list_snapshots, load_newest
from tests.tables import read_csv

disk = Path(sys.argv[1])
def state(n):  # two megabytes
    return lambda: {"n": n, "replay": np.full(500_000, n, np.float32)}

def fill():
    "All but a few bytes."
    with (disk / "filler").open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(1024))
        except OSError:
            pass

def names(folder):
    return sorted(entry.name for entry in folder.iterdir())
"""


# What util-linux's unshare does, without a new interpreter. CLONE_NEWUSER | CLONE_NEWNS, MS_REC | MS_PRIVATE
MOUNT = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)

def call(function, *arguments):
    if function(*arguments):
        sys.exit(f"no file system may be mounted: {os.strerror(ctypes.get_errno())}")

ids = {"setgroups": "deny", "uid_map": f"0 {os.getuid()} 1", "gid_map": f"0 {os.getgid()} 1"}
call(libc.unshare, 0x10000000 | 0x00020000)
for name, text in ids.items():
    Path("/proc/self", name).write_text(text)
call(libc.mount, b"none", b"/", None, 0x4000 | 0x40000, None)
call(libc.mount, b"none", os.fsencode(disk), b"tmpfs", 0, b"size=5m")
"""


def on_small_disk(folder: Path, script: str) -> subprocess.CompletedProcess[str]:
    """Run a script with `disk`, a file system in memory of 5 megabytes that only its process sees."""
    if not sys.platform.startswith("linux"):
        pytest.skip("needs Linux")
    done = run_python([sys.executable, "-c", PRELUDE + MOUNT + script, folder], timeout=100)
    if "no file system may be mounted" in done.stderr:
        pytest.skip(done.stderr)
    assert done.returncode == 0, done.stderr
    return done


def test_a_full_disk_leaves_the_old_snapshot_no_temporary_and_the_numbers(tmp_path: Path) -> None:
    on_small_disk(
        tmp_path,
        """
with logger_context(disk, console=False) as run:
    run.snapshot(state(1), 1)
    run.snapshot(state(2), 2)
    try:
        run.snapshot(state(3), 3)
    except RecordError as error:
        message = str(error)
free = int(message.split(" bytes and ")[1].split(" are free")[0].replace(",", ""))
assert "needs 2,000,0" in message and free < 2_000_000, message
assert f"continue with resume={run.directory}" in message, message
assert names(run.directory / "snapshot") == ["last", "step_000000000001", "step_000000000002"]
assert load_newest(run.directory)[1]["n"] == 2
""",
    )


def test_with_continue_training_goes_on_and_disk_errors_are_counted_and_rows_written_later(tmp_path: Path) -> None:
    on_small_disk(
        tmp_path,
        """
with logger_context(disk, snapshot_errors="continue", snapshot_keep=1) as run:
    run.log({"env_steps": 1})
    run.snapshot(state(1), 1)
    fill()
    for step in range(2, 80):
        run.log({"env_steps": step})
        assert run.snapshot(state(step), step) is None
    (disk / "filler").unlink()
    run.log({"env_steps": 80})
    run.log({"env_steps": 81})
    assert run.snapshot(state(81), 81) is not None
columns, rows = read_csv(run.directory / "progress.csv")
assert [int(row["env_steps"]) for row in rows] == list(range(1, 82))
assert int(rows[-1]["record/disk_errors"]) > 78, rows[-1]
assert names(run.directory / "snapshot") == ["last", "step_000000000081"]
assert load_newest(run.directory)[1]["n"] == 81
assert not [name for name in names(run.directory) if name.startswith(".")]
assert "snapshot_errors=continue" in (run.directory / "debug.log").read_text()
""",
    )


def test_a_disk_error_in_the_final_snapshot_is_always_raised(tmp_path: Path) -> None:
    on_small_disk(
        tmp_path,
        """
with logger_context(disk, snapshot_errors="continue", console=False) as run:
    fill()
    try:
        run.snapshot(state(1), 1, final=True)
    except RecordError:
        sys.exit(0)
sys.exit("nothing was raised")
""",
    )


def test_a_disk_error_in_a_row_stops_the_run_and_leaves_complete_lines(tmp_path: Path) -> None:
    on_small_disk(
        tmp_path,
        """
try:
    with logger_context(disk, console=False) as run:
        run.log({"env_steps": 0, "x": 0.5})
        fill()
        for step in range(1, 2_000):
            run.log({"env_steps": step, "x": 0.5})
    sys.exit("nothing was raised")
except RecordError as error:
    assert "the row of env_steps" in str(error) and "are free in" in str(error), error
lines = (run.directory / "progress.csv").read_text()
assert lines.endswith("\\n") and all(line.count(",") == 1 for line in lines.splitlines()), lines
""",
    )


def test_a_file_size_limit_is_reported_like_a_full_disk(tmp_path: Path) -> None:
    script = (
        PRELUDE
        + """
import resource
with logger_context(disk, console=False) as run:
    run.snapshot(state(1), 1)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, resource.RLIM_INFINITY))
    try:
        run.snapshot(state(2), 2)
    except RecordError as error:
        assert "File too large; it needs 2,000," in str(error), error
assert names(run.directory / "snapshot") == ["last", "step_000000000001"]
assert load_newest(run.directory)[1]["n"] == 1
"""
    )
    done = run_python([sys.executable, "-c", script, tmp_path], timeout=100)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("lose", [shutil.rmtree, lambda folder: folder.rename(folder.with_name("elsewhere"))])
def test_a_deleted_directory_is_an_error_and_not_created_again(lose: object, tmp_path: Path) -> None:
    with logger_context(tmp_path, snapshot_errors="continue", console=False) as run:
        run.log({"env_steps": 1})
        lose(run.directory)  # type: ignore[operator]
        for record in (lambda: run.log({"env_steps": 2}), lambda: run.snapshot(dict, 2)):
            with pytest.raises(RecordError, match="was deleted or moved"):
                record()
    assert not run.directory.exists()


def test_where_links_are_refused_pieces_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    array = np.arange(500_000, dtype=np.float32)
    with logger_context(tmp_path, console=False) as run:
        paths = [run.snapshot(lambda: {"x": array}, step, math.nan) for step in (1, 2)]
    assert all(path is not None for path in paths)
    assert np.array_equal(load_newest(tmp_path / "run_0")[1]["x"], array)
    assert read_csv(tmp_path / "run_0/progress.csv")[1] == []


def test_a_disk_that_is_full_at_the_start_is_an_error_with_sizes_and_leaves_no_lock(tmp_path: Path) -> None:
    on_small_disk(
        tmp_path,
        """
from rlframe.core.errors import ConfigError
from rlframe.study.record import StudyRecord
(disk / "study").mkdir()
(disk / "runs").mkdir()
fill()
for start, folder in (
    (lambda: logger_context(disk / "runs", console=False).__enter__(), disk / "runs/run_0"),
    (lambda: StudyRecord(disk / "study", (), {}), disk / "study"),
):
    try:
        start()
    except ConfigError as error:
        assert "No space left on device; it needs 100,000 bytes and 0 are free in" in str(error), error
        assert str(error).endswith("; use another log_dir"), error
    else:
        sys.exit("the disk was not full")
    assert not folder.exists() or names(folder) == [], names(folder)
""",
    )


def test_only_a_full_disk_is_said_to_have_no_space(tmp_path: Path) -> None:
    assert "bytes and" in str(disk_error("a snapshot", tmp_path, OSError(errno.ENOSPC, "No space left on device"), 10))
    error = disk_error("a snapshot", tmp_path, IsADirectoryError(errno.EISDIR, "Is a directory", "snapshot/step_1"), 10)
    assert str(error) == "a snapshot cannot be written: Is a directory: snapshot/step_1"


def test_arrays_for_inspection_that_a_full_disk_does_not_take_are_a_warning(tmp_path: Path) -> None:
    on_small_disk(
        tmp_path,
        """
with logger_context(disk, console=False) as run:
    fill()
    assert run.dump("nonfinite_1", {"batch": np.zeros(500_000)}, {"loss": float("nan")}) == ""
assert not [name for name in names(run.directory) if "nonfinite" in name]
""",
    )


def test_tensorboard_gets_the_rows_of_a_full_disk_later(tmp_path: Path) -> None:
    on_small_disk(
        tmp_path,
        """
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
row = {f"algo/metric_{i}": float(i) for i in range(40)}
with logger_context(disk, snapshot_errors="continue", console=False) as run:
    run.log({"env_steps": 1, **row})
    fill()
    for step in range(2, 20):
        run.log({"env_steps": step, **row})
    (disk / "filler").unlink()
    for step in (20, 21):
        run.log({"env_steps": step, **row})
events = EventAccumulator(str(run.directory))
events.Reload()
assert [each.step for each in events.Scalars("algo/metric_3")] == list(range(1, 22))
""",
    )
