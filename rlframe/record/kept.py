"""Arrays that are kept beside a run's log, to look into: NAME.safetensors, and NAME.json with the facts about them."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.numpy import save_file

from rlframe.record.chunks import Chunked
from rlframe.record.params import replace_file
from rlframe.record.tree import Arrays, encode


def keep(directory: Path, name: str, state: Any, facts: Mapping[str, Any]) -> Path:
    """Write `state` (see record.tree) and facts; returns the file of arrays.

    Raises:
        OSError: the disk refuses.
    """
    arrays: Arrays = {}
    tree = encode(state, arrays, name)
    path = directory / f"{name}.safetensors"
    path.unlink(missing_ok=True)  # which a link might lead elsewhere
    save_file({name: each.whole() if isinstance(each, Chunked) else each for name, each in arrays.items()}, path)
    replace_file(path.with_suffix(".json"), json.dumps({**_plain(facts), "tree": tree}, indent=1) + "\n")
    return path


def _plain(value: Any) -> Any:
    """JSON has no word for what is not finite."""
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items()}
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
