"""Free memory: what control groups leave of it."""

from pathlib import Path

import pytest

from rlframe.core import memory
from rlframe.core.memory import available_memory


@pytest.mark.parametrize(
    ("files", "left"),
    [
        ({"memory.max": "1000", "memory.current": "900", "memory.stat": "anon 1\ninactive_file 300\n"}, 400),
        ({"memory.limit_in_bytes": "50", "memory.usage_in_bytes": "60", "memory.stat": "total_inactive_file 0"}, 0),
    ],
)
def test_memory_limits_of_control_groups_apply(
    files: dict[str, str], left: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(memory, "control_groups", lambda controller: [tmp_path])
    assert available_memory() == left


def test_without_a_limit_all_memory_is_available(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "memory.max").write_text("max\n")
    monkeypatch.setattr(memory, "control_groups", lambda controller: [tmp_path, tmp_path / "missing"])
    assert available_memory() > 10**6
