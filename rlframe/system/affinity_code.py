"""Affinity codes such as 16cpu_4gpu_1gpr: their tokens, and reading them."""

from __future__ import annotations

import difflib
import re

from rlframe.core.errors import ConfigError

TOKENS = {  # of an affinity code, each after a number
    "cpu": "physical cores to use; default: all",
    "gpu": "GPUs to use, 0 for none; default: all",
    "cpr": "cores per run",
    "gpr": "GPUs per run",
    "rpg": "runs that share one GPU",
    "res": "first cores, reserved for other uses",
    "wkr": "workers per run",
    "slt": "index of this run's slot, from 0",
    "cpw": "cores that each worker is pinned to; default: 1",
    "wpc": "workers that share these cores; default: 1",
    "drv": "cores of the main process alone, the workers get the others; default: all are shared",
    "hpc": "hyperthreads of a core to use; default: all",
    "sgr": "of the GPUs of a run, those of async_rl's samplers: the last ones",
}
WITHIN = ("cpw", "wpc", "drv", "hpc")  # of each rank
_MAY_BE_ZERO = ("gpu", "res", "slt")


def tokens_of(code: str) -> dict[str, int]:
    """The numbers of a code by their names; none of auto and none.

    Raises:
        ConfigError: a token is unknown, given twice, or 0 where that means nothing.
    """
    tokens: dict[str, int] = {}
    if code in ("auto", "none"):
        return tokens
    for token in code.split("_"):
        match = re.fullmatch("([0-9]{1,9})([A-Za-z]+)", token)
        name = match[2] if match else token.strip("0123456789")
        if not match or name not in TOKENS:
            near = difflib.get_close_matches(name, [*TOKENS, "auto", "none"], n=3, cutoff=0.4)
            hint = f"did you mean {' or '.join(near)}?" if near else "write auto, none or a code such as 16cpu_4gpu"
            raise ConfigError(f"{token!r} is not a number followed by one of {', '.join(TOKENS)}; {hint}")
        if name in tokens:
            raise ConfigError(f"{tokens[name]}{name} and {token}: give {name} only once")
        tokens[name] = int(match[1])
        if tokens[name] == 0 and name not in _MAY_BE_ZERO:
            raise ConfigError(f"{token} ({TOKENS[name]}) must be at least 1{name}")
    return tokens
