"""Objects in a study's settings that its runs, other programs, cannot import: kept in the study's directory.

They were defined in a notebook, or made in the call: a lambda, an instance. A file there names them, so that
`env=DIR/objects_0a1b2c3d.py:MyEnv` is a word as any other, and needs trust to be resumed as any other file's.
"""

from __future__ import annotations

import re
import sys
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import cloudpickle

from rlframe.core.errors import ConfigError
from rlframe.core.files import replace_file
from rlframe.core.objects import ObjectName, name_elsewhere, pickled
from rlframe.study.record import FILE, size_and_time

_TEXT = '''"""Objects that the call of run_study was given, pickled by value; written anew by each such call."""

from pathlib import Path

import cloudpickle

for _name, _value in cloudpickle.loads(Path(__file__).with_suffix(".pkl").read_bytes()).items():
    globals()[_name] = cloudpickle.loads(_value)
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
        name = next((name for name, known in self._given.items() if known.value is given.value), "")
        if not name:
            name = plain = re.sub(r"\W|lambda", "", given.rpartition(":")[2].rpartition(".")[2]) or "function"
            while name in self._given:
                name = f"{plain}_{len(self._given)}"
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
        values = {name: pickled(given.value, given.key, given) for name, given in self._given.items()}
        path = self._file
        sys.modules.pop(path.stem, None)  # of an earlier call
        record, begun = self.directory / FILE, size_and_time(self.directory / FILE)
        before = {each: each.read_bytes() if each.exists() else None for each in (path.with_suffix(".pkl"), path)}
        is_new = not self.directory.exists()
        self.directory.mkdir(parents=True, exist_ok=True)
        new = path.with_suffix(".pkl.new")
        new.write_bytes(cloudpickle.dumps(values))
        new.replace(path.with_suffix(".pkl"))
        replace_file(path, _TEXT)
        try:
            yield
        except ConfigError:
            if size_and_time(record) != begun:  # runs name them
                raise
            for each, content in before.items():
                if content is None:
                    each.unlink()
                else:
                    each.write_bytes(content)
            if is_new and not any(self.directory.iterdir()):
                self.directory.rmdir()
            raise
