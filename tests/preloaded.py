"""Imported by every server of forks before its first fork: rlframe but for commands and trackers, and what it imports.

The objects that exist then are frozen, so that garbage collection in forks does not copy their memory.
"""

import gc
import importlib
import pkgutil

import rlframe
import tests.other_bits  # noqa: F401 - before the modules that it changes

for _module in pkgutil.walk_packages(rlframe.__path__, "rlframe."):
    if not _module.name.startswith("rlframe.integrations.") and (_module.ispkg or _module.name.count(".") > 1):
        importlib.import_module(_module.name)
gc.collect()
gc.freeze()
gc.set_threshold(50_000, 20, 20)
