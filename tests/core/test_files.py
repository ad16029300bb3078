"""Files of a stranger's directory: neither links, pipes, devices nor hard links reach anything outside of it."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from rlframe.core import files
from rlframe.core.errors import ConfigError
from rlframe.core.files import (
    append,
    open_to_append,
    read_regular_file,
    replace_file,
    write_output,
    writing,
)
from tests.experiment.hostile import SPECIAL

SECRET = "precious"


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    file = tmp_path / "outside"
    file.write_text(SECRET)
    return file


@pytest.mark.parametrize("how", sorted(set(SPECIAL) - {"hardlink"}))
def test_what_is_not_a_regular_file_is_neither_read_nor_appended_to(how: str, outside: Path, tmp_path: Path) -> None:
    place = tmp_path / "log"
    SPECIAL[how](place, outside)
    for use in (read_regular_file, open_to_append):
        with pytest.raises(ConfigError, match="log is not a regular file"):
            use(place)
    assert outside.read_text() == SECRET


def test_a_file_of_several_names_is_copied_and_its_copy_is_appended_to(outside: Path, tmp_path: Path) -> None:
    place, trap = tmp_path / "log", tmp_path / ".new-log"
    place.hardlink_to(outside)
    trap.symlink_to(tmp_path / "elsewhere")  # where the copy is made
    (tmp_path / "elsewhere").write_text(SECRET)
    with open_to_append(place) as file:
        append(file, "\nmine")
    assert place.read_text() == f"{SECRET}\nmine"
    assert outside.read_text() == (tmp_path / "elsewhere").read_text() == SECRET


def test_a_file_of_several_names_is_not_copied_if_it_would_fill_the_disk(outside: Path, tmp_path: Path) -> None:
    os.truncate(outside, 1 << 40)
    (tmp_path / "log").hardlink_to(outside)
    with pytest.raises(ConfigError, match="log has 1,099,511,627,776 bytes, more than the limit of 1,073,741,824"):
        open_to_append(tmp_path / "log")


@pytest.mark.parametrize("how", ["symlink", "fifo"])
def test_what_takes_a_files_place_between_the_check_and_the_opening_is_refused(
    how: str, outside: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "log"

    def checked(path: Path) -> bool:
        regular = stat.S_ISREG(path.lstat().st_mode)
        path.unlink()
        SPECIAL[how](path, outside)
        return regular

    monkeypatch.setattr(files, "is_regular_file", checked)
    for use in (read_regular_file, open_to_append):
        place.unlink(missing_ok=True)
        place.write_text("a log")
        with pytest.raises((ConfigError, OSError)):
            use(place)
    assert outside.read_text() == SECRET


def test_a_file_that_is_longer_than_its_size_is_not_read_to_its_end() -> None:
    with pytest.raises(ConfigError, match="status has changed while it was read"):
        read_regular_file(Path("/proc/self/status"))  # its size is 0


def test_a_file_of_ours_replaces_a_pipe_and_an_output_is_written_into_it(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write_output(pipe, "an output")
    assert os.read(reader, 100) == b"an output"
    os.close(reader)
    replace_file(pipe, "ours")
    assert pipe.is_file()
    assert pipe.read_text() == "ours"
    with pytest.raises(ZeroDivisionError), writing(pipe) as new:
        new.write_text(str(1 // (new.write_text("half") - 4)))
    assert pipe.read_text() == "ours"
    assert [path.name for path in tmp_path.iterdir()] == ["pipe"]
