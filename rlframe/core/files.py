"""File access: untrusted files are read with a size limit, our own are flushed to disk (fsync)."""

import csv
import errno
import hashlib
import io
import json
import math
import os
import shutil
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any, BinaryIO

from rlframe.core.errors import ConfigError, RecordError, SnapshotError, printable

MAX_BYTES = 1 << 24
_LEAST_BYTES = 100_000  # of a new run or study: its settings, log and lock
_MAX_NODES = 1 << 21  # values of a JSON text; each takes about 100 bytes of memory
_MAX_TABLE_BYTES = 1 << 26
_MAX_COPY_BYTES = 1 << 30
_BLOCK_BYTES = 1 << 16
_MAX_LINE_BYTES, _ROW_BYTES = 1 << 20, 32  # the latter of a row, at least, on average


def is_regular_file(path: Path) -> bool:
    """Whether `path` is a regular file, not a link, pipe or device. Raises OSError if it does not exist."""
    return stat.S_ISREG(path.lstat().st_mode)


def read_regular_file(path: Path, max_bytes: int = MAX_BYTES) -> bytes:
    """Read a whole file. Raises ConfigError if it is missing, not a regular file, or larger than `max_bytes`."""
    with open_regular_file(path, max_bytes) as file:
        size = os.fstat(file.fileno()).st_size
        try:
            data = file.read(size + 1)
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    if len(data) > size:
        raise ConfigError(f"{path} has changed while it was read; try again")
    return data


def open_regular_file(path: Path, max_bytes: int) -> BinaryIO:
    """Open a file to read it. Raises ConfigError as `read_regular_file`."""
    try:
        if not is_regular_file(path):  # opening a device may have effects, so this is asked first
            raise ConfigError(f"{path} is not a regular file; replace the link, pipe or folder by the file itself")
        file = open(path, "rb", opener=_open_itself)  # noqa: SIM115  # the caller closes it
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    status = os.fstat(file.fileno())
    if stat.S_ISREG(status.st_mode) and status.st_size <= max_bytes:
        return file
    file.close()
    if not stat.S_ISREG(status.st_mode):
        raise ConfigError(f"{path} is not a regular file; something replaced it just now")
    raise ConfigError(f"{path} has {status.st_size:,} bytes, more than the limit of {max_bytes:,}")


def _open_itself(path: str, flags: int) -> int:
    """An opener for `open` that neither follows a link nor waits at a pipe."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)


def open_to_append(path: Path) -> io.FileIO:
    """Open a file without a buffer to append to it, or to read; it is made if it is missing.

    Appending changes no other file: one with several names (hard links) is replaced by a copy first.

    Raises:
        ConfigError: it is a link, pipe or folder, or too large to be copied.    OSError: a disk error.
    """
    if os.path.lexists(path):
        if not is_regular_file(path):
            raise ConfigError(f"{path} is not a regular file; remove it")
        if path.stat().st_nlink > 1:
            _replace_by_copy(path)
    file = open(path, "ab+", buffering=0, opener=_open_itself)  # noqa: SIM115  # the caller closes it
    status = os.fstat(file.fileno())
    if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
        file.close()
        raise ConfigError(f"{path} is not a regular file of one name; something replaced it just now")
    return file


def _replace_by_copy(path: Path) -> None:
    with open_regular_file(path, _MAX_COPY_BYTES) as file, replacing(path) as new, new.open("xb") as copy:
        shutil.copyfileobj(file, copy)


def drop_torn_line(file: io.FileIO) -> None:
    """Shorten a file of `open_to_append` to its complete lines, after a crash."""
    size = end = file.seek(0, os.SEEK_END)
    while end:
        begin = max(0, end - _BLOCK_BYTES)
        file.seek(begin)
        complete = file.read(end - begin).rfind(b"\n") + 1
        end = begin + complete
        if complete:
            break
    if end < size:
        file.truncate(end)


def append(file: io.FileIO, text: str | bytes) -> None:
    """Append complete lines to a file, whose writes are at its end, in one write, or nothing. Raises OSError."""
    data, size = text.encode() if isinstance(text, str) else text, os.fstat(file.fileno()).st_size
    n_written = file.write(data)
    if n_written != len(data):
        file.truncate(size)
        raise OSError(errno.ENOSPC, f"{file.name}: {n_written} of {len(data)} bytes written; is the disk full?")


def is_in_place(file: IO[Any]) -> bool:
    """Whether an open file is still the one of its name; if not, what is written to it is lost."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.lstat(file.name))
    except OSError:
        return False


def check_in_place(file: IO[Any]) -> None:
    """Raise RecordError unless `is_in_place`."""
    if not is_in_place(file):
        raise RecordError(f"{file.name} was deleted or replaced during the run; nothing more can be recorded in it")


def prepare_output(path: Path) -> None:
    """Make the folder of the file that a command is to write by `out=`, and check that it can be written there.

    Raises:
        ConfigError: it cannot, or is a link, whose target a run directory of another person may have chosen.
    """
    remedy = f"out={path} cannot be written: {{}}; name another file"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if _is_written_in_place(path):
            return
        if path.is_dir():
            raise ConfigError(remedy.format("it is a directory"))
        if path.is_symlink():
            raise ConfigError(remedy.format(f"it is a link to {os.readlink(path)}"))
        check_folder(path.parent)
    except OSError as error:
        raise ConfigError(remedy.format(error.strerror)) from None


def prepare_json(path: Path) -> None:
    """`prepare_output` of a file in JSON. Raises ConfigError too if its name says otherwise."""
    if path.suffix == ".csv":
        raise ConfigError(f"out={path} would have JSON in it; use out={path.with_suffix('.json')}")
    prepare_output(path)


def check_name(name: str) -> None:
    """Raise ConfigError unless a directory can have this name."""
    if name in ("", ".", "..") or {"/", "\\"} & {*name}:
        raise ConfigError(f"name={name!r:.60} must be usable as the name of a directory")


def check_folder(folder: Path) -> None:
    """Raise OSError unless files can be made in a folder."""
    with TemporaryFile(dir=folder):
        pass


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Context of a path to write, whose file becomes `path` at the end; on an error the old one stays.

    A reader sees either the old or the new content, also after a loss of power.
    """
    new = path.with_name(f".new-{path.name}")  # of the same ending, which says the format
    try:
        new.unlink(missing_ok=True)  # never write through a link
        yield new
        with new.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(new, path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise


def replace_file(path: Path, text: str | Iterable[str]) -> None:
    """Replace a file by a text, or by its pieces. Raises OSError."""
    with replacing(path) as new, new.open("x", encoding="utf-8", newline="") as file:
        file.writelines([text] if isinstance(text, str) else text)


def replace_json(path: Path, content: Mapping[str, Any]) -> None:
    """Replace a file by a JSON object that `read_json` reads. Raises OSError."""
    replace_file(path, json.dumps(content, indent=2) + "\n")


@contextmanager
def writing(path: Path) -> Iterator[Path]:
    """Context of a path to write an output to: that of `replacing`, or a pipe or device itself."""
    if _is_written_in_place(path):
        yield path
    else:
        with replacing(path) as new:
            yield new


def write_output(path: Path, text: str) -> None:
    """Write the file of a command's setting `out`, which `prepare_output` has checked. Raises ConfigError."""
    try:
        with writing(path) as new:
            new.write_text(text, encoding="utf-8", newline="")
    except OSError as error:
        raise ConfigError(f"out={path} cannot be written: {error.strerror}") from None


def _is_written_in_place(path: Path) -> bool:
    """Whether it is a pipe or device, also by a link such as /dev/stdout."""
    try:
        mode = path.stat().st_mode
    except OSError:  # missing, or a link to nothing
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def check_entries(data: bytes) -> None:
    """Raise ValueError if JSON text has so many values that they would fill the memory."""
    n = sum(map(data.count, (b",", b"[", b"{")))
    if n > _MAX_NODES:
        raise ValueError(f"it has {n:,} entries, more than the limit of {_MAX_NODES:,}")


def parse_json(data: bytes) -> Any:
    """The content of JSON text. Raises ValueError if it is not valid, or so nested or long that it fills the memory."""
    check_entries(data)
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def json_object(data: bytes | None) -> dict[str, Any]:
    """The JSON object in a text that may be another person's; empty if it is none."""
    with suppress(ValueError):
        found = parse_json(data or b"")
        return found if isinstance(found, dict) else {}
    return {}


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object. Raises ConfigError as `read_regular_file`, or if the file holds anything else."""
    try:
        content = parse_json(read_regular_file(path))
    except ValueError as error:
        raise ConfigError(f"{path} is damaged: {printable(str(error))}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path} is damaged: it is not a JSON object")
    return content


def starts_in(params: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """What a params.json says of its run's start, and of each time that it was resumed."""
    resumed = params.get("resumed")
    return [params, *(each for each in (resumed if isinstance(resumed, list) else ()) if isinstance(each, dict))]


def iter_csv(path: Path, max_bytes: int = _MAX_TABLE_BYTES) -> Iterator[list[str]]:
    """The columns of a progress.csv, then the cells of each row; without incomplete, damaged and endless lines.

    A missing file is empty. Raises ConfigError if it is not a regular file, or too large.

    Args:
        max_bytes: of a file that may come from another person.
    """
    if not os.path.lexists(path):
        return
    n_columns = n_rows = 0
    with open_regular_file(path, max_bytes) as file:
        for line in iter(lambda: file.readline(_MAX_LINE_BYTES), b""):
            if not line.endswith(b"\n"):  # torn by a crash, or too long
                while line and not line.endswith(b"\n"):
                    line = file.readline(_MAX_LINE_BYTES)
                continue
            cells = _cells(line[:-1].decode("utf-8" if n_columns else "utf-8-sig", errors="replace"))
            n_columns = n_columns or len(cells)
            if cells and len(cells) == n_columns:
                n_rows += 1
                if n_rows > max_bytes // _ROW_BYTES:
                    raise ConfigError(f"{path} has more than {max_bytes // _ROW_BYTES:,} rows, the limit")
                yield cells


def as_csv(rows: Iterable[Iterable[Any]]) -> str:
    """Rows of cells as text."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def number_in(cell: str) -> float:
    """The number in a cell of a table; NaN if it is empty or damaged."""
    try:
        return float(cell or "nan")  # an exception takes longer, and many cells are empty
    except ValueError:
        return math.nan


def _cells(line: str) -> list[str]:
    """Parse one line by itself, so that a damaged line cannot swallow the next."""
    if '"' not in line:
        return line.removesuffix("\r").split(",") if line else []
    try:
        return next(csv.reader([line]), [])
    except csv.Error:
        return []


def disk_error(what: str, folder: Path, error: OSError, n_bytes: int = 0) -> RecordError:
    """The RecordError for a disk error; `n_bytes`: the size that was to be written, if known."""
    why = f"{what} cannot be written: {error.strerror or error}"
    if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return RecordError(f"{why}: {printable(str(error.filename))}" if error.filename else why)
    needed = f"it needs {n_bytes:,} bytes and " if n_bytes else ""
    return RecordError(f"{why}; {needed}{_free(folder)}")


@contextmanager
def naming_disk_errors(what: str, folder: Path) -> Iterator[None]:
    """Raise ConfigError for a disk error in the block, in which a run or a study begins in its folder."""
    try:
        yield
    except OSError as error:
        problem = disk_error(f"{what} in {folder}", folder, error, _LEAST_BYTES)
        raise ConfigError(f"{problem}; use another log_dir") from error


def check_free_space(what: str, folder: Path, n_bytes: int) -> None:
    """Raise RecordError if the disk of `folder` has less than `n_bytes` free."""
    if n_bytes > shutil.disk_usage(folder).free:
        raise RecordError(f"{what} cannot be written: it needs {n_bytes:,} bytes and {_free(folder)}")


def _free(folder: Path) -> str:
    try:
        return f"{shutil.disk_usage(folder).free:,} are free in {folder}"
    except OSError:
        return f"{folder} no longer exists"


def write_file(path: Path, data: bytes | memoryview) -> None:
    """Write a new file and flush it to disk. Raises FileExistsError if it exists, OSError on a disk error."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(descriptor, rest) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync(path: Path) -> None:
    """Flush a file or the entries of a directory to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_file(file: Path, n_bytes: int, sha256: str) -> None:
    """Raise SnapshotError unless a regular file has this size and hash; the size is checked first."""
    try:
        status = os.lstat(file)
        if not stat.S_ISREG(status.st_mode):
            raise SnapshotError(f"{file} is not a regular file")
        if status.st_size != n_bytes:
            found = f"{status.st_size:,} bytes, its manifest says {n_bytes:,}"
            raise SnapshotError(f"{file} has {found}; use another snapshot", damaged=True)
        with open(file, "rb", opener=_open_itself) as stream:
            found = hashlib.file_digest(stream, "sha256").hexdigest()
    except OSError as error:  # missing, or a failing disk
        raise SnapshotError(f"{file} cannot be read: {error.strerror}", damaged=True) from None
    if found != sha256:
        raise SnapshotError(
            f"{file} is damaged: its content does not match its hash; use another snapshot", damaged=True
        )
