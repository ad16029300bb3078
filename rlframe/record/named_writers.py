"""Writers by name, as in `writers=[tensorboard,wandb,./file.py:Class]`."""

import importlib.util
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from rlframe.core.config import nearest
from rlframe.core.errors import ConfigError
from rlframe.core.objects import ObjectName
from rlframe.core.parts import find_attribute
from rlframe.record.writers import Writer

MakeWriter = Callable[..., Writer]  # (directory, config, name): that of a Writer's class

_TRACKERS = {  # by the name of the package that they need, which is also the name of the extra
    "wandb": "rlframe.integrations.wandb:WandbWriter",
    "mlflow": "rlframe.integrations.mlflow:MlflowWriter",
    "trackio": "rlframe.integrations.trackio:TrackioWriter",
}
_BUILT_IN = {"tensorboard": "rlframe.record.writers:TensorBoardWriter", **_TRACKERS}
WRITERS = tuple(_BUILT_IN)
DEFAULT_WRITERS = ("tensorboard",)


def check_writers(names: Sequence[str]) -> None:
    """Check names without importing the trackers' packages.

    Raises:
        ConfigError: an unknown name, a missing package, a name given twice, or a class that is not a Writer.
    """
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"writers names {name} more than once")
        if name in _TRACKERS and not _is_installed(name):
            raise ConfigError(f'writers={name} needs another package: pip install "rlframe[{name}]"')
        if name not in _BUILT_IN:
            _own(name)


def find_writers(names: Sequence[str]) -> list[MakeWriter]:
    """The classes of writers, or functions that make them. Raises ConfigError as `check_writers`."""
    check_writers(names)
    return [find_attribute(_BUILT_IN[name], "writers") if name in _BUILT_IN else _own(name) for name in names]


def _is_installed(package: str) -> bool:
    spec = importlib.util.find_spec(package)
    return spec is not None and spec.origin is not None  # without an origin, it is a folder such as ./wandb


def _own(name: str) -> MakeWriter:
    if ":" not in name:
        known = ", ".join(WRITERS)
        raise ConfigError(f"writers={name} is none of {known}, module:Class, ./file.py:Class{nearest(name, WRITERS)}")
    found = find_attribute(name, "writers")
    if isinstance(found, Writer):
        return partial(_given, found)
    is_class = isinstance(found, type) and issubclass(found, Writer)
    if not (is_class or (isinstance(name, ObjectName) and callable(found) and not isinstance(found, type))):
        raise ConfigError(f"writers={name} is not a subclass of rlframe.record.Writer")
    make: MakeWriter = found
    return make


def _given(writer: Writer, *_: Any) -> Writer:
    """A writer that was made already, in the place of its class."""
    return writer
