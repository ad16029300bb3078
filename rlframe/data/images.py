"""Images of datasets that Minari stores as JPEG, which loses detail: they are read, never written."""

from __future__ import annotations

import io
import math
from collections.abc import Iterable
from typing import Any

import numpy as np
from gymnasium import Space, spaces

from rlframe.core.errors import ConfigError
from rlframe.data.bounds import Room

_LEAST = 32  # pixels a side that Minari calls an image


def is_image(space: Space) -> bool:
    """Whether Minari compresses observations of this space where a dataset says jpeg_encoding."""
    if not isinstance(space, spaces.Box) or space.dtype != np.uint8 or len(space.shape) not in (2, 3):
        return False
    large = space.shape[0] >= _LEAST and space.shape[1] >= _LEAST
    return large and bool((space.low == 0).all() and (space.high == 255).all())


def decode_images(found: Iterable[Any], n: int, space: Space, room: Room) -> np.ndarray:
    """n JPEG images as an array [n, *shape], one after the other.

    Raises:
        ValueError: one has another shape, which is checked before it is decoded, or there is no room for all.
    """
    try:
        from PIL import Image
    except ImportError:
        raise ConfigError('images of this dataset are JPEG, which needs Pillow: pip install "rlframe[data]"') from None
    shape = tuple(space.shape or ())
    room.take(n * math.prod(shape), f"{n:,} images")
    decoded = np.empty((n, *shape), np.uint8)
    for to, data in zip(decoded, found, strict=True):
        with Image.open(io.BytesIO(bytes(data)), formats=["JPEG"]) as image:
            if image.size[::-1] != shape[:2]:
                raise ValueError(f"an image of {image.size} pixels in a space of shape {list(shape)}")
            to[...] = np.asarray(image)
    return decoded
