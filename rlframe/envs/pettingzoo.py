"""PettingZoo: its environments by name, with its parallel interface, and what their agents see beside their own."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import pkgutil
import re
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
from gymnasium import Space, spaces

from rlframe.core.config import nearest
from rlframe.core.errors import ConfigError, naming
from rlframe.core.multi_agent import OBSERVATION, PolicyMap
from rlframe.core.names import find_attribute
from rlframe.core.spaces import ACTION_MASK, PRIVILEGED
from rlframe.envs.observations import InvalidValue

_PACKAGES = ("mpe2",)  # of PettingZoo's environments beside its own, whose modules have their names
_FAMILIES = ("atari", "butterfly", "classic", "mpe", "sisl", *_PACKAGES)  # what their names begin with
AGENT_ID = "agent_id"  # entry of observations: which one the agent is
_MODULE = re.compile(rf"({'|'.join(_PACKAGES)})\.(\w+_v\d+)")  # of one environment

_DISCRETE = (spaces.Discrete, spaces.MultiDiscrete)


def classes() -> tuple[type, ...]:
    """The base classes of PettingZoo's environments, parallel and in turns; none where nothing has imported it."""
    zoo = sys.modules.get("pettingzoo")
    return () if zoo is None else (zoo.ParallelEnv, zoo.AECEnv)


def base_of(found: Any) -> str:
    """What an environment, or a class, which is none should be derived from, by the methods that it has."""
    has_agents = hasattr(found, "possible_agents") or callable(getattr(found, "observation_space", None))
    return "pettingzoo.ParallelEnv or pettingzoo.AECEnv" if has_agents else "gymnasium.Env"


def find_multi_agent(id_: str) -> Callable[..., Any] | None:
    """What makes the environment that PettingZoo, or mpe2, has under a name such as mpe2/simple_spread_v3, if any.

    Raises:
        ConfigError: it is the name of one, and the package is missing; or there is none of this name in its family.
    """
    family, _, name = re.sub(r"_(v\d+)$", r"-\1", id_).partition("/")
    packages = ["pettingzoo", *([family] if family in _PACKAGES else [])]
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if not name or (missing and family not in _FAMILIES):
        return None
    if missing:
        raise ConfigError(
            f'env={id_} needs a package that is not installed ({missing[0]}): pip install "rlframe[pettingzoo]"'
        )
    import pettingzoo

    for kind, registry in (("parallel", pettingzoo.parallel_registry), ("aec", pettingzoo.aec_registry)):
        if f"{family}/{name}" in registry:
            return partial(_make, kind, f"{family}/{name}")
    if family in _PACKAGES and (found := _in_package(family, name.replace("-", "_"))):
        return found
    if family in _FAMILIES:
        raise ConfigError(f"env={id_}: PettingZoo has no environment of this name{nearest(id_, known())}")
    return None


def has(id_: str) -> bool:
    """Whether `find_multi_agent` finds one of this name."""
    with contextlib.suppress(ConfigError):
        return id_.partition("/")[0] in _FAMILIES and find_multi_agent(id_) is not None
    return False


def name_of_function(value: Any) -> str:
    """The name of an environment of PettingZoo or mpe2 by its function, parallel_env or env; empty if it is none."""
    zoo = sys.modules.get("pettingzoo")
    if zoo is None or not callable(value):
        return ""
    for registry in (zoo.parallel_registry, zoo.aec_registry):
        for id_, spec in registry.items():
            module, _, attribute = str(spec.entry_point).partition(":")
            if module in sys.modules and vars(sys.modules[module]).get(attribute) is value:
                in_turns = registry is zoo.aec_registry and id_ in zoo.parallel_registry
                return f"{module}:{attribute}" if in_turns else _readable(id_)
    for name, found in list(sys.modules.items()):
        match = _MODULE.fullmatch(name)
        if match and value is vars(found).get("parallel_env"):
            return f"{match[1]}/{match[2]}"
        if match and value is vars(found).get("env"):
            return f"{name}:env"
    return ""


def _readable(id_: str) -> str:
    return re.sub(r"-(v\d+)$", r"_\1", id_)


def _make(kind: Any, name: str, **arguments: Any) -> Any:
    """A registered environment. Raises ModuleNotFoundError, with what to install, if a package of its is missing."""
    import pettingzoo
    from pettingzoo.env_registry.exceptions import FailedToImport

    try:
        return pettingzoo.make(kind, name, **arguments)
    except FailedToImport as error:
        family = name.partition("/")[0]
        raise ModuleNotFoundError(f'{error.__cause__}; pip install "pettingzoo[{family}]"') from error


def _in_package(package: str, name: str) -> Callable[..., Any] | None:
    if not re.fullmatch(r"\w+_v\d+", name) or importlib.util.find_spec(f"{package}.{name}") is None:
        return None
    module = vars(importlib.import_module(f"{package}.{name}"))
    return module.get("parallel_env") or module.get("env")


def known() -> list[str]:
    """The names of its environments; none if it is not installed."""
    if importlib.util.find_spec("pettingzoo") is None:
        return []
    import pettingzoo

    found = [*map(_readable, {**pettingzoo.parallel_registry, **pettingzoo.aec_registry})]
    for package in _PACKAGES:
        where = importlib.util.find_spec(package)
        for module in pkgutil.iter_modules(where.submodule_search_locations if where else ()):
            found += [f"{package}/{module.name}"] if re.search(r"_v\d+$", module.name) else []
    return found


class Extras:
    """What agents observe beside their own observations: the environment's state, their number, and infos' masks."""

    def __init__(
        self, env: Any, policies: PolicyMap, observations: Mapping[str, Any], infos: Mapping[str, Any]
    ) -> None:
        """`policies` says what agents observe; `observations` and `infos` are of a reset."""
        self._env, self._name = env, (state := policies.global_state)
        self._ids = {agent: i for i, agent in enumerate(possible_agents(env))} if policies.agent_id else {}
        self._function = function_of(state, "agents.global_state") if state not in ("", "true") else None
        masked = any(isinstance(info, dict) and ACTION_MASK in info for info in infos.values())
        self._masks = {  # of agents whose infos have masks: of every action
            agent: _all_allowed(env, agent)
            for agent in possible_agents(env)
            if masked and isinstance(env.action_space(agent), _DISCRETE) and not _has_mask(env, agent)
        }
        self._space: Space | None = None
        self._state: Any = None
        self.update(observations)
        if self._function:
            self._space = _box_of(self._state)
        elif state:
            given = vars(env.unwrapped).get("state_space")
            self._space = given if isinstance(given, Space) else _box_of(self._state)

    @property
    def adds(self) -> bool:
        """Whether it adds something to what agents observe."""
        return bool(self._masks or self._ids) or self._space is not None

    def update(self, observations: Mapping[str, Any]) -> None:
        """Take the state after a step, of which these are the observations."""
        if self._function:
            with naming(f"agents.global_state={self._name}"):
                self._state = np.asarray(self._function(dict(observations)), np.float32)
            if not np.isfinite(self._state).all():
                raise InvalidValue(f"agents.global_state={self._name} gave NaN or Inf")
        elif self._name:
            try:
                self._state = self._env.state()
            except (NotImplementedError, AttributeError) as error:
                raise ConfigError(
                    f"agents.global_state=true: the environment has no state() ({type(error).__name__}); give "
                    f"agents.global_state=module:function of its observations"
                ) from None

    def space_of(self, agent: str) -> Space:
        """The space of all that an agent observes."""
        own: Space = self._env.observation_space(agent)
        if not self.adds:
            return own
        entries = dict(own.spaces) if isinstance(own, spaces.Dict) else {OBSERVATION: own}
        if agent in self._masks:
            entries[ACTION_MASK] = spaces.Box(0, 1, self._masks[agent].shape, np.int8)
        if self._ids:
            entries[AGENT_ID] = spaces.Discrete(len(self._ids))
        if self._space is not None:
            entries[PRIVILEGED] = self._space
        return spaces.Dict(entries)

    def add(self, agent: str, observation: Any, infos: Mapping[str, Any], acts: bool) -> Any:
        """An agent's observation with the others; one that does not act needs no mask."""
        if not self.adds:
            return observation
        found = dict(observation) if isinstance(observation, dict) else {OBSERVATION: observation}
        if agent in self._masks:
            mask = infos.get(agent, {}).get(ACTION_MASK)
            if mask is None and acts:
                raise InvalidValue("its info has no action_mask, and one had at the first reset; give one in each step")
            mask = self._masks[agent] if mask is None else mask
            found[ACTION_MASK] = np.asarray(mask, np.int8)
        if self._ids:
            found[AGENT_ID] = self._ids[agent]
        if self._space is not None:
            found[PRIVILEGED] = self._state
        return found


def _has_mask(env: Any, agent: str) -> bool:
    """Whether the mask is in the agent's observation itself."""
    own = env.observation_space(agent)
    return isinstance(own, spaces.Dict) and ACTION_MASK in own.spaces


def _all_allowed(env: Any, agent: str) -> np.ndarray:
    done = env.action_space(agent)
    return np.ones(int(done.n) if isinstance(done, spaces.Discrete) else int(done.nvec.sum()), np.int8)


def _box_of(state: Any) -> spaces.Box:
    array = np.asarray(state)
    dtype = np.uint8 if array.dtype == np.uint8 else np.float32
    low, high = (0, 255) if dtype == np.uint8 else (-np.inf, np.inf)
    return spaces.Box(low, high, array.shape, dtype)


def as_parallel(env: Any) -> tuple[Any, bool]:
    """The environment with PettingZoo's parallel interface, and whether its agents take turns."""
    import pettingzoo
    from pettingzoo.utils.conversions import aec_to_parallel_wrapper, turn_based_aec_to_parallel_wrapper

    from rlframe.envs.aec import Cycles, Turns

    if type(env) is aec_to_parallel_wrapper:  # what an environment's parallel_env is, mostly
        return Cycles(env.aec_env), False
    if type(env) is turn_based_aec_to_parallel_wrapper:  # whose agents act also where they only wait
        return Turns(env.aec_env), True
    if isinstance(env, pettingzoo.ParallelEnv):
        return env, False
    return (Cycles(env), False) if env.metadata.get("is_parallelizable", False) else (Turns(env), True)


def possible_agents(env: Any) -> tuple[str, ...]:
    """The names of all agents that may come. Raises ConfigError if the environment does not say."""
    try:
        found = tuple(env.possible_agents)
    except AttributeError:
        found = ()
    if not found:
        raise ConfigError("the environment needs possible_agents, the names of all agents that may come")
    for agent in found:
        if not isinstance(agent, str):
            raise ConfigError(f"possible_agents has {agent!r:.60}, a {type(agent).__name__}; agents' names must be str")
        if (n := found.count(agent)) > 1:
            raise ConfigError(f"possible_agents has {agent:.60} {n} times; give each agent its own name")
    return found


def function_of(name: str, key: str) -> Callable[..., Any] | None:
    """The function module:function; None for no name. Raises ConfigError if there is none; `key` is for messages."""
    if not name:
        return None
    found = find_attribute(name, key)
    if not callable(found):
        raise ConfigError(f"{key}={name} is {found!r:.60}, not a function")
    return found
