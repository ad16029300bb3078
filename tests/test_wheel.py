"""The wheel: built, installed into an environment of its own, and used by a file that mypy checks."""

import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
USER = """
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
    pytest.importorskip("mypy")
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
    done = run(tmp_path, sys.executable, "-m", "mypy", "--python-executable", python, "user.py")
    assert 'user.py:5: note: Revealed type is "pathlib.Path"' in done.stdout
    assert 'user.py:6: error: "float" has no attribute "upper"' in done.stdout
    assert "user.py:7: error:" in done.stdout
    assert "Found 2 errors in 1 file" in done.stdout, done.stdout
