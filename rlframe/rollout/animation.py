"""Animation: the pictures of a film as an animated GIF, which stays small however long the film is."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

_MAX_FPS = 10
_MAX_PICTURES = 200  # of a longer film: evenly spread ones, so it plays faster
_MAX_SIZE = 256, 256  # pixels


class Animation:
    """Keeps every k-th picture, and the last; k doubles whenever there are too many."""

    def __init__(self, fps: float) -> None:
        """`fps`: pictures per second of the film."""
        self._every, self._n = math.ceil(fps / _MAX_FPS), 0
        self._duration_ms = round(1000 * self._every / fps)
        self._kept: list[Any] = []  # PIL images
        self._last = np.zeros(0, np.uint8)

    def add(self, picture: np.ndarray) -> None:
        """Add the next picture of the film, [H, W, 3] uint8."""
        if self._n % self._every == 0:
            self._kept.append(_small(picture))
        self._n, self._last = self._n + 1, picture
        if len(self._kept) > _MAX_PICTURES:
            self._kept, self._every = self._kept[::2], 2 * self._every

    def save(self, path: Path) -> None:
        """Write the GIF; there is at least one picture."""
        first, *rest = [*self._kept, _small(self._last)]
        first.save(path, save_all=True, append_images=rest, duration=self._duration_ms, loop=0)


def _small(picture: np.ndarray) -> Any:
    from PIL import Image

    image = Image.fromarray(picture)
    image.thumbnail(_MAX_SIZE)
    return image
