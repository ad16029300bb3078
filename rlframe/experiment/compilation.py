"""Whether updates are compiled, by what that costs and gains over the whole run, and whether runs share them."""

from __future__ import annotations

import getpass
import importlib.util
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import chz
import torch

from rlframe.agents import Agent
from rlframe.algos import Algorithm
from rlframe.core.ranks import current_ranks
from rlframe.experiment.config import Experiment
from rlframe.experiment.settings import digest_of
from rlframe.updates.compiled import CompileChoice, has_updates

_COLD_S, _WARM_S = 45.0, 3.0  # to compile an update, and to load one from the cache, at most
# What a compiled update saves, measured on one core of an AMD EPYC: PPO's of 9,000 weights and 128 rows 0.4 ms, DQN's
# of 68,000 and 128 rows 0.4 ms, SAC's of 216,000 and 256 rows 2.5 ms.
_SAVED_S, _SAVED_A_WEIGHT_AND_ROW_S = 3e-4, 2.5e-11
_MOST_IMAGES = 64  # of an update: of 32 (DQN) a compiled one takes 0.8 of the time, of 256 (PPO) as long
_SAME = ("env", "model.", "algo", "agents.", "reward.", "precision", "sampler.batch_", "world_size", "learners")


@dataclass(frozen=True)
class Placing:
    """What `build` asks where runs may share memory and updates; by default a run shares nothing."""

    n_runs: int = 1  # that share them
    place: Callable[[Agent], None] = lambda agent: None  # moves its parameters, before anything has views of them
    # How updates of an algorithm are compiled, given whether that is worth its time.
    compiled: Callable[[CompileChoice, Algorithm], CompileChoice] = lambda choice, algo: choice


ALONE = Placing()


def choose_compile(
    experiment: Experiment, algo: Algorithm, size: int, device: torch.device, threads: int, placing: Placing = ALONE
) -> tuple[CompileChoice, str]:
    """Whether to compile, the same on all ranks, and the reason, for the log; `size`: env_steps of a batch."""
    marker = _cache() / "rlframe" / _key(experiment, threads, placing.n_runs)
    compiles, reason = _decide(experiment, algo, size, device, os.path.exists(marker), placing.n_runs)
    compiles, reason = current_ranks().broadcast([compiles, reason])
    return placing.compiled(CompileChoice(compiles, marker), algo), reason


def _decide(
    experiment: Experiment, algo: Algorithm, batch_size: int, device: torch.device, cached: bool, n_runs: int
) -> tuple[bool, str]:
    asked = experiment.compile
    if asked == "false":
        return False, "false"
    if not has_updates(algo):
        return False, f"{asked}, but {type(algo).__name__} makes its updates without updates_of"
    if missing := _missing_compiler(device):
        return False, f"{asked}, but {missing}"
    if asked == "true":
        return True, "true"
    if os.environ.get("TORCH_COMPILE_DISABLE") == "1":
        return False, "auto: not compiled, as TORCH_COMPILE_DISABLE=1 says"
    if device.type != "cpu":
        return False, "auto: not compiled, as that takes a GPU's compiler one to two minutes; compile=true does"
    n_steps = experiment.runner.n_steps
    updates = n_runs * (n_steps if experiment.runner.learns_from_data else algo.updates_in(n_steps, batch_size))
    gain_s = updates * _saved_s(algo, batch_size)
    cost_s, how = (_WARM_S, "load them") if cached else (_COLD_S, "compile them")
    about = f"{updates:,} updates would gain about {gain_s:.0f} s, and it takes up to {cost_s:.0f} s to {how}"
    return gain_s > cost_s, f"auto: {'compiled' if gain_s > cost_s else 'not compiled'}, as {about}"


def _saved_s(algo: Algorithm, batch_size: int) -> float:
    """About the seconds that an update takes less when it is compiled."""
    learned, rows = algo.progress.learned, algo.rows_of_step(batch_size)
    if rows > _MOST_IMAGES and any(parameter.dim() == 4 for parameter in learned):  # convolutions
        return 0.0
    return _SAVED_S + _SAVED_A_WEIGHT_AND_ROW_S * sum(parameter.numel() for parameter in learned) * rows


def _missing_compiler(device: torch.device) -> str:
    """What is missing to compile for a device; empty if nothing is."""
    if device.type == "cpu":
        name = os.environ.get("CXX", "g++")
        if shutil.which(name):
            return ""
        if len(name.split()) > 1 and shutil.which(name.split()[0]):
            return f"CXX={name} has options, which torch's compiler does not take; use CXX={name.split()[0]}"
        return f"there is no C++ compiler {name}; install g++, or name one by CXX"
    return "" if importlib.util.find_spec("triton") else "there is no Triton; pip install triton"


def _cache() -> Path:
    """The directory where torch's compiler keeps what it has made."""
    if given := os.environ.get("TORCHINDUCTOR_CACHE_DIR"):
        return Path(given)
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container whose user has no name
        user = str(os.getuid())
    return Path(tempfile.gettempdir()) / f"torchinductor_{user}"


def _key(experiment: Experiment, threads: int, n_runs: int) -> str:
    """What decides the compiled program, but for rlframe's own code."""
    programs = [torch.__version__, os.environ.get("CXX", "")]
    machine = [*programs, torch.backends.cpu.get_cpu_capability(), threads > 1, experiment.device, n_runs]
    return digest_of(machine, experiment, _SAME)


def compiled_as(
    chosen: Mapping[str, Any], experiment: Experiment, asked: str = "", recorded: str = "auto"
) -> tuple[Experiment, list[str]]:
    """A resumed run with its updates as they were, since compiled ones round otherwise; and notes for its log.

    Args:
        chosen: what the run recorded of its choices.    recorded: compile= of its config.
        asked: compile= as it is given for the resumed run; empty if it is not.
    """
    given, before = asked or recorded, chosen.get("compile", recorded)
    if asked in ("true", "false"):
        note = f"compile={asked}: it was {before} before, so updates round otherwise from here on"
        return experiment, [note] if before not in (asked, "auto") else []
    note = f"compile={given}: {before}, as before, since compiled updates round otherwise; true or false changes it"
    return chz.replace(experiment, compile=before), [note] if before != given and (asked or given != "auto") else []
