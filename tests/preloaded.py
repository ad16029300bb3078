"""Imported by every server of forks before its first fork: all of rlframe but its commands, and what that imports.

The objects that exist then are frozen, so that garbage collection in forks does not copy their memory.
"""

import gc
import importlib
import pkgutil

import rlframe

for _module in pkgutil.walk_packages(rlframe.__path__, "rlframe."):
    if _module.ispkg or _module.name.count(".") > 1:
        importlib.import_module(_module.name)
gc.collect()
gc.freeze()
