"""Files in a folder at a URI, by fsspec: listed and read within bounds, replaced without half files."""

import os
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from rlframe.core.config import nearest
from rlframe.core.errors import ConfigError, RecordError, printable, shortened

SEPARATOR = "://"
_EXAMPLES = "s3://bucket/runs, gs://bucket/runs, sftp://host/folder, file:///folder or a folder"
_PACKAGES = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "sftp": "paramiko", "ssh": "paramiko"}
_NAME = re.compile(r"[^./\\\x00-\x1f][^/\\\x00-\x1f]{0,254}")  # of a file or folder: not hidden, not ..
_TEMPORARY = ".sync-"  # prefix of a file that is being written
_MAX_FILES, _MAX_DEPTH = 1 << 17, 8  # of a folder that is listed
_BATCH = 64  # files that are written together; file systems with an event loop write them at the same time
_PIECE_BYTES, _PIECES = 1 << 22, 16  # that are read together
_T = TypeVar("_T")


def is_uri(text: str) -> bool:
    return SEPARATOR in text


def check_uri(uri: str, key: str) -> None:
    """Check a URI or the path of a folder, without connecting to anything. An empty one is valid.

    Raises:
        ConfigError: fsspec or the package of its protocol is missing, its protocol is unknown, or it is malformed.
    """
    if not uri:
        return
    shown = printable(f"{key}={shortened(uri)}")
    protocol, separator, rest = uri.partition(SEPARATOR)
    if not separator and re.match(r"\w+:", uri):
        raise ConfigError(f"{shown} is neither a URI nor a folder; write {uri.partition(':')[0]:.20}{SEPARATOR}...")
    if "::" in uri or any(character in uri for character in "*?[]") or (separator and not rest.strip("/")):
        raise ConfigError(f"{shown}: name one folder, such as {_EXAMPLES}; without *, ?, [, ] and ::")
    if separator and _has_password(uri):
        raise ConfigError(f"{key} has a password, which params.json would keep; use a key, or fsspec's configuration")
    try:
        import fsspec
    except ImportError:
        raise ConfigError(f'{shown} needs another package: pip install "rlframe[sync]"') from None
    try:
        fsspec.get_filesystem_class(protocol if separator else "file")
    except ValueError:
        hint = nearest(protocol, fsspec.available_protocols())
        raise ConfigError(f"{shown}: no protocol {protocol[:40]!r} is known to fsspec{hint}; use {_EXAMPLES}") from None
    except ImportError as error:
        remedy = f"pip install {_PACKAGES[protocol]}" if protocol in _PACKAGES else str(error)
        raise ConfigError(f"{shown} needs another package: {remedy}") from None


def _has_password(uri: str) -> bool:
    try:
        return urlsplit(uri).password is not None
    except ValueError:  # not a URL of the web's form
        return False


def normalized(uri: str) -> str:
    """A URI without a slash at its end; the path of a folder as file:///path."""
    protocol, separator, rest = uri.partition(SEPARATOR)
    if separator and protocol not in ("file", "local"):
        return uri.rstrip("/")
    return f"file{SEPARATOR}{os.path.abspath(os.path.expanduser(rest if separator else uri))}"


class Remote:
    """A folder at a URI. Names are relative to it, with `/`. Any method may raise any exception of the file system."""

    def __init__(self, uri: str, beat: Callable[[], None]) -> None:
        """Connect; the folder need not exist. `beat` is called whenever some work is done; its exception ends it."""
        import fsspec.core

        self.uri, self._beat = uri, beat
        self._fs, root = fsspec.core.url_to_fs(uri, skip_instance_cache=True)
        self._root = root.rstrip("/")
        self._made: set[str] = set()  # folders
        self._temporary = f"{self._root}/{_TEMPORARY}{secrets.token_hex(4)}"

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    def files(self) -> dict[str, int]:
        """Names and sizes in bytes of all files, in folders too. Links, hidden files and odd names are left out.

        Raises:
            FileNotFoundError: the folder does not exist.    RecordError: there are too many files.
        """
        self._fs.invalidate_cache()
        found: dict[str, int] = {}
        folders = [""]
        for folder in folders:
            for name, entry in self._list(folder):
                if entry["type"] == "directory" and name.count("/") < _MAX_DEPTH:
                    folders.append(name)
                elif entry["type"] == "file" and isinstance(entry["size"], int) and entry["size"] >= 0:
                    found[name] = entry["size"]
            if len(found) + len(folders) > _MAX_FILES:
                raise RecordError(f"{self.uri} has more than {_MAX_FILES:,} files, which no run has")
        return found

    def _list(self, folder: str) -> list[tuple[str, Mapping[str, Any]]]:
        """The entries of a folder by their names; files that a killed process was writing are removed."""
        path, entries = self._path(folder), []
        for entry in self._fs.ls(path, detail=True):
            last = str(entry["name"]).rstrip("/").removeprefix(f"{path}/")
            if last.startswith(_TEMPORARY) and "/" not in last:
                with suppress(Exception):  # a folder that is only read
                    self._fs.rm_file(f"{path}/{last}")
            elif _NAME.fullmatch(last) and not entry.get("islink"):
                entries.append((f"{folder}/{last}" if folder else last, entry))
        self._beat()
        return entries

    def read(self, name: str, max_bytes: int) -> bytes | None:
        """A file's content; None if it is missing. Raises RecordError if it is larger than `max_bytes`."""
        try:
            data = bytes(self._fs.cat_file(self._path(name), start=0, end=max_bytes + 1))
        except FileNotFoundError:
            return None
        self._beat()
        if len(data) > max_bytes:
            raise RecordError(f"{self.uri}/{name} has more bytes than the limit of {max_bytes:,}")
        return data

    def fetch(self, files: Mapping[str, int], folder: Path) -> None:
        """Write files of `files()` into a local folder, which has none of them; no more bytes than their sizes.

        Raises:
            RecordError: a file has fewer bytes now.
        """
        for name in files:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).touch(exist_ok=False)
        starts = [(name, start) for name, size in files.items() for start in range(0, size, _PIECE_BYTES)]
        for batch in _batches(starts, _PIECES):
            ends = [min(start + _PIECE_BYTES, files[name]) for name, start in batch]
            paths, begins = [self._path(name) for name, _ in batch], [start for _, start in batch]
            found = self._fs.cat_ranges(paths, begins, ends, on_error="raise")
            for (name, start), end, data in zip(batch, ends, found, strict=True):
                if len(data) != end - start:
                    raise RecordError(f"{self.uri}/{name} has changed while it was read; try again")
                with (folder / name).open("ab") as file:
                    file.write(data)
            self._beat()

    def put(self, files: Sequence[tuple[Path, str]]) -> None:
        """Write local files under new names. A crash may leave half of one."""
        from fsspec.callbacks import Callback

        progress = Callback(hooks={"beat": lambda *_, **__: self._beat()})
        for batch in _batches(files, _BATCH):
            self._make_folders(name for _, name in batch)
            self._fs.put([str(path) for path, _ in batch], [self._path(name) for _, name in batch], callback=progress)
            self._beat()

    def copy(self, names: Sequence[tuple[str, str]]) -> None:
        """Copy files within the folder. Raises NotImplementedError if its file system cannot."""
        for batch in _batches(names, _BATCH):
            self._make_folders(name for _, name in batch)
            self._fs.copy([self._path(name) for name, _ in batch], [self._path(name) for _, name in batch])
            self._beat()

    def replace(self, path: Path, name: str) -> None:
        """Write a local file under a name that may exist: others see the old content or the new."""
        self._make_folders([name])
        self._fs.put([str(path)], [self._temporary])
        self._beat()
        self._fs.mv(self._temporary, self._path(name))
        self._beat()

    def _make_folders(self, names: Any) -> None:
        for folder in {self._path(name).rpartition("/")[0] for name in names} - self._made:
            self._fs.makedirs(folder, exist_ok=True)
            self._made.add(folder)

    def remove(self, name: str) -> None:
        """Delete a file, if it is there."""
        with suppress(FileNotFoundError):
            self._fs.rm_file(self._path(name))
        self._beat()

    def remove_folder(self, name: str) -> None:
        """Delete a folder, if it is there."""
        with suppress(FileNotFoundError):
            self._fs.rm(self._path(name), recursive=True)
        self._made = {folder for folder in self._made if not f"{folder}/".startswith(f"{self._path(name)}/")}
        self._beat()


def _batches(items: Sequence[_T], n: int) -> list[Sequence[_T]]:
    return [items[start : start + n] for start in range(0, len(items), n)]
