"""What all figures share: an empty one, its file, colours, and units of time."""

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from rlframe.core.errors import ConfigError
from rlframe.core.files import writing

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#8C6D31")  # colour-blind safe
_NOTE = "Source"  # in a PNG


def new_figure(width: float = 7.5, height: float = 4.6) -> Any:
    """A figure of this many inches; raises ConfigError without matplotlib."""
    try:
        from matplotlib.figure import Figure  # an optional extra
    except ImportError:
        raise ConfigError('plotting needs matplotlib: pip install "rlframe[plot]"') from None
    return Figure(figsize=(width, height), dpi=150, layout="tight")


def save_figure(figure: Any, out: Path, data: Iterable[np.ndarray] = ()) -> None:
    """Write the image file; raises ConfigError if that fails, or before if its ending is not that of an image.

    Args:
        data: what it is drawn from, of which a PNG notes the digest; see `is_drawn_from`.
    """
    if out.suffix[1:].lower() not in figure.canvas.get_supported_filetypes():
        raise ConfigError(
            f"out={out} has no ending that says what kind of image it is; use {out.with_suffix('')}.png, .pdf or .svg"
        )
    of_png = {"metadata": {_NOTE: _digest_of(data)}} if out.suffix.lower() == ".png" else {}
    try:
        with writing(out) as new:
            figure.savefig(new, **of_png)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot write {out}: {error}") from None


def _digest_of(data: Iterable[np.ndarray]) -> str:
    """16 hexadecimal digits of the numbers."""
    found = hashlib.sha256()
    for numbers in data:
        found.update(np.ascontiguousarray(numbers, np.float64).tobytes())
    return found.hexdigest()[:16]


def is_drawn_from(image: Path, data: Iterable[np.ndarray]) -> bool:
    """Whether a PNG of `save_figure` was drawn from this data."""
    return f"{_NOTE}\0{_digest_of(data)}".encode() in image.read_bytes()


def literal(text: str) -> str:
    """A text for matplotlib, in which a dollar sign begins no formula and an underscore hides no label."""
    shown = text.replace("$", r"\$")
    return f"\u200b{shown}" if shown.startswith("_") else shown


def time_scale(longest_s: float) -> tuple[float, str]:
    """The seconds of the unit for an axis of wall time, and the label of the axis."""
    scale, unit = (3600.0, "h") if longest_s > 7200 else (60.0, "min") if longest_s > 180 else (1.0, "s")
    return scale, f"wall time ({unit})"
