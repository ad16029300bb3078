"""Parts: fields whose value names a class, `algo=ppo`, and how such names are looked up and imported."""

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import chz
from chz.factories import MetaFactory, MetaFromString
from chz.tiepin import CastError

from rlframe.core.config import nearest
from rlframe.core.errors import ConfigError
from rlframe.core.objects import ObjectName


class module_part(MetaFactory):
    """A field for a part named by its module: `algo=ppo` is the class `Config` of `rlframe.algos.ppo`.

    `algo=my_pkg.my_algo` and `algo=./mine.py` name a user's own module, `algo=./mine.py:Fast` another class in it.
    There is no registry.
    """

    def __init__(self, package: str, default: str) -> None:
        super().__init__()
        self.package, self.default = package, default

    def unspecified_factory(self) -> Callable[..., Any]:
        return self.from_string(self.default)

    def from_string(self, factory: str) -> Callable[..., Any]:
        try:
            return find_config(factory, self.package)
        except ConfigError as error:
            raise MetaFromString(str(error)) from None

    def perform_cast(self, value: str) -> Any:
        raise CastError(f"{value!r} is a module name, not a value")


def find_config(name: str, package: str) -> Callable[..., Any]:
    """The class `Config` of the module `name` (see find_module), or the class that module:Class names.

    A package with KINDS has its kinds there, several to a file.

    Raises:
        ConfigError: there is no such module or class.
    """
    if isinstance(name, ObjectName) or ":" in name:
        found = find_attribute(name, package)
        if not (isinstance(found, type) and chz.is_chz(found)):
            raise ConfigError(f"{name!r} is no class of a Config, made with chz.chz")
        return found
    kinds = kinds_of(package)
    if name.lower() in kinds:
        return kinds[name.lower()]
    if kinds and "." not in name:
        raise ConfigError(f"{name!r} is not in {package} ({', '.join(kinds)}){nearest(name, kinds)}")
    module = find_module(name, package)
    if "Config" not in vars(module):
        raise ConfigError(f"{name!r} ({module.__name__}) has no class Config")
    config: Callable[..., Any] = vars(module)["Config"]
    return config


def find_module(name: str, package: str) -> ModuleType:
    """Import the module `package.name`, also in capitals, a user's dotted module, or a .py file.

    Raises:
        ConfigError: there is no such module.
    """
    if name.endswith(".py"):
        return _load_file(Path(name))
    known = module_names(package)
    target = f"{package}.{name.lower()}" if name.lower() in known else name
    if "." not in target or not all(part.isidentifier() for part in target.split(".")):
        raise ConfigError(f"{name!r} is not in {package} ({', '.join(known)}){nearest(name, known)}")
    try:
        return importlib.import_module(target)
    except ModuleNotFoundError as error:
        if error.name and not f"{target}.".startswith(f"{error.name}."):
            raise
        raise ConfigError(f"no module {target!r}: {error}; {package} has {', '.join(known)}") from None


def find_attribute(name: str, key: str) -> Any:
    """What `package.module:name` or `./file.py:name` means, or the object of an ObjectName.

    Args:
        key: the setting that says so, for messages.
    Raises:
        ConfigError: it is not of this form, or there is no such module or name.
    """
    if isinstance(name, ObjectName):
        return name.value
    module_name, _, attribute = name.rpartition(":")
    form = "package.module:name or ./file.py:name"
    if not module_name:
        raise ConfigError(f"{key}={name} must be written {form}")
    try:
        is_file = module_name.endswith(".py")
        module = _load_file(Path(module_name)) if is_file else importlib.import_module(module_name)
    except ConfigError as error:
        raise ConfigError(f"{key}={name}: {error}") from None
    except ModuleNotFoundError as error:
        if error.name and not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise ConfigError(f"{key}={name}: {error}; write {form}") from None
    found = vars(module)
    if attribute not in found:
        raise ConfigError(f"{key}={name}: {module_name} has no {attribute}{nearest(attribute, found)}")
    return found[attribute]


def kinds_of(package: str) -> Mapping[str, type]:
    """The Configs of a package's kinds by name, if it names them in KINDS; empty where a kind is a module."""
    kinds: Mapping[str, type] = vars(importlib.import_module(package)).get("KINDS", {})
    return kinds


def module_names(package: str) -> list[str]:
    """The kinds of `package`: those of KINDS, or the modules that define a class Config."""
    if kinds := kinds_of(package):
        return sorted(kinds)
    folder = Path(importlib.import_module(package).__path__[0])
    return sorted(path.stem for path in folder.glob("*.py") if "\nclass Config" in path.read_text(encoding="utf-8"))


def _load_file(path: Path) -> ModuleType:
    """Import a file by its stem, with its folder on sys.path, which worker processes inherit."""
    if not path.is_file():
        raise ConfigError(f"{path} does not exist")
    if not path.stem.isidentifier():
        raise ConfigError(f"{path} cannot be imported: {path.stem!r} is not a Python name; rename the file")
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)
    importlib.invalidate_caches()
    spec = importlib.util.find_spec(path.stem)
    origin = spec.origin if spec is not None else None
    if origin is None or Path(origin).resolve() != path.resolve():
        raise ConfigError(f"{path} cannot be imported: the name {path.stem!r} means {origin}; rename the file")
    return importlib.import_module(path.stem)
