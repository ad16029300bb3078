"""Loggers of a user's own, which tests name as module:Class."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlframe.record import Logger


class Notes(Logger):
    """Writes down how it is used."""

    def __init__(self, directory: Path, config: Mapping[str, Any], name: str) -> None:
        self._file = directory / "notes.txt"
        self._note("open", name, config.get("seed"))

    def write(self, row: Mapping[str, float]) -> None:
        self._note("write", row["env_steps"])

    def truncate_after(self, env_steps: int) -> None:
        self._note("truncate_after", env_steps)

    def close(self) -> None:
        self._note("close")

    def _note(self, *values: Any) -> None:
        with self._file.open("a") as file:
            file.write(f"{json.dumps(values)}\n")


class NotALogger:
    """Has no method of one."""
