"""Animation: few and small pictures, of the whole film."""

from pathlib import Path

import numpy as np
import pytest

from rlframe.rollout.animation import Animation

Image = pytest.importorskip("PIL.Image")


def saved(path: Path, n: int, fps: float, shape: tuple[int, int] = (40, 60)) -> list[tuple[float, int]]:
    """Grey value and duration of each picture, of a film that gets brighter."""
    animation = Animation(fps)
    for number in range(n):
        animation.add(np.full((*shape, 3), round(255 * number / (n - 1)), np.uint8))
    animation.save(path)
    with Image.open(path) as gif:
        assert gif.n_frames > 1
        found = []
        for frame in range(gif.n_frames):
            gif.seek(frame)
            found.append((float(np.asarray(gif.convert("L")).mean()), gif.info["duration"]))
        return found


def test_it_has_at_most_ten_pictures_a_second(tmp_path: Path) -> None:
    found = saved(tmp_path / "a.gif", 51, fps=50)
    assert [duration for _, duration in found[:-1]] == [100] * 10, "of 1 s"
    assert found[-1][0] == 255


def test_a_slow_film_keeps_its_pace(tmp_path: Path) -> None:
    assert [duration for _, duration in saved(tmp_path / "a.gif", 5, fps=4)][:4] == [250] * 4


def test_a_long_film_is_shown_faster_from_its_beginning_to_its_end(tmp_path: Path) -> None:
    found = saved(tmp_path / "a.gif", 5000, fps=10)
    assert 100 <= len(found) <= 202
    assert found[0][0] == 0
    assert found[-1][0] == 255
    assert abs(found[len(found) // 2][0] - 128) < 5


def test_its_pictures_have_at_most_256_pixels_a_side(tmp_path: Path) -> None:
    saved(tmp_path / "a.gif", 3, 10, shape=(400, 600))
    with Image.open(tmp_path / "a.gif") as gif:
        assert gif.size == (256, 171)
