"""Objects in a study's settings that its runs, other programs, cannot import: kept in the study's directory.

They were defined in a notebook, or made in the call: a lambda, an instance. A file there names them, so that
`env=DIR/objects_0a1b2c3d.py:MyEnv_1a2b3c4d` is a word as any other, and needs trust to be resumed as any other file's.
The name ends in the object's digest: another object of the same name is another word.
"""

from __future__ import annotations

import re
import sys
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rlframe.core.errors import ConfigError
from rlframe.core.objects import ObjectName, name_elsewhere, pickled
from rlframe.core.own_code import object_digest
from rlframe.study.record import FILE, size_and_time

_TEXT = '''"""Objects that calls of run_study were given, each pickled by value in a file beside this one."""

from pathlib import Path

import cloudpickle


def __getattr__(name):
    path = Path(__file__).with_suffix(f".{name}.pkl")
    if not path.exists():
        raise AttributeError(f"{path.name} is not here")
    return globals().setdefault(name, cloudpickle.loads(path.read_bytes()))
'''


class StudyObjects:
    """The objects of one call, by their names in the file."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        # A file is imported by its name, which no other may have; the words of a study stay the same.
        self._file = directory / f"objects_{zlib.crc32(bytes(directory)):08x}.py"
        self._given: dict[str, ObjectName] = {}

    def __bool__(self) -> bool:
        return bool(self._given)

    def name(self, given: ObjectName, command: Sequence[str]) -> str:
        """The name by which a run of `command` finds the object."""
        if found := name_elsewhere(given, command):
            return found
        plain = re.sub(r"\W|lambda", "", given.rpartition(":")[2].rpartition(".")[2]) or "function"
        name = f"{plain}_{object_digest(given.value)[:8]}"
        self._given[name] = given
        return f"{self._file}:{name}"

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Write the files; as they were, if an error comes before the study has begun.

        Raises:
            ConfigError: an object cannot be pickled.
        """
        if not self._given:
            yield
            return
        pickles = {name: pickled(given.value, given.key, given) for name, given in self._given.items()}
        files = {self._file.with_suffix(f".{name}.pkl"): content for name, content in pickles.items()}
        files[self._file] = _TEXT.encode()
        sys.modules.pop(self._file.stem, None)  # of an earlier call
        record, begun = self.directory / FILE, size_and_time(self.directory / FILE)
        new = [path for path in files if not path.exists()]
        is_new = not self.directory.exists()
        self.directory.mkdir(parents=True, exist_ok=True)
        for path, content in files.items():
            path.with_suffix(".new").write_bytes(content)
            path.with_suffix(".new").replace(path)
        try:
            yield
        except ConfigError:
            if size_and_time(record) != begun:  # runs name them
                raise
            for path in new:
                path.unlink()
            if is_new and not any(self.directory.iterdir()):
                self.directory.rmdir()
            raise
