"""Environment variables of a run: env_vars.NAME=value for all of its processes, env_vars.workers.NAME for workers."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any

from rlframe.core.errors import ConfigError, printable

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_MOST, _LONGEST = 100, 10_000  # variables, and characters of a value
_IN_SHELL = "set it in the shell, since it is read when a program starts"
_BY_KEYS = {  # names that rlframe sets or reads itself, and what to use
    **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "use threads="),
    "MKL_CBWR": "rlframe sets it, so that samples do not depend on the sampler",
    "CUDA_VISIBLE_DEVICES": "use device= or affinity=, or set it in the shell",
    "PATH": _IN_SHELL,
    **dict.fromkeys(("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"), "use world_size= or torchrun"),
    **dict.fromkeys(("MASTER_ADDR", "MASTER_PORT"), "use world_size= or torchrun"),
}
_BY_BEGINNING = {  # the same by how names begin
    "PYTHON": _IN_SHELL,
    "LD_": _IN_SHELL,
    "DYLD_": _IN_SHELL,
    "TORCHELASTIC_": "use torchrun",
    "RLFRAME_": "rlframe sets it",
}
_WORKERS = "workers."  # before the names of those that workers alone have
_OF_WORKERS = "RLFRAME_ENV_VARS_OF_WORKERS"  # which has them, as JSON
_current: ContextVar[Mapping[str, str]] = ContextVar("env_vars", default=MappingProxyType({}))


def check_env_vars(values: Mapping[str, Any]) -> None:
    """Raise ConfigError for a name that is none or is not to be set, or a value that is no text for a variable."""
    if len(values) > _MOST:
        raise ConfigError(f"env_vars has {len(values)} variables, more than the limit of {_MOST}")
    for name, value in values.items():
        key = f"env_vars.{printable(str(name)[:60])}"
        name = name.removeprefix(_WORKERS) if isinstance(name, str) else ""
        if not _NAME.fullmatch(name):
            raise ConfigError(f"{key}: a name of an environment variable has letters, digits and _ alone")
        if not isinstance(value, str) or "\0" in value or len(value) > _LONGEST:
            raise ConfigError(f"{key} must be text of up to {_LONGEST:,} characters, got {str(value)[:60]!r}")
        beginning = next((each for each in _BY_BEGINNING if name.startswith(each)), "")
        if remedy := _BY_KEYS.get(name) or _BY_BEGINNING.get(beginning):
            raise ConfigError(f"{key} cannot be set here: {remedy}")


def text_of(value: Any) -> Any:
    """A value of a YAML file or a mapping as the text of a variable: true for True, 1 for 1; text as it is."""
    return json.dumps(value) if isinstance(value, bool | int | float) else value


def env_vars_of_worker() -> dict[str, str]:
    """Those that a worker of the run here has, for one that does not inherit this process's."""
    given = sorted(_current.get().items(), key=lambda item: item[0].startswith(_WORKERS))
    return {name.removeprefix(_WORKERS): value for name, value in given}


@contextmanager
def env_vars_set(values: Mapping[str, str]) -> Iterator[None]:
    """Context in which this process, and those that it starts, have these variables; see also `set_env_vars_of_worker`.

    Raises:
        ConfigError: see `check_env_vars`.
    """
    check_env_vars(values)
    own = {name: value for name, value in values.items() if not name.startswith(_WORKERS)}
    if of_workers := {name.removeprefix(_WORKERS): values[name] for name in values.keys() - own.keys()}:
        own[_OF_WORKERS] = json.dumps(of_workers)
    around = _current.get()
    _current.set({**around, **values})
    try:
        with variables_set(own):
            yield
    finally:
        _current.set(around)  # not by a token: a LiveRun ends in a context of its own


@contextmanager
def variables_set(values: Mapping[str, str]) -> Iterator[None]:
    """Context in which this process has these variables, which are as before at its end."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def set_env_vars_of_worker() -> None:
    """Set the variables of workers in this process, which is one: called before it makes its environments."""
    os.environ.update(json.loads(os.environ.get(_OF_WORKERS, "{}")))
