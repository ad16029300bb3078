"""A small trained run, and a copy of it for a test to change."""

import shutil
from pathlib import Path

import pytest

from rlframe import launch
from tests.experiment.hostile import WORDS


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that is not changed."""
    folder = tmp_path_factory.mktemp("trained")
    assert launch.main([f"log_dir={folder}", *WORDS]) == 0
    return folder / "run_0"


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A run directory from another person."""
    return Path(shutil.copytree(trained, tmp_path / "stranger/run_0", symlinks=True))
