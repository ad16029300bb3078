"""Scripts that start processes which import them: calls of the top level are refused there."""

import multiprocessing
import sys
import traceback
from typing import Any

from rlframe.core.errors import ConfigError


def check_not_imported(call: str) -> None:
    """Raise ConfigError in a script that its study, or a run or worker of it, imports, which would start it again.

    Args:
        call: what the script calls, such as run_study.
    """
    main = sys.modules["__main__"]
    name = main.__spec__.name if main.__spec__ else ""
    imported, file = _imported(), getattr(main, "__file__", None)
    if multiprocessing.parent_process() and not file and imported:
        importer = "a worker process"
    elif name.startswith("rlframe.") and (imported or call == "run_study"):
        importer = name
    elif file and any(module.get("__file__") == file for module in imported):
        importer = "its own study"
    else:
        return
    raise ConfigError(f"{importer} imports this script; call {call} below if __name__ == '__main__':")


def _imported() -> list[dict[str, Any]]:
    """The globals of the modules whose top level is running, but the main one: they are being imported."""
    frames = [frame for frame, _ in traceback.walk_stack(sys._getframe())]
    tops = [each.f_globals for each in frames if each.f_code.co_name == "<module>"]
    return [each for each in tops if each.get("__name__") != "__main__"]
