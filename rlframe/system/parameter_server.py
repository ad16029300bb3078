"""ParameterServer: the newest parameters of a run in an actor of Ray, for learners, collectors and testers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save

from rlframe.core.errors import ReadableError
from rlframe.core.files import replacing, write_file
from rlframe.system.actors import CALL_S
from rlframe.system.cluster import check_room, imported

Version = tuple[int, dict[str, np.ndarray]]  # its number, and the parameters by name, which may be read-only


class _Store:
    """Lives in the actor's process, with a reference to the newest parameters, one object for all who pull them."""

    def __init__(self) -> None:
        self.newest: list[tuple[int, list[Any]]] = []  # at most one; references in lists stay references

    def push(self, version: int, values: Mapping[str, np.ndarray]) -> None:
        if not self.newest or version > self.newest[0][0]:
            self.newest = [(version, [imported().put(values)])]

    def pull(self, version: int) -> list[tuple[int, list[Any]]]:
        return [each for each in self.newest if each[0] > version]


class ParameterServer:
    """Parameters by version. Its copies in other processes, where Ray sends it, are the same server.

    Those who push and pull may come and go. If the actor itself dies, another starts, and has nothing until the next
    push; it ends with the process that made it.
    """

    def __init__(self) -> None:
        """Raises ConfigError if Ray is missing or not connected."""
        check_room(0, 0.0, "ParameterServer")
        made = imported().remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)(_Store)
        self._store = made.remote()

    def push(self, version: int, parameters: Mapping[str, np.ndarray]) -> None:
        """Make these the newest, unless there is this version already or a newer one. Does not wait."""
        self._store.push.remote(version, dict(parameters))

    def pull(self, version: int = -1) -> Version | None:
        """The newest parameters if they are newer than `version`, else nothing.

        Raises ReadableError if the actor does not answer.
        """
        ray = imported()
        try:
            for newest, (reference,) in ray.get(self._store.pull.remote(version), timeout=CALL_S):
                return newest, ray.get(reference, timeout=CALL_S)
        except ray.exceptions.GetTimeoutError:
            raise ReadableError(f"the ParameterServer has not answered in {CALL_S:.0f} s; is Ray up?") from None
        except ray.exceptions.ObjectLostError:  # the actor has died meanwhile
            return None
        return None

    def get(self) -> Version:
        """The newest parameters. Raises ReadableError if there are none."""
        if found := self.pull():
            return found
        raise ReadableError("the ParameterServer has no parameters yet; push some first")

    def save(self, path: Path | str) -> int:
        """Write the newest as a safetensors file, replacing one that is there; returns their version.

        Raises ReadableError if there are none, OSError on a disk error.
        """
        version, values = self.get()
        arrays = {name: np.ascontiguousarray(x) for name, x in values.items()}
        with replacing(Path(path)) as new:
            write_file(new, save(arrays, {"version": str(version)}))
        return version
