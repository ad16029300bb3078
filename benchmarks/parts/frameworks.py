"""The frameworks of `benchmarks.compare` by their names on its command line, and how a process of each trains."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks.parts.command import words_of
from benchmarks.parts.gate import Gate, Train
from benchmarks.parts.rows import Row
from benchmarks.parts.turns import Contender
from rlframe.experiment.presets import competing_work
from rlframe.system import machine

OURS = "rlframe"


@dataclass(frozen=True)
class Framework:
    """A framework to measure."""

    title: str
    package: str  # as it is imported
    distributions: tuple[str, ...]  # whose versions are reported
    install: str
    module: str  # with `train(*arguments, row, gate)`, imported in the framework's own process only
    arguments: tuple[Any, ...] = ()
    variables: Callable[[Row], Mapping[str, str]] = lambda row: {}  # of the environment that a process starts with

    def installed(self) -> bool:
        """Whether it is installed here."""
        return importlib.util.find_spec(self.package) is not None

    def contender(self, row: Row) -> Contender[Train]:
        """The process that measures it on a row."""
        return Contender(
            self.title,
            partial(_train, self.module, self.arguments, row),
            row.n_threads,
            row.n_threads,
            variables={**threads_variables(row.n_threads), **self.variables(row)},
            warm_up=row.work.warm_up(),
        )


def threads_variables(n_threads: int) -> dict[str, str]:
    """Environment variables for the number of threads of numerical libraries; JAX uses the cores of its process."""
    return {"OMP_NUM_THREADS": str(n_threads), "MKL_NUM_THREADS": str(n_threads), "JAX_PLATFORMS": "cpu"}


def _train(module: str, arguments: tuple[Any, ...], row: Row, gate: Gate) -> None:
    importlib.import_module(module).train(*arguments, row, gate)


def all_frameworks(words: Mapping[str, str]) -> dict[str, Framework]:
    """All frameworks. `words`: keys of rlframe's command line, which override a row's."""
    of_sb3 = "benchmarks.parts.train_sb3"
    return {
        OURS: Framework(
            "rlframe",
            "rlframe",
            ("rlframe",),
            "pip install rlframe",
            "benchmarks.parts.train_rlframe",
            (words,),
            lambda row: machine.thread_variables(competing_work(words_of(row, words))),  # as launch sets them
        ),
        "sb3": Framework(
            "Stable-Baselines3",
            "stable_baselines3",
            ("stable-baselines3",),
            "pip install stable-baselines3",
            of_sb3,
            ("stable_baselines3",),
        ),
        "tianshou": Framework(
            "Tianshou", "tianshou", ("tianshou",), "pip install tianshou", "benchmarks.parts.train_tianshou"
        ),
        "torchrl": Framework(
            "TorchRL", "torchrl", ("torchrl", "tensordict"), "pip install torchrl", "benchmarks.parts.train_torchrl"
        ),
        "sbx": Framework("SBX", "sbx", ("sbx-rl", "jax"), "pip install sbx-rl", of_sb3, ("sbx",)),
    }
