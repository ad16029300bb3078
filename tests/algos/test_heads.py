"""The head of each algorithm's file names the few files in which its gradient step is read."""

import ast
import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "rlframe"
ALGORITHMS = ["ppo", "a2c", "pg", "impala", "appo", "pqn", "dqn", "r2d1", "ddpg", "td3", "sac"]
ALGORITHMS += ["es", "ars", "bc", "marwil", "iql", "td3_bc", "cql", "qmix"]
MOST = {"ppo": 14, "sac": 18}  # files, its own among them


def named(algo: str) -> list[Path]:
    """The files that the head of an algorithm's file says to read, or the head of the file that this names."""
    head = ast.get_docstring(ast.parse((PACKAGE / "algos" / f"{algo}.py").read_text(encoding="utf-8"))) or ""
    [sentence] = re.findall(r"A gradient step is read here and in (.*?)(?:\.\s|\.$)", " ".join(head.split()))
    names = re.findall(r"`([\w.]+)`", sentence)
    if "the files that it names" in sentence:
        return [PACKAGE / "algos" / f"{names[0]}.py", *named(names[0])]
    return [PACKAGE / (f"{name.replace('.', '/')}.py" if "." in name else f"algos/{name}.py") for name in names]


@pytest.mark.quick
@pytest.mark.parametrize("algo", ALGORITHMS)
def test_the_files_exist_and_are_few(algo: str) -> None:
    files = named(algo)
    assert all(file.is_file() for file in files), [str(file) for file in files if not file.is_file()]
    assert len(set(files)) == len(files)
    assert len(files) + 1 <= MOST.get(algo, 20)
