"""Arguments of what scripts call: a part of rlframe in a wrong place, or what is none where one belongs, is named.

This is no type check. What is given for text, numbers and other classes than rlframe's may be whatever serves; only
parts are told apart, since one in the place of another fails late, far from the call.
"""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from types import UnionType
from typing import Any, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

_P = ParamSpec("_P")
_R = TypeVar("_R")
_VARIADIC = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
_LISTS = list, tuple, set, frozenset
_MOST_NAMED = 5  # parameters in a message
_REMEDIES = {  # how a script gets an object of a class
    "ActorAgent": "from make_actor_agent(...)",
    "Agent": "such as from make_policy_agent(...)",
    "BaseEvaluator": "such as Evaluator(env, agent, config)",
    "BatchSpec": "such as sampler.batch_spec",
    "Critic": "from config.make_critic(...)",
    "EnvConfig": "such as EnvConfig('CartPole-v1')",
    "Envs": "from make_envs(...)",
    "ExplorationSchedule": "from config.make_exploration(...)",
    "Learner": "as Learner(agent, algo)",
    "PolicyAgent": "from make_policy_agent(...)",
    "QAgent": "from make_q_agent(...)",
    "Replay": "from config.make_replay(...)",
    "Source": "a sampler",
    "TargetPolicy": "from load_policy(...).target() or run.policy.target()",
    "Space": "such as envs.observation_space",
    "WorkerPool": "as WorkerPool(config, n, seeds)",
}


def checked(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Give a function or constructor of rlframe an error for a wrong part, by its annotations.

    What is annotated with a class of rlframe must be of it (where that is a Protocol, no other part), and each element
    of a list or dict of them too. What is annotated otherwise must not be an object of rlframe of another class.

    Raises:
        TypeError: naming the argument, the class that it must be of, and that of the value.
    """
    signature = inspect.signature(function)
    parameters = signature.parameters
    names = [name for name, each in parameters.items() if name != "self" and each.kind not in _VARIADIC]
    *_, defined = function.__qualname__.removesuffix(".__init__").split(".")

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        given: dict[str, Any] = {}
        with suppress(TypeError):  # an unknown argument, or one given twice: the call names it
            given = signature.bind_partial(*args, **kwargs).arguments
        made = type(given.get("self"))
        owner = made.__name__ if getattr(made, "__init__", None) is call else defined  # not of a subclass with its own
        own = {name: given[name] for name in names if name in given and given[name] is not parameters[name].default}
        _check(owner, own, names, _annotations(function))
        return function(*args, **kwargs)

    return call


def check_fields(config: Any, of: type) -> None:
    """The same for the fields of a dataclass `of`, in its __post_init__; those of a subclass are not looked at."""
    given = {field.name: getattr(config, field.name) for field in fields(of)}
    _check(of.__name__, given, list(given), _annotations(of))


@functools.cache
def _annotations(of: Any) -> dict[str, Any]:  # when it is called: then all classes are there
    return get_type_hints(of)


def _check(owner: str, given: Mapping[str, Any], names: Sequence[str], annotations: Mapping[str, Any]) -> None:
    for name, value in given.items():
        if name in annotations and not _fits(value, annotations[name]):
            call = f"{owner}({', '.join([*names[:_MOST_NAMED], *(['...'] if names[_MOST_NAMED:] else [])])})"
            raise TypeError(f"{call}: {name} must be {_described(annotations[name])}, not {_kind(value)}")


def _fits(value: Any, annotation: Any) -> bool:
    kind = get_origin(annotation) or annotation
    if kind in (Union, UnionType):
        return any(_fits(value, each) for each in get_args(annotation))
    if kind is type(None):
        return value is None
    if kind is type:
        return isinstance(value, type) and issubclass(value, get_args(annotation))
    if kind is Sequence:
        is_list = hasattr(value, "__len__") and not isinstance(value, str | Mapping | type)
        return is_list and all(_fits(x, each) for each in get_args(annotation) for x in _elements(value))
    if kind is Mapping:
        of = get_args(annotation)[-1:]
        return hasattr(value, "items") and all(_fits(x, each) for each in of for x in _elements(value))
    if not _is_of_rlframe(kind):
        return kind is Any or not isinstance(kind, type) or not _is_of_rlframe(type(value)) or isinstance(value, kind)
    if getattr(kind, "_is_protocol", False):  # a user's own part may have less than all
        return not _is_of_rlframe(type(value)) or all(
            hasattr(value, name) for name in vars(kind) if not name.startswith("_")
        )
    return isinstance(value, kind)


def _elements(value: Any) -> Sequence[Any]:
    """Of a plain list or dict."""
    return [*value.values()] if isinstance(value, dict) else [*value] if type(value) in _LISTS else []


def _is_of_rlframe(kind: Any) -> bool:
    return isinstance(kind, type) and kind.__module__.partition(".")[0] == "rlframe"


def _described(annotation: Any) -> str:
    kind, of = get_origin(annotation) or annotation, get_args(annotation)
    if kind in (Union, UnionType):
        return " or ".join(map(_described, of))
    if kind in (int, float):
        return "a number"
    if kind in (Sequence, Mapping, type):
        name = {Sequence: "a list", Mapping: "a dict", type: "a subclass"}[kind]
        return name if not of or of[-1] is Any else f"{name} of {_named(get_origin(of[-1]) or of[-1])}"
    remedy = _REMEDIES.get(getattr(kind, "__name__", ""))
    return f"{_named(kind)} ({remedy})" if remedy else _named(kind)


def _kind(value: Any) -> str:
    if isinstance(value, dict) or type(value) in _LISTS:
        kinds = ", ".join(dict.fromkeys(map(_kind_of_one, _elements(value))))
        return f"a {type(value).__name__} of {kinds}" if kinds else f"an empty {type(value).__name__}"
    return _kind_of_one(value)


def _kind_of_one(value: Any) -> str:
    return f"the class {_named(value)}" if isinstance(value, type) else _named(type(value))


def _named(kind: Any) -> str:
    """A class, with its module where its name alone says little: ppo.Config."""
    if kind is type(None):
        return "None"
    name = getattr(kind, "__name__", str(kind))
    return f"{kind.__module__.rpartition('.')[2]}.{name}" if name in ("Config", "Value") else name
