"""params.json: what was run, on what, with which versions; enough to launch it again."""

import json
import os
import platform
import socket
import subprocess
import sys
from collections.abc import Mapping
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rlframe import __version__
from rlframe.core.errors import ConfigError
from rlframe.core.files import read_json

_PACKAGES = ("torch", "numpy", "gymnasium", "ale-py", "mujoco", "safetensors")


def write_params(path: Path, config: Mapping[str, Any]) -> None:
    """The record of a new run.

    Raises:
        ConfigError: a value of `config` that JSON cannot hold.
    """
    params = {"config": _checked(config), "seed": config.get("seed"), **session()}
    replace_file(path, json.dumps(params, indent=2) + "\n")


def append_resumed(path: Path, config: Mapping[str, Any]) -> None:
    """Keep the record and add to its `resumed` when and where the run goes on, and the config where it differs.

    Raises:
        ConfigError: the record is unreadable.
    """
    try:
        params = read_json(path)
        before, resumed = params.get("config", {}), params.setdefault("resumed", [])
        if not (isinstance(before, dict) and isinstance(resumed, list)):
            raise ConfigError(f"{path} is damaged: its config is no object, or its resumed no list")
    except ConfigError as error:
        raise ConfigError(f"{error}; the run cannot be resumed, but init= its snapshot works") from None
    changed = {key: value for key, value in _checked(config).items() if key not in before or before[key] != value}
    resumed.append({**session(), "changed": changed})
    replace_file(path, json.dumps(params, indent=2) + "\n")


def _checked(config: Mapping[str, Any]) -> dict[str, Any]:
    for key, value in config.items():
        try:
            json.dumps(value)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"config[{key!r}] cannot be written to params.json: {error}") from None
    return dict(config)


def session() -> dict[str, Any]:
    """Command line, time, versions, git revision and host of this process."""
    versions = {"python": platform.python_version(), "rlframe": __version__}
    for package in _PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return {
        "command_line": list(sys.argv),
        "started": datetime.now().astimezone().isoformat(timespec="seconds"),
        "versions": versions,
        "git": _git(),
        "host": {"name": socket.gethostname(), "os": platform.platform(), "cpu_count": os.cpu_count()},
    }


def _git() -> dict[str, Any] | None:
    """Revision of the working directory and whether its tracked files differ from it; None outside of git."""
    revision = _output("git", "rev-parse", "HEAD")
    if revision is None:
        return None
    changes = _output("git", "status", "--porcelain", "--untracked-files=no")
    return {"revision": revision, "dirty": None if changes is None else bool(changes)}


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=True, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def replace_file(path: Path, text: str) -> None:
    """Write the file aside, then put it in place: whoever reads finds the old or the new one, whole."""
    temporary = path.with_name(f".{path.name}.new")
    temporary.unlink(missing_ok=True)  # which a link might lead elsewhere
    with temporary.open("x", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
