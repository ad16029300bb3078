"""The lists of the first hour are true: every block of a list runs, one after another in one directory.

Comments in a block say what must hold after it, and what it needs:

    # expect: FILE            a file that matches this pattern exists
    # expect: FILE: TEXT      one of them contains this text
    # prints: TEXT            the block's output contains this text
    # needs rlframe[EXTRA]    the block is skipped if this extra is not installed

Commands of rlframe run in this process, as each Python of its own would spend seconds on imports; the other lines of a
bash block are run by bash.
"""

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from rlframe import evaluate, export, launch, plot

LISTS = sorted(Path(__file__).parent.glob("*.md"))
COMMANDS = {"launch": launch.main, "evaluate": evaluate.main, "plot": plot.main, "export": export.main}
EXTRAS = {  # the module that an extra brings
    "atari": "ale_py",
    "onnx": "onnxscript",
    "plot": "matplotlib",
    "video": "imageio_ffmpeg",
    "wandb": "wandb",
}
LIST_S = 600  # far above what a list takes, for a busy machine


@dataclass(frozen=True)
class Block:
    """A block of code in a list."""

    item: str  # number and title
    language: str  # bash or python
    text: str

    def comments(self, name: str) -> list[str]:
        return re.findall(rf"^# {name} (.*)$", self.text, re.MULTILINE)

    def missing(self) -> list[str]:
        """Extras that it needs and that are not installed."""
        needed = re.findall(r"^# needs rlframe\[([\w,]+)\]", self.text, re.MULTILINE)
        extras = [extra for names in needed for extra in names.split(",")]
        return [extra for extra in extras if importlib.util.find_spec(EXTRAS[extra]) is None]


def read_blocks(path: Path) -> Iterator[Block]:
    item = ""
    for title, language, text in re.findall(
        r"^## ([^\n]*)$|^```(bash|python)\n(.*?)^```$", path.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    ):
        item = title or item
        if text:
            yield Block(item, language, text)


def split_bash(text: str) -> Iterator[tuple[str, str]]:
    """The commands of a block, each with the name of the rlframe command that it is, or "bash": lines for bash."""
    lines, others = iter(text.replace("\\\n", " ").splitlines()), []
    for line in lines:
        if found := re.match(r"(?:python -m rlframe\.|rlframe )(\w+) ?(.*)", line):
            yield "bash", "\n".join(others)
            others = []
            yield found[1], found[2]
            continue
        others.append(line)
        if document := re.search(r"<<'(\w+)'", line):
            for inner in lines:
                others.append(inner)
                if inner == document[1]:
                    break
    yield "bash", "\n".join(others)


def run_bash(script: str, given: str = "") -> str:
    """What the script prints."""
    done = subprocess.run(
        ["bash", "-e", "-o", "pipefail", "-c", script], input=given, capture_output=True, text=True, timeout=LIST_S
    )
    assert done.returncode == 0, f"{script}\n{done.stdout}{done.stderr}"
    return done.stdout + done.stderr


def words_of(line: str) -> list[str]:
    if "$(" in line or "*" in line:
        return run_bash(rf"printf '%s\n' {line}").splitlines()
    return shlex.split(line, comments=True)


def run_block(block: Block, capture: pytest.CaptureFixture[str]) -> str:
    """Run a block and return its output; it ends with an exception if the block fails."""
    if block.language == "python":
        exec(compile(block.text, block.item, "exec"), {"__name__": "__main__"})
        return "".join(capture.readouterr())
    printed = ""
    for command, line in split_bash(block.text):
        if command == "bash":
            printed += run_bash(line)
            continue
        words, pipe, rest = (line, "", "") if "$(" in line else line.partition(" | ")
        status = COMMANDS[command](words_of(words))
        output = "".join(capture.readouterr())
        assert status == 0, f"{command} {line}\n{output}"
        printed += run_bash(rest, output) if pipe else output
    return printed


def check(block: Block, printed: str) -> None:
    """Raises AssertionError if something that the block's comments promise does not hold."""
    for text in block.comments("prints:"):
        assert text in printed, f"{text!r} was not printed:\n{printed}"
    for file, _, text in (promise.partition(": ") for promise in block.comments("expect:")):
        found = list(Path().glob(file))
        assert found, f"there is no {file}:\n{printed}"
        assert not text or any(text in path.read_text(encoding="utf-8") for path in found), f"no {text!r} in {file}"


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An empty working directory, whose modules are importable until the end, as with `python -m`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setenv("PATH", os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")  # no screen
    monkeypatch.setenv("WANDB_MODE", "offline")
    known = set(sys.modules)
    yield
    for name in set(sys.modules) - known:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.mark.slow
@pytest.mark.timeout(LIST_S)
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # of the ONNX exporter
@pytest.mark.parametrize("path", LISTS, ids=[path.stem for path in LISTS])
@pytest.mark.usefixtures("scratch")
def test_every_item_works(path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for block in read_blocks(path):
        if block.missing():
            continue
        try:
            check(block, run_block(block, capfd))
        except BaseException as error:
            error.add_note(f"in {path.name}, item {block.item}\n{''.join(capfd.readouterr())}")
            raise


@pytest.mark.parametrize("path", LISTS, ids=[path.stem for path in LISTS])
def test_twenty_items_each_promise_something(path: Path) -> None:
    blocks = list(read_blocks(path))
    items = list(dict.fromkeys(block.item for block in blocks))
    assert [int(item.partition(".")[0]) for item in items] == list(range(1, 21))
    promising = {block.item for block in blocks if block.comments("prints:") or block.comments("expect:")}
    assert [item for item in items if item not in promising] == []
