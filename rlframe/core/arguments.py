"""Arguments of what scripts call, checked against the annotations before anything is made of them."""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from numbers import Real
from types import UnionType
from typing import Any, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

_P = ParamSpec("_P")
_R = TypeVar("_R")
_PLAIN = {Sequence: "list", Mapping: "dict", type: "subclass"}
_MOST_NAMED = 5  # parameters in a message
_REMEDIES = {  # how a script gets an object of a class
    "ActorAgent": "from make_actor_agent(...)",
    "BatchSpec": "such as sampler.batch_spec",
    "EnvConfig": "such as EnvConfig('CartPole-v1')",
    "BaseEvaluator": "such as Evaluator(env, agent, config)",
    "Envs": "from make_envs(...)",
    "Learner": "as Learner(agent, algo)",
    "PolicyAgent": "from make_policy_agent(...)",
    "QAgent": "from make_q_agent(...)",
    "Source": "a sampler",
    "WorkerPool": "as WorkerPool(config, n, seeds)",
}


def checked(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Give a function or constructor an error for an argument that is not of its annotation's class.

    An annotation that is no class accepts everything, int and float accept any real number (1e6 steps), Sequence what
    has a length but no text, and Mapping what has items.

    Raises:
        TypeError: naming the argument, the class that it must be of, and that of the value.
    """
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        given: dict[str, Any] = {}
        with suppress(TypeError):  # an unknown argument, or one given twice: the call names it
            given = signature.bind_partial(*args, **kwargs).arguments
        made = type(given.pop("self", None))
        *_, owner = function.__qualname__.removesuffix(".__init__").split(".")
        owner = made.__name__ if getattr(made, "__init__", None) is call else owner  # of a subclass that has its own
        _check(owner, given, [name for name in signature.parameters if name != "self"], _annotations(function))
        return function(*args, **kwargs)

    return call


def check_fields(config: Any) -> None:
    """The same for the fields of a dataclass, in its __post_init__."""
    given = {field.name: getattr(config, field.name) for field in fields(config)}
    _check(type(config).__name__, given, list(given), _annotations(type(config)))


@functools.cache
def _annotations(of: Any) -> dict[str, Any]:
    try:
        return get_type_hints(of)
    except NameError:  # one is there for type checkers alone, or is local to a function
        return {}


def _check(owner: str, given: Mapping[str, Any], names: Sequence[str], annotations: Mapping[str, Any]) -> None:
    for name, value in given.items():
        if name in annotations and not _fits(value, annotations[name]):
            call = f"{owner}({', '.join([*names[:_MOST_NAMED], *(['...'] if names[_MOST_NAMED:] else [])])})"
            raise TypeError(f"{call}: {name} must be {_described(annotations[name])}, not {_kind(value)}")


def _fits(value: Any, annotation: Any) -> bool:
    kind = get_origin(annotation) or annotation
    if kind in (Union, UnionType):
        return any(_fits(value, each) for each in get_args(annotation))
    if kind is type:
        return isinstance(value, type) and all(issubclass(value, each) for each in get_args(annotation))
    if kind in (int, float):
        return isinstance(value, Real)
    if kind is Sequence:
        (each,) = get_args(annotation) or (Any,)
        listed = value if isinstance(value, list | tuple) else ()
        return (
            hasattr(value, "__len__") and not isinstance(value, str | Mapping) and all(_fits(x, each) for x in listed)
        )
    if kind is Mapping:
        return hasattr(value, "items")
    is_class = isinstance(kind, type) and kind is not Any and not getattr(kind, "_is_protocol", False)
    return not is_class or isinstance(value, kind)


def _described(annotation: Any) -> str:
    kinds = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    return " or ".join(map(_expected, kinds))


def _expected(annotation: Any) -> str:
    kind, of = get_origin(annotation) or annotation, [f" of {_named(each)}" for each in get_args(annotation)[-1:]]
    if kind in (int, float):
        return "a number"
    if kind in (Sequence, Mapping, type):
        return "".join((f"a {_PLAIN[kind]}", *(each for each in of if each != " of Any")))
    remedy = _REMEDIES.get(kind.__name__)
    return f"{_named(kind)} ({remedy})" if remedy else _named(kind)


def _kind(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"a list of {', '.join(dict.fromkeys(map(_kind, value))) or 'nothing'}"
    return f"the class {_named(value)}" if isinstance(value, type) else _named(type(value))


def _named(kind: Any) -> str:
    """A class, with its module where its name alone says little: ppo.Config."""
    if kind is type(None):
        return "None"
    name = getattr(kind, "__name__", str(kind))
    return f"{kind.__module__.rpartition('.')[2]}.{name}" if name == "Config" else name
