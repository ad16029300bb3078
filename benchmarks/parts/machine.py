"""The machine of a benchmark: hardware and versions."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rlframe.system.machine import n_cpus

PACKAGES = ("torch", "gymnasium", "numpy", "ale-py", "mujoco", "stable-baselines3")
_BF16 = ("amx_bf16", "avx512_bf16", "avx_ne_convert", "bf16")  # flags of x86 and ARM


def machine(packages: tuple[str, ...] = PACKAGES) -> dict[str, Any]:
    """The processor, its units for bfloat16, the cores this process may use, and versions of installed packages."""
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text(encoding="utf-8") if cpuinfo.is_file() else ""
    facts = {name.strip(): value.strip() for name, _, value in (row.partition(":") for row in text.splitlines())}
    flags = set(facts.get("flags", facts.get("Features", "")).split())
    units = " ".join(flag for flag in _BF16 if flag in flags)
    hardware = {"cpu": facts.get("model name", platform.processor()), "n_cpus": n_cpus(), "bf16_units": units or "none"}
    found = {name: number for name in packages if (number := _version(name))}
    return {**hardware, "python": platform.python_version(), **found}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
