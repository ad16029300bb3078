"""Parts: fields of configs whose value names a class, `algo=ppo`, at any depth; and configs as flat keys.

A kind of a part is a class of its package: one that its KINDS names, or the class `Config` of a module. A part may have
parts of its own, and a field may be a mapping of configs that have some: sampler.inner.n_workers, teams.red.algo.clip.
"""

import functools
import importlib
import importlib.util
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, NamedTuple, get_args, get_origin

import chz
from chz.factories import MetaFactory, MetaFromString
from chz.mungers import Munger
from chz.tiepin import CastError

from rlframe.core.command_line import with_home
from rlframe.core.config import key_of, nearest
from rlframe.core.errors import ConfigError
from rlframe.core.imports import imported
from rlframe.core.names import find_attribute, split_call
from rlframe.core.objects import ObjectName, name_of, others_beside
from rlframe.core.schedule import Schedule
from rlframe.core.yaml import to_json

# The parts of a run, and the packages of their kinds. All others are fields of configs.
ROOTS: Mapping[str, str] = MappingProxyType(
    {"algo": "rlframe.algos", "sampler": "rlframe.samplers", "runner": "rlframe.runners"}
)
# Fields whose keys stand below another name: `env` is a value, and has fields beside it.
GROUPS: Mapping[str, str] = MappingProxyType({"env_options": "env"})
OWN = "own"  # kind for a class that has no Config: its `name` is module:Class, and `kwargs` are its arguments


class Part(MetaFactory):
    """What a field made by `part` is: the kinds that it may have, and the Config of each."""

    def __init__(self, package: str, default: str, fitting: Sequence[str] = (), classes: str = "") -> None:
        """Args:
        fitting: kinds that fit here; empty: all.    classes: what a class of the user's own must be, for messages.
        """
        super().__init__()
        self.package, self.default, self.fitting, self.classes = package, default, tuple(fitting), classes

    def find(self, given: Any) -> type:
        """The class of the Config that a name means, or that was given itself; that of `own` for another class.

        Raises:
            ConfigError: there is no such kind.
        """
        given = vars(given).get("Config", given) if isinstance(given, ModuleType) else given
        if chz.is_chz(given):
            return given if isinstance(given, type) else type(given)
        if self.is_own(given):
            return kinds_of(self.package)[OWN]
        return find_config(given if isinstance(given, str) else repr(given), self.package)

    def is_own(self, given: Any) -> bool:
        """Whether it is, or names, a class of the user's own that has no Config."""
        value = given.value if isinstance(given, ObjectName) else given
        named = ":" in given if isinstance(given, str) else callable(given)
        return named and not chz.is_chz(value) and OWN in kinds_of(self.package)

    def make(self, given: str) -> Any:
        """The Config of a name, with its defaults. Raises ConfigError as `find`."""
        found = self.find(given)
        return found(name=given) if self.is_own(given) else found()

    def fits(self, given: Any) -> bool:
        """Whether a kind may stand here."""
        return not self.fitting or (OWN if self.is_own(given) else given) in self.fitting

    def name_of(self, config: Any) -> str:
        """The value that names a Config."""
        return (config.name if self.is_of_own(config) else "") or part_name(config, self.package)

    def is_of_own(self, config: Any) -> bool:
        """Whether a Config is that of `own`."""
        return type(config) is kinds_of(self.package).get(OWN)

    def unspecified_factory(self) -> Callable[..., Any]:
        return self.find(self.default)

    def from_string(self, factory: str) -> Callable[..., Any]:
        try:
            return find_config(factory, self.package)
        except ConfigError as error:
            raise MetaFromString(str(error)) from None

    def perform_cast(self, value: str) -> Any:
        raise CastError(f"{value!r} is a module name, not a value")


class _PartOf(Munger):
    """Makes a field's Config from its name, checks its class, and gives it what it gets from the config around it."""

    def __init__(self, part: Part, of: type, finish: Callable[[Any, Any], Any]) -> None:
        self._part, self._of, self._finish = part, of, finish

    def __call__(self, value: Any, *, chzself: Any = None, field: Any = None) -> Any:
        config = self._part.make(value) if isinstance(value, str) else value
        if not isinstance(config, self._of):
            name, own = self._part.default, " or module:Class" if OWN in kinds_of(self._part.package) else ""
            raise ConfigError(
                f"{key_of(chzself, field.logical_name)}={value!r:.60} must be a name such as {name}{own}, or a Config "
                f"of {self._part.package}"
            )
        return self._finish(config, chzself)


def part(
    package: str,
    default: str,
    doc: str,
    of: type = object,
    finish: Callable[[Any, Any], Any] = lambda config, around: config,
    fitting: Sequence[str] = (),
    classes: str = "",
) -> Any:
    """A field for a part: a kind of `package` by its name, `module:Class` of a user's Config, or a Config.

    `algo=ppo` is the class `Config` of `rlframe.algos.ppo`, or of that name in KINDS of `rlframe.algos`;
    `algo=my_pkg.my_algo` and `algo=./mine.py` name a user's own module, `algo=./mine.py:Fast` another class in it. If a
    kind is called `own`, module:Class may also name a class without a Config. There is no registry.

    Args:
        of: the class of all its Configs.    finish: (config, the config around it) -> config, or raises ConfigError.
        fitting: the kinds that fit here; empty: all.    classes: what a class without a Config must be.
    """
    factory = Part(package, default, fitting, classes)
    return chz.field(
        meta_factory=factory,
        default_factory=lambda: factory.make(default),
        munger=_PartOf(factory, of, finish),
        doc=doc,
    )


class ConfigField(NamedTuple):
    """A field of a config's class."""

    chz: Any  # its documentation, type and default
    part: Part | None
    below: type | None  # the class of the config that it holds, if that is no part
    is_mapping: bool  # of such configs by name


@functools.cache
def fields_of(config: type) -> Mapping[str, ConfigField]:
    """The fields of a config's class by name."""
    found = {}
    for name, field in chz.chz_fields(config).items():
        factory, annotation = field.meta_factory, field.final_type
        is_mapping = get_origin(annotation) is Mapping
        below = get_args(annotation)[1] if is_mapping else annotation
        below = below if isinstance(below, type) and chz.is_chz(below) else None
        found[name] = ConfigField(field, factory if isinstance(factory, Part) else None, below, is_mapping)
    return MappingProxyType(found)


def known_keys(config: type, given: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The keys of a config's class with these settings, outer parts before what is below them.

    Each has its Part; the class of the configs whose keys are below it; or else its field. A kind that does not exist
    has no keys: that is reported when the config is made.
    """
    found: dict[str, Any] = {}
    for name, field in fields_of(config).items():
        key = f"{prefix}{name}"
        found[key] = field.part or field.below or field.chz
        if part := field.part:
            with suppress(ConfigError):
                found |= known_keys(part.find(given.get(key, part.default)), given, f"{key}.")
        elif field.below and field.is_mapping:
            for inside in sorted({each.split(".")[key.count(".") + 1] for each in given if each.startswith(f"{key}.")}):
                found |= {f"{key}.{inside}": field.below, **known_keys(field.below, given, f"{key}.{inside}.")}
        elif field.below:
            found |= known_keys(field.below, given, f"{GROUPS.get(key, key)}.")
    return found


def part_at(config: type, key: str, given: Mapping[str, Any]) -> Part | None:
    """The part that a key is with these settings, or with another kind of the part around it; None: it is no part."""
    known = known_keys(config, given)
    around, _, name = key.rpartition(".")
    if key in known or not isinstance(known.get(around), Part):
        found = known.get(key)
        return found if isinstance(found, Part) else None
    return next(iter(inner_parts(known[around], name)), None)


def inner_parts(outer: Part, name: str) -> list[Part]:
    """The parts of this name in the kinds of a part."""
    fields = [fields_of(outer.find(kind)).get(name) for kind in module_names(outer.package)]
    return [field.part for field in fields if field and field.part]


def values_of(config: Any, prefix: str = "") -> Iterator[tuple[str, Any, ConfigField]]:
    """Every key of a config with its value and its field; a part has its Config, and then the keys below it."""
    cls: type = type(config)
    for name, field in fields_of(cls).items():
        value, key = getattr(config, name), f"{prefix}{name}"
        if field.part or not (field.below or chz.is_chz(value)):
            yield key, value, field
        if field.below and field.is_mapping:
            for inside, each in value.items():
                yield from values_of(each, f"{key}.{inside}.")
        elif chz.is_chz(value):
            yield from values_of(value, f"{GROUPS.get(key, key)}.")


def named_values(config: Any, prefix: str = "") -> Iterator[tuple[str, Any, ConfigField]]:
    """As `values_of`, with the names of parts."""
    of_own = ""
    for key, value, field in values_of(config, prefix):
        if field.part:
            of_own = f"{key}.name" if field.part.is_of_own(value) and value.name else ""
            yield key, field.part.name_of(value), field
        elif key != of_own:
            yield key, value, field


def flatten(**fields: Any) -> dict[str, Any]:
    """Configs and values as JSON-able keys of the command line, for example for `logger_context(config=...)`.

    flatten(algo=ppo.Config(clip=0.2), env="CartPole-v1") gives {"algo": "ppo", "algo.clip": 0.2, ..., "env": ...}.
    """
    flat: dict[str, Any] = {}
    for key, value in fields.items():
        if key in ROOTS:
            flat[key] = part_name(value, ROOTS[key])
        if chz.is_chz(value):
            flat |= {name: plain(each) for name, each, _ in named_values(value, f"{GROUPS.get(key, key)}.")}
        elif key not in ROOTS:
            flat[key] = plain(value)
    return flat


def plain(value: Any) -> Any:
    """A field's value in JSON."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # not in JSON; the command line reads the text as the same number
    if isinstance(value, Schedule):
        return value.text
    if isinstance(value, Mapping):  # whose values are passed on
        return {str(name): to_json(each) for name, each in value.items()}
    return [plain(each) for each in value] if isinstance(value, tuple | list) else value


def dotted(settings: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Settings with nested dicts as flat keys: algo={"name": "ppo", "clip": 0.2} has the keys algo and algo.clip.

    Raises:
        ConfigError: a key is given twice.
    """
    flat: dict[str, Any] = {}
    for key, value in settings:
        below = {key: value}
        if isinstance(value, Mapping) and not key.endswith(("kwargs", "env_vars")):  # whose keys are not rlframe's
            below = dotted((_key_in(key, name), each) for name, each in value.items())
        if twice := below.keys() & flat.keys():
            raise ConfigError(f"{min(twice)} is given twice; leave one of them out")
        flat |= below
    return flat


def python_keys(settings: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """`dotted` settings of a script: None is one that is not given, and ~/ the home directory."""
    return dotted((key, with_home(value)) for key, value in settings if value is not None)


def _key_in(group: str, name: str) -> str:
    if name == "name":
        return group
    return f"{group}_kwargs" if name == "kwargs" and group in ("env", "eval.env") else f"{group}.{name}"


def part_name(config: object, package: str) -> str:
    """The name of a Config, or of its class: its kind, module or file; module:Class if that does not lead to it."""
    cls = config if isinstance(config, type) else type(config)
    if package in sys.modules and (kind := next((name for name, each in kinds_of(package).items() if each is cls), "")):
        return kind
    module = cls.__module__
    known = vars(sys.modules[module]) if module in sys.modules else {}
    file = known.get("__file__")
    if module.startswith(f"{package}."):
        return module.removeprefix(f"{package}.")
    if known.get("Config") is not cls or (module == "__main__" and not file):
        return name_of(cls)
    return str(file) if "." not in module and file else module


def find_config(name: str, package: str) -> type:
    """The class `Config` of the module `name` (see find_module), or the class that module:Class names.

    A package with KINDS has its kinds there, several to a file.

    Raises:
        ConfigError: there is no such module or class.
    """
    if isinstance(name, ObjectName) or ":" in name:
        if split_call(name)[1]:
            raise ConfigError(f"{name!r} must be a name alone; give its arguments as keys below this one")
        found = find_attribute(name, "")
        if isinstance(found, type) and chz.is_chz(found):
            return found
        raise ConfigError(f"{name!r} is no class of a Config, made with chz.chz{others_beside(found, chz.is_chz)}")
    kinds = kinds_of(package)
    if name.lower() in kinds:
        return kinds[name.lower()]
    if kinds and "." not in name:
        raise ConfigError(f"{name!r} is not in {package} ({', '.join(kinds)}){nearest(name, kinds)}")
    module = find_module(name, package)
    if "Config" not in vars(module):
        raise ConfigError(f"{name!r} ({module.__name__}) has no class Config{others_beside(module)}")
    config: type = vars(module)["Config"]
    if "__chz_fields__" not in vars(config):
        raise ConfigError(
            f"Config of {name} is not decorated, so its fields are no keys; write @chz.chz above the class"
        )
    return config


def find_module(name: str, package: str) -> ModuleType:
    """Import the module `package.name`, also in capitals, a user's dotted module, or a .py file.

    Raises:
        ConfigError: there is no such module.
    """
    if name.endswith(".py"):
        return imported(name)
    known = module_names(package)
    target = f"{package}.{name.lower()}" if name.lower() in known else name
    if preset := vars(importlib.import_module(package)).get("PRESETS", {}).get(name.lower()):
        raise ConfigError(
            f"{name!r} is settings of another algorithm; begin with a preset of it: experiment={preset}, "
            f"with env=NAME for another environment"
        )
    if "." not in target or not all(part.isidentifier() for part in target.split(".")):
        hint = (
            f"; for your file write ./{os.path.normpath(name)}.py"
            if os.path.isfile(f"{name}.py")
            else nearest(name, known)
        )
        raise ConfigError(f"{name!r} is not in {package} ({', '.join(known)}){hint}")
    try:
        return imported(target)
    except ModuleNotFoundError as error:
        raise ConfigError(f"no module {target!r}: {error}; {package} has {', '.join(known)}") from None


def kinds_of(package: str) -> Mapping[str, type]:
    """The Configs of a package's kinds by name, if it names them in KINDS; empty where a kind is a module."""
    return vars(importlib.import_module(package)).get("KINDS", {})


def module_names(package: str) -> list[str]:
    """The kinds of `package`: those of KINDS, or the modules that define a class Config."""
    if kinds := kinds_of(package):
        return sorted(kinds)
    return _modules_in(importlib.import_module(package).__path__[0])


@functools.cache  # a study looks names up for each of its runs
def _modules_in(folder: str) -> list[str]:
    paths = Path(folder).glob("*.py")
    return sorted(path.stem for path in paths if "\nclass Config" in path.read_text(encoding="utf-8"))
