"""Settings that need far more memory, processes or time than this machine has, refused before anything is allocated."""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Callable, Iterable
from typing import Any

import psutil
import torch
from gymnasium import Space, spaces
from torch import nn
from torch.utils._pytree import tree_leaves

from rlframe.agents import Agent
from rlframe.core.config import AUTO
from rlframe.core.errors import ConfigError
from rlframe.core.memory import available_memory
from rlframe.core.multi_agent import JointSpace
from rlframe.core.struct import leaves
from rlframe.experiment.config import Experiment
from rlframe.models.encoders import NATURE, has_images
from rlframe.optimizers import Optimizer
from rlframe.rollout.inference import empty_batch
from rlframe.system.machine import n_cpus

_STEPPING_BYTES, _ACTING_BYTES, _RANK_BYTES = 8e6, 13e6, 180e6  # of CartPole's, without what processes share
_ENV_BYTES, _ROW_BYTES = 1_000, 16  # the least that an environment and a row of a batch take
_MOST_PER_CPU = 100  # processes
_THREADS_PER_CPU, _MOST_THREADS = 16, 1024
_SMALL = 1 << 26  # weights of a network that needs no check: it fits into any machine
_NUMBER = 4  # bytes of a float32
_SIDE = 64  # of a matrix of hidden layers


def check_machine(experiment: Experiment, n_ranks: int) -> None:
    """Check processes, threads and batches, as far as the settings tell; `n_ranks`: those on this machine.

    Raises:
        ConfigError: the machine cannot have them, whatever the environment is.
    """
    _check_processes(experiment, n_ranks)
    most = min(_MOST_THREADS, _THREADS_PER_CPU * n_cpus())
    if experiment.threads > most:
        raise ConfigError(
            f"threads={experiment.threads} are more than {most}, {_THREADS_PER_CPU} for each of {n_cpus()} CPUs; use "
            f"threads={n_cpus()} or less, or threads=auto"
        )
    available = available_memory()
    for setting, n_bytes in _of_rows(experiment).items():
        _check_fits(setting, n_bytes, available, "memory")


def _check_processes(experiment: Experiment, n_ranks: int) -> None:
    config = experiment.sampler
    n_workers = n_ranks * (max(0, config.worker_count()) + max(0, evaluation_workers(experiment)))  # AUTO is negative
    least = _ACTING_BYTES if config.acts_in_workers else _STEPPING_BYTES
    n_bytes, total = n_workers * least + n_ranks * _RANK_BYTES, psutil.virtual_memory().total
    most = _MOST_PER_CPU * n_cpus()
    if n_bytes > total or n_workers + n_ranks > most:
        counts = {"sampler.n_workers": config.worker_count(), "eval.n_workers": experiment.eval.n_workers}
        given = ", ".join(f"{key}={'auto' if n == AUTO else n}" for key, n in counts.items())
        raise ConfigError(
            f"{n_workers + n_ranks:,} processes are too many for this machine: they need at least {size(n_bytes)} of "
            f"{size(total)} memory, and its {n_cpus()} CPUs run at most {most}; lower {given}, "
            f"world_size={experiment.world_size} or learners={experiment.learners}"
        )


def evaluation_workers(experiment: Experiment) -> int:
    """The processes that step environments of evaluations; negative: AUTO."""
    config = experiment.eval
    return min(config.n_workers, config.n_envs, config.n_episodes) if experiment.evaluates else 0


def _of_rows(experiment: Experiment) -> dict[str, float]:
    """The least bytes of environments and batches, by their settings."""
    algo, sampler, evaluation = experiment.algo, experiment.sampler, experiment.eval
    model, bonus_rows = experiment.model, _count_of(experiment.reward.bonus, "batch_size")
    n_eval = min(evaluation.n_envs, evaluation.n_episodes) if experiment.evaluates else 0
    B, T = sampler.batch_B, 0 if experiment.runner.evolves else sampler.batch_T
    n_rows = T * B * experiment.runner.batches_held()
    rows, atoms, length = _count_of(algo, "batch_size"), _count_of(algo, "n_atoms"), _count_of(algo, "learn_T")
    length += _count_of(algo, "burn_in")
    sequences = f" sequences of algo.burn_in + algo.learn_T={length} rows" if length else ""
    found = {
        f"sampler.batch_B={B} environments": B * _ENV_BYTES,
        f"sampler.batch_T={T} sampler.batch_B={B}, a batch of {T * B:,} rows": n_rows * _ROW_BYTES,
        f"eval.n_envs={evaluation.n_envs}": n_eval * _ENV_BYTES,
        f"algo.batch_size={rows}{sequences}": rows * max(1, length) * _ROW_BYTES,
        f"reward.bonus.batch_size={bonus_rows}": bonus_rows * _ROW_BYTES,
    }
    if getattr(algo, "value", "") in ("quantile", "implicit"):  # each quantile with each of the target
        found[f"algo.batch_size={rows} algo.n_atoms={atoms}, the pairs of quantiles,"] = rows * atoms**2 * _NUMBER
    if model.memory == "transformer":
        window = f"model.memory_window={model.memory_window} model.memory_layers={model.memory_layers}"
        remembered = f"{window} model.memory_size={model.memory_size} sampler.batch_B={B}, the rows that it remembers,"
        found[remembered] = (model.memory_window - 1) * model.memory_layers * model.memory_size * B * _NUMBER
    return found


def _count_of(config: Any, name: str) -> int:
    """A count of an algorithm or a bonus, or 0 if it has none."""
    value = getattr(config, name, 0)
    return value if isinstance(value, int) else 0


def check_batch(experiment: Experiment, agent: Agent, observation_space: Space, action_space: Space) -> None:
    """Raise ConfigError if the batches of a sampler do not fit into memory."""
    T, B = experiment.sampler.batch_T, experiment.sampler.batch_B
    if experiment.runner.evolves:
        return
    row = sum(array.nbytes for array in leaves(empty_batch(observation_space, action_space, agent, 1, 1)))
    ahead = sum(array.nbytes for array in leaves(empty_batch(observation_space, action_space, agent, 2, 1))) - row
    n = experiment.runner.batches_held()
    setting = f"sampler.batch_T={T} sampler.batch_B={B}, {n} x {T * B:,} rows of {ahead:,} bytes,"
    _check_fits(setting, n * B * (row + ahead * (T - 1)), available_memory(), "memory")


def check_networks(experiment: Experiment, observation_space: Space, action_space: Space, device: torch.device) -> None:
    """Check the bytes of the networks that learning needs, before they are made.

    Raises:
        ConfigError: parameters, gradients, moments of the optimizer, targets and critics do not fit into memory.
    """
    if isinstance(observation_space, JointSpace) and isinstance(action_space, JointSpace):
        for index, (name, own) in enumerate(observation_space.own.items()):
            check_networks(experiment.of_policy(name, index), own, action_space.own[name], device)
        return
    if _is_small(experiment, observation_space, action_space):
        return
    algo, widths, n_critics = experiment.algo, experiment.model.hidden, _count_of(experiment.algo, "n_critics")
    n = _count(lambda: [algo.make_agent(observation_space, action_space, experiment.model, experiment.seed)])
    n_bonus = _count(lambda: experiment.reward.bonus.networks(observation_space, action_space))
    in_critics = n_critics * (sum(map(operator.mul, widths, widths[1:])) + sum(widths))  # at least
    moments = _moments(algo)
    targets = int(hasattr(algo, "target_interval"))
    numbers = n * (2 + moments + targets * (not n_critics)) + in_critics * (2 + moments + targets) + n_bonus
    on_gpu, available = device.type == "cuda", available_memory()
    weights = (
        f"{_largest(experiment)}: {n + in_critics + n_bonus:,} weights for observations of "
        f"{_numbers(observation_space):,} numbers"
    )
    _check_fits(weights, _NUMBER * (n + n_bonus), available, "memory")  # they are made there
    setting = f"{weights}, with gradients, {moments} moments of each by the optimizer{' and targets' * targets},"
    total = torch.cuda.get_device_properties(device).total_memory if on_gpu else available
    _check_fits(setting, _NUMBER * numbers, total, f"memory of {device}" if on_gpu else "memory")


def _is_small(experiment: Experiment, observation_space: Space, action_space: Space) -> bool:
    """Whether the networks are small whatever they look like: then counting, some milliseconds, is saved."""
    model, algo = experiment.model, experiment.algo
    n_inputs, convolutions = _numbers(observation_space), 0
    if has_images(observation_space):
        channels, strides = model.channels or NATURE["channels"], model.strides or NATURE["strides"]
        n_inputs = n_inputs * channels[-1] // math.prod(strides) ** 2  # what the convolutions make of them
        convolutions = (max(model.kernels or NATURE["kernels"]) * sum(channels)) ** 2
    n_atoms = 1 if getattr(algo, "value", "") == "expected" else max(1, _count_of(algo, "n_atoms"))
    width = _numbers(action_space) * n_atoms + sum(_widths(experiment).values())
    n_layers = 4 + (12 * model.memory_layers if model.memory == "transformer" else 0)
    n_weights = convolutions + n_inputs * width + n_layers * width**2
    return n_weights * (1 + _count_of(algo, "n_critics")) <= _SMALL


def _numbers(space: Space) -> int:
    """How many numbers an element of the space is, classes one-hot; 0 of a space that no network can see."""
    try:
        return int(spaces.flatdim(space))
    except (NotImplementedError, ValueError):
        return 0


def _widths(experiment: Experiment) -> dict[str, int]:
    """The settings that decide how wide layers are; a list counts with its sum."""
    model, bonus = experiment.model, experiment.reward.bonus
    found: dict[str, Any] = {f"model.{key}": getattr(model, key) for key in ("hidden", "image_hidden", "channels")}
    found |= {"model.action_embedding": model.action_embedding}
    found |= {"model.memory_size": model.memory_size if model.memory != "none" else 0}
    found |= {f"algo.{key}": _count_of(experiment.algo, key) for key in ("n_atoms", "n_critics")}
    found |= {f"reward.bonus.{key}": getattr(bonus, key, 0) for key in ("hidden", "embedding", "model_hidden")}
    return {key: sum(value) if isinstance(value, tuple) else value for key, value in found.items()}


def _largest(experiment: Experiment) -> str:
    """The setting that makes the networks large."""
    widths = _widths(experiment)
    group, _, name = max(widths, key=lambda key: widths[key]).rpartition(".")
    owner = {"model": experiment.model, "algo": experiment.algo}.get(group, experiment.reward.bonus)
    value = getattr(owner, name)
    return f"{group}.{name}={list(value) if isinstance(value, tuple) else value}"


def _count(make: Callable[[], Iterable[nn.Module]]) -> int:
    """The numbers in the parameters and buffers of networks.

    Torch's meta device makes tensors without memory. A user's encoder may fail there; then nothing is known.
    """
    with contextlib.suppress(Exception), torch.device("meta"):  # what is wrong is reported when they are made
        return sum(x.numel() for network in make() for x in (*network.parameters(), *network.buffers()))
    return 0


def _moments(algo: Any) -> int:
    """How many numbers an algorithm's optimizer keeps for each weight, as it does for a small matrix."""
    weight = nn.Parameter(torch.zeros(_SIDE, _SIDE))
    weight.grad = torch.ones_like(weight)
    with contextlib.suppress(Exception):  # an algorithm of the user's own may have no such optimizer
        optimizer: Optimizer = algo.optimizer.make([weight])
        optimizer.step(0.0)
        kept = [x for x in tree_leaves(optimizer.state_dict()) if isinstance(x, torch.Tensor)]
        return sum(x.numel() for x in kept) // weight.numel()
    return 0


def _check_fits(setting: str, n_bytes: float, available: float, what: str) -> None:
    if n_bytes > available:
        raise ConfigError(
            f"{setting} would take at least {size(n_bytes)} of {what}, but {size(available)} are available; use less"
        )


def size(n_bytes: float) -> str:
    """Bytes as text: 1.5 GB."""
    unit, name = next(((unit, name) for unit, name in ((1e9, "GB"), (1e6, "MB")) if n_bytes >= unit), (1e3, "kB"))
    return f"{n_bytes / unit:,.1f} {name}"
