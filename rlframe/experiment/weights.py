"""Weights from snapshots: for `init=`, for loading trained agents, and the state of optimizers and what it leaves."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from rlframe.agents import Agent
from rlframe.algos import Algorithm
from rlframe.algos.base import optimizer_steps
from rlframe.core.errors import ConfigError, one_line, shortened, warn_once
from rlframe.core.files import read_json
from rlframe.experiment.keys import as_typed
from rlframe.record.snapshot import load_snapshot, params_of, resolve_snapshot, state_keys

_REPLAY = "replay"  # in the state of an algorithm

_RATE = "lr"  # of torch's optimizers


def saved_part(init: str, part: str, policy: str, key: str = "init") -> Any:
    """The weights in a snapshot that `init` names, or what else is `part` of it, but for a replay, which may be large.

    Args:
        init: a run directory or snapshot; with :NAME, the policy of that name in it.
        part: agent, or algo.    policy: whose it is to be; of a run with several policies, the one of this name.
        key: that has `init`, for messages.
    Raises:
        ConfigError: there is no such directory, or the run has several policies, and none of this name.
    """
    own = f" of policy {policy}" if policy else ""
    path, named = located(init, f"{key}={init}{own}")
    several, wanted = policies_at(Path(path)), named or policy
    if not several and not named:
        return load_snapshot(Path(path), key=part, without=_REPLAY)[0]
    if not several:
        raise ConfigError(f"{key}={init}: that run has one policy, without a name; use {key}={path}")
    if wanted not in several:
        raise ConfigError(
            f"{key}={init}{own}: that run has the policies {', '.join(several)}, and none is {wanted}; name one of "
            f"them: {key}={path}:{several[0]}"
        )
    return load_snapshot(Path(path), key=f"{part}/{wanted}", without=_REPLAY)[0]


def located(init: str, title: str) -> tuple[str, str]:
    """The path in `init`, and the policy that it names. Raises ConfigError, with the title, if there is none."""
    path, _, named = init.rpartition(":") if ":" in init and not Path(init).exists() else (init, "", "")
    if not Path(path).exists():
        raise ConfigError(f"{title}: there is no such run directory or snapshot")
    return path, named


def policies_at(path: Path) -> list[str]:
    """The names of the policies in a snapshot, or in the newest one of a run; one alone has no name, and gives none."""
    return sorted(key.removeprefix("agent/") for key in state_keys(path) if key.startswith("agent/"))


def agents_in(state: Mapping[str, Any]) -> dict[str, Any]:
    """All weights of the agents in the state of a run, with different names."""
    found = {key: part for key, part in state.items() if key == "agent" or key.startswith("agent/")}
    return {f"{key}.{name}": x for key, part in found.items() if isinstance(part, Mapping) for name, x in part.items()}


def of_exploration(weights: Mapping[str, Any], wanted: bool) -> dict[str, Any]:
    """The weights of an agent that are those of its exploration, or the others."""
    return {name: x for name, x in weights.items() if name.startswith("exploration.") == wanted}


def check_weights(weights: Any, source: str) -> None:
    """Raise ConfigError unless these are tensors by name."""
    if not isinstance(weights, Mapping):
        raise ConfigError(f"{source} holds no weights of a network, but {type(weights).__name__}; use another snapshot")
    for name, x in weights.items():
        is_tensor = isinstance(x, torch.Tensor) and not (x.is_complex() or x.is_sparse or x.is_quantized)
        if not isinstance(name, str) or not (is_tensor or name.endswith("_extra_state")):  # of torch's get_extra_state
            what = f"{type(x).__name__} {x.dtype}" if isinstance(x, torch.Tensor) else type(x).__name__
            raise ConfigError(f"{source} holds no weights of a network: {name!r:.60} is {what}; use another snapshot")


def load_weights(agent: Agent, weights: Any, source: str) -> None:
    """Load saved weights into an agent.

    Raises:
        ConfigError: they are no weights, from another network, or NaN or Inf; the message names what is wrong.
    """
    check_weights(weights, source)
    try:
        agent.load_state_dict(weights)
    except (RuntimeError, TypeError, ValueError, KeyError, AttributeError) as error:
        said = one_line(error, 400)
        added = "Unexpected key" in said and not ("Missing key" in said or "size mismatch" in said)
        remedy = "; parts that your own algorithm adds to its agent belong in make_agent of its Config" if added else ""
        if "Missing key" in said:
            remedy = '; if a script made the network, load it there: load_snapshot(RUN_DIR, key="agent")'
        raise ConfigError(f"{source} holds another network: {said}{remedy}") from None
    broken = [name for name, x in agent.named_parameters() if not x.isfinite().all()]
    broken += [name for name, x in agent.named_buffers() if x.isnan().any()]  # which may be infinite on purpose
    if broken:
        raise ConfigError(f"{source} holds NaN or Inf in {broken[0]}; use another snapshot")


def load_init(agent: Agent, init: str, policy: str, config: Callable[[], Mapping[str, Any]]) -> None:
    """Load the weights that `init` names, except those of exploration: a new run explores as its config says.

    Args:
        policy: as of `saved_part`.    config: gives the flat config of the new run.
    Raises:
        ConfigError: as `saved_part` and `load_weights`; the message has the network of that run, where it differs.
    """
    saved, own, source = saved_part(init, "agent", policy), agent.state_dict(), f"init={init}"
    check_weights(saved, source)
    try:
        load_weights(agent, of_exploration(saved, False) | of_exploration(own, True), source)
    except ConfigError as error:
        other = _other_settings(init, policy, config())
        raise ConfigError(f"{shortened(str(error), 150) if other else error}{other}") from None


def _other_settings(init: str, policy: str, config: Mapping[str, Any]) -> str:
    """What the run of `init` was made with, of its environment, algorithm and network, that a config has not."""
    with suppress(ConfigError, KeyError, AttributeError):
        path, named = located(init, init)
        theirs = read_json(params_of(resolve_snapshot(Path(path))))["config"]
        own = f"agents.policies.{named or policy}."
        theirs |= {key.removeprefix(own): value for key, value in theirs.items() if key.startswith(own)}
        keys = [key for key in theirs if key in ("env", "algo") or key.startswith("model.")]
        other = [f"{key}={as_typed(theirs[key])}" for key in keys if key in config and theirs[key] != config[key]]
        return f"; its run has {', '.join(other)}" if other else ""
    return ""


def saved_algorithm(init: str, policy: str) -> Mapping[str, Any]:
    """The state of an algorithm in the snapshot that `init` names; empty if that has weights of agents alone."""
    path, named = located(init, f"init={init}")
    keys = state_keys(Path(path))
    saved = saved_part(init, "algo", policy) if {"algo", f"algo/{named or policy}"} & {*keys} else {}
    if not isinstance(saved, Mapping):
        raise ConfigError(f"init={init} has no state of an algorithm, but {type(saved).__name__}; use init_with=agent")
    return saved


def load_networks(algo: Algorithm, saved: Mapping[str, Any], source: str) -> None:
    """Give the networks of an algorithm, such as critics, their saved weights; its `origin` says which begin anew.

    Any other part of it takes what its `begin_with`, if it has one, takes of a state.

    Raises:
        ConfigError: one is another network.
    """
    taken, anew = ["the agent"], []
    for name in algo.saved:
        part = vars(algo)[name]
        load = part.load_state_dict if isinstance(part, torch.nn.Module) else getattr(part, "begin_with", None)
        if load is not None and name in saved:
            try:
                load(saved[name])
            except (RuntimeError, TypeError, ValueError, KeyError, AttributeError) as error:
                problem = one_line(error, 300)
                raise ConfigError(f"init={source} has another {name}: {problem}; use init_with=agent") from None
            taken.append(name)
        elif load is not None:
            anew.append(name)
    rest = f"; {', '.join(anew)} begin anew, which that run has not" if anew else ""
    algo.origin = f"{', '.join(taken)} of {source}{rest}"


def load_optimizers(algo: Algorithm, saved: Mapping[str, Any], source: str) -> None:
    """Give the optimizers of an algorithm their saved states, without a learning rate that was set in that run.

    Raises:
        ConfigError: it has none in its `saved` attributes, or the snapshot has none of that name.
        ValueError: one is of another kind or another network.
    """
    steps = optimizer_steps(algo)
    if not steps:
        raise ConfigError(f"init_with=optimizers: {type(algo).__name__} has no OptimizerStep")
    for name, step in steps.items():
        if name not in saved:
            raise ConfigError(f"init_with=optimizers: {source} has no state of {name}; use init_with=networks")
        state = saved[name]
        if not isinstance(state, Mapping):
            what = type(state).__name__
            raise ConfigError(f"init_with=optimizers: {name} of {source} is {what}, no state; use init_with=networks")
        try:
            step.load_state_dict({key: x for key, x in state.items() if key != "kept_rate"})
        except ValueError as error:
            raise ConfigError(f"init_with=optimizers: {name} of {source}: {error}") from None
        except (TypeError, KeyError, AttributeError, IndexError, RuntimeError) as error:
            problem = f"{type(error).__name__} {str(error)[:100]}"
            raise ConfigError(
                f"init_with=optimizers: {name} of {source} is malformed: {problem}; use init_with=networks"
            ) from None


@contextmanager
def keeping(algos: Mapping[str, Algorithm], changed: Collection[str]) -> Iterator[None]:
    """Load a state of algorithms within the block. Optimizers' settings that are `changed` stay as they were before it.

    An OptimizerStep saves no rate but one that a callback set, which then ends. A torch.optim.Optimizer that is an
    attribute of the algorithm saves all its settings: its own are known by the last part of a key, and `lr` by
    learning_rate.

    Args:
        algos: by the name of their policies.
        changed: keys, such as algo.learning_rate, or agents.policies.red.algo.learning_rate of one of several policies.
    """
    with ExitStack() as kept:
        for name, algo in algos.items():
            own = {key.removeprefix(f"agents.policies.{name}.") for key in changed}
            kept.enter_context(_keeping(algo, {key for key in own if not key.startswith("agents.")}))
        yield


@contextmanager
def _keeping(algo: Algorithm, changed: Collection[str]) -> Iterator[None]:
    steps = [step for step in optimizer_steps(algo).values() if step.rate_key in changed]
    rates = [step.learning_rate for step in steps]
    names = {key.rpartition(".")[2] for key in changed}
    names |= {_RATE} if any(name.endswith("learning_rate") for name in names) else set()
    optimizers = [part for part in vars(algo).values() if changed and isinstance(part, torch.optim.Optimizer)]
    made = [[{k: x for k, x in group.items() if k != "params"} for group in each.param_groups] for each in optimizers]
    yield
    for step, rate in zip(steps, rates, strict=True):
        step.use_rate(rate)
    for each, groups in zip(optimizers, made, strict=True):
        for group, own in zip(each.param_groups, groups, strict=True):
            group.update({name: x for name, x in own.items() if name in names})
            if saved := [name for name, x in own.items() if name in group and group[name] != x]:
                is_now, asked = f"{saved[0]}={group[saved[0]]}", own[saved[0]]
                warn_once(
                    f"{type(each).__name__} goes on with {is_now}, as it was saved, not {asked}: a key that changes it "
                    f"ends with that name, as algo.my_{saved[0]} does"
                )
