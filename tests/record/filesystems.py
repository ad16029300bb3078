"""File systems of fsspec for tests: they fail, hang or stop at a chosen operation, as networks and killed processes do.

`slow://` is a folder that takes its time. `torn://` writes files piece by piece, as SFTP does. `store://` has keys
and no folders, as S3 does, and an event loop.
"""

from __future__ import annotations

import io
import threading
import time
from pathlib import Path
from typing import Any, ClassVar

import fsspec
from fsspec.asyn import AsyncFileSystem
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem


class Fault:
    """What happens at operations that write, of both file systems."""

    n = 0  # operations so far
    at = -1  # this one fails, after half of its work where the file system can do half
    always = False  # all do
    error: ClassVar[BaseException] = ConnectionError("no route")
    gate = threading.Event()  # operations wait for it
    entered = threading.Event()  # one does
    log: ClassVar[list[str]] = []

    @classmethod
    def reset(cls) -> None:
        cls.n, cls.at, cls.always, cls.error = 0, -1, False, ConnectionError("no route")
        cls.gate, cls.entered, cls.log = threading.Event(), threading.Event(), []
        cls.gate.set()
        Torn.store, Torn.pseudo_dirs = {}, [""]
        Store.content = {}

    @classmethod
    def fails(cls, what: str) -> bool:
        cls.log.append(what)
        if not cls.gate.is_set():
            cls.entered.set()
            cls.gate.wait(60)
        cls.n += 1
        return cls.always or cls.n == cls.at + 1


class Torn(MemoryFileSystem):
    """Its put_file and cp_file may leave half a file."""

    protocol = "torn"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]

    @classmethod
    def _strip_protocol(cls, path: Any) -> str:
        return str(super()._strip_protocol(str(path).removeprefix("torn://")))

    def put_file(self, lpath: str, rpath: str, callback: Any = None, mode: str = "overwrite", **kwargs: Any) -> None:
        data = Path(lpath).read_bytes()
        fails = Fault.fails(f"put {rpath}")
        self.pipe_file(rpath, data[: len(data) // 2] if fails else data)
        if fails:
            raise Fault.error

    def cp_file(self, path1: str, path2: str, **kwargs: Any) -> None:
        raise NotImplementedError  # as SFTP

    def mv(self, path1: str, path2: str, **kwargs: Any) -> None:
        if Fault.fails(f"mv {path2}"):
            raise Fault.error
        self.store[self._strip_protocol(path2)] = self.store.pop(self._strip_protocol(path1))

    def _rm(self, path: str) -> None:
        if Fault.fails(f"rm {path}"):
            raise Fault.error
        super()._rm(path)


class Store(AsyncFileSystem):
    """Content by key; a key is written at once."""

    protocol = "store"
    cachable = False
    content: ClassVar[dict[str, bytes]] = {}

    async def _put_file(self, lpath: str, rpath: str, **kwargs: Any) -> None:
        data = Path(lpath).read_bytes()
        if Fault.fails(f"put {rpath}"):
            raise Fault.error
        self.content[rpath] = data

    async def _cp_file(self, path1: str, path2: str, **kwargs: Any) -> None:
        if Fault.fails(f"cp {path2}"):
            raise Fault.error
        if path1 not in self.content:
            raise FileNotFoundError(path1)
        self.content[path2] = self.content[path1]

    async def _rm_file(self, path: str, **kwargs: Any) -> None:
        if Fault.fails(f"rm {path}"):
            raise Fault.error
        self.content.pop(path, None)

    async def _cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> bytes:
        if path not in self.content:
            raise FileNotFoundError(path)
        return io.BytesIO(self.content[path]).getvalue()[start:end]

    async def _info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        if path in self.content:
            return {"name": path, "size": len(self.content[path]), "type": "file"}
        if any(key.startswith(f"{path}/") for key in self.content):
            return {"name": path, "size": 0, "type": "directory"}
        raise FileNotFoundError(path)

    async def _ls(self, path: str, detail: bool = True, **kwargs: Any) -> list[Any]:
        below = sorted(
            {f"{path}/{key[len(path) + 1 :].split('/')[0]}" for key in self.content if key.startswith(f"{path}/")}
        )
        if not below:
            raise FileNotFoundError(path)
        return [await self._info(name) for name in below] if detail else below


class Slow(LocalFileSystem):
    """A folder, slow:///folder, in which writing a file takes a while; a kill leaves half of one."""

    protocol = "slow"

    def put_file(self, path1: str, path2: str, callback: Any = None, **kwargs: Any) -> None:
        data = Path(path1).read_bytes()
        with Path(self._strip_protocol(path2)).open("wb") as file:
            for half in (data[: len(data) // 2], data[len(data) // 2 :]):
                file.write(half)
                file.flush()
                time.sleep(0.03)


fsspec.register_implementation("slow", Slow, clobber=True)
fsspec.register_implementation("torn", Torn, clobber=True)
fsspec.register_implementation("store", Store, clobber=True)
