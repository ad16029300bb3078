"""The films of evaluations in a run's directory: where each one is, and its GIF for TensorBoard."""

import struct
from pathlib import Path
from typing import NamedTuple

from rlframe.core.errors import ConfigError
from rlframe.core.files import read_regular_file

FILMS = "videos"  # folder in the run's directory


class Gif(NamedTuple):
    """A film as an animated GIF, smaller and shorter than its mp4 file."""

    width: int
    height: int
    data: bytes


def film_path(folder: Path, env_steps: int) -> Path:
    """The film of the evaluation at `env_steps`. A GIF of it lies beside it."""
    return folder / f"step_{env_steps:012d}.mp4"


def read_gif(directory: Path, env_steps: int) -> Gif | None:
    """The GIF of the evaluation at `env_steps` of a run; None if it was not filmed."""
    try:
        data = read_regular_file(film_path(directory / FILMS, env_steps).with_suffix(".gif"))
        width, height = struct.unpack_from("<HH", data, 6)
    except (ConfigError, struct.error):  # also if it is no GIF
        return None
    return Gif(width, height, data)
