"""The wheel: built, installed into an environment of its own, and used by a file that pyrefly checks."""

import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
USER = """
from typing import reveal_type

import rlframe

result = rlframe.train("ppo", "CartPole-v1", n_steps=1_000)
reveal_type(result.directory)
result.metrics["eval/return_mean"].upper()
rlframe.train("ppo", "CartPole-v1", n_steps="many")
"""


def run(cwd: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """The output of a command."""
    return subprocess.run(words, cwd=cwd, env={**os.environ, **variables}, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_types_of_an_installed_wheel_are_checked(tmp_path: Path) -> None:
    pytest.importorskip("hatchling", reason="pip install hatchling")
    pytest.importorskip("pyrefly")
    make = ("-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", str(tmp_path), str(ROOT))
    built = run(ROOT, sys.executable, *make)
    assert built.returncode == 0, built.stderr
    venv.create(tmp_path / "venv")
    (packages,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    (wheel,) = tmp_path.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(packages)
    others = [path for path in sys.path if path.endswith("site-packages")]
    (packages / "others.pth").write_text("\n".join(others))  # torch and the like, after rlframe itself
    (tmp_path / "user.py").write_text(USER)
    python = str(tmp_path / "venv/bin/python")
    found = run(tmp_path, python, "-c", "import rlframe; print(rlframe.__file__)", PYTHONPATH="")
    assert found.stdout.startswith(str(packages)), found.stderr
    check = ("-m", "pyrefly", "check", "--preset", "default", "--output-format", "min-text", "--min-severity", "info")
    done = run(tmp_path, sys.executable, *check, "--python-interpreter-path", python, "user.py")
    assert "user.py:7:12-30: revealed type: Path" in done.stdout
    assert "user.py:8:1-41: Object of class `float` has no attribute `upper`" in done.stdout
    assert "user.py:9:45-51: Argument `Literal['many']` is not assignable to parameter `n_steps`" in done.stdout
    assert done.stdout.count("ERROR") == 2, done.stdout
