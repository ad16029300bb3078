"""Reading JSON that may be anybody's: of bounded size, and with one kind of error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rlframe.core.errors import ConfigError
from rlframe.core.text import printable

MOST_BYTES = 1 << 24


def read_json(path: Path) -> dict[str, Any]:
    """The object that a file of settings or of records holds.

    Raises:
        ConfigError: it is not there, larger than MOST_BYTES, or damaged; names the file.
    """
    try:
        size = path.stat().st_size
        if size > MOST_BYTES:
            raise ConfigError(f"{path} has {size:,} bytes; of such a file at most {MOST_BYTES:,} are read")
        content = json.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is damaged: {printable(str(error))}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path} is damaged: it holds no object")
    return content
