"""Attacks on run directories, studies and presets, and the bounds that commands keep to; for test_hostile."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from rlframe import evaluate, export, launch, plot
from rlframe.record.snapshot import resolve_snapshot, self_hash

WORDS = ["env=CartPole-v1", "runner.n_steps=64", "runner.log_interval_steps=32", "sampler=serial", "sampler.batch_T=8"]
WORDS += ["sampler.batch_B=4", "algo.minibatches=1", "algo.epochs=1", "eval.n_episodes=1", "model.hidden=[8]"]
SECONDS, BYTES = 10, 700_000_000  # with the 300 MB of the libraries, under 1 GB
SECRET = "precious"
Attack = Callable[[Path], object]  # on a run directory, or on a study

COMMANDS: dict[str, Callable[[Path], int]] = {
    "evaluate": lambda run: evaluate.main([str(run), "n_episodes=1", "n_envs=1"]),
    "resume": lambda run: launch.main([f"resume={run}", "runner.n_steps=96"]),
    "plot": lambda run: plot.main([str(run), f"out={run.parent}/x.png"]),
    "export": lambda run: export.main([str(run), f"out={run.parent}/x.pt2"]),
    "again": lambda run: launch.main([f"experiment={run}/params.json", f"log_dir={run.parent}/again"]),
    "init": lambda run: launch.main([*WORDS, f"init={run}", f"log_dir={run.parent}/init"]),
    "preset": lambda run: launch.main([f"experiment={run}/mine.yaml", f"log_dir={run.parent}/mine"]),
    "study": lambda run: launch.main([f"resume={run}", "affinity=none"]),
}


@contextmanager
def at_most(seconds: int) -> Iterator[None]:
    """Fail if the block takes longer."""
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def bounded() -> Iterator[None]:
    """Fail if the block takes too long, or more memory than there was before."""
    me = psutil.Process()
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before, begin = me.memory_info().rss, time.process_time()  # of the CPU: other processes do not decide
    with at_most(3 * SECONDS):
        yield
    assert time.process_time() - begin < SECONDS
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    assert int(status["VmHWM"].split()[0]) * 1024 - before < BYTES


def snapshot_of(run: Path) -> Path:
    return resolve_snapshot(run)


def write(name: str, content: bytes | str) -> Attack:
    """Replace a file of the run, or of its snapshot."""

    def attack(run: Path) -> None:
        folder = snapshot_of(run) if name.startswith(("manifest", "arrays")) else run
        (folder / name).unlink(missing_ok=True)
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())

    return attack


def holes(name: str, size: int) -> Attack:
    """Make a file of the run long, and empty of content."""

    def attack(run: Path) -> None:
        folder = snapshot_of(run) if name.startswith(("manifest", "arrays")) else run
        (folder / name).touch()
        os.truncate(folder / name, size)

    return attack


def replaced(name: str, by: Callable[[Path, Path], object]) -> Attack:
    """Put a link, pipe or folder in the place of a file; `by` gets the place and a file outside."""

    def attack(run: Path) -> None:
        folder = snapshot_of(run) if name.startswith(("manifest", "arrays")) else run
        (folder / name).unlink(missing_ok=True)
        by(folder / name, run.parent.parent / "outside")

    return attack


def config(**changes: Any) -> Attack:
    """Change the config in params.json; __ stands for a dot."""

    def attack(run: Path) -> None:
        params = json.loads((run / "params.json").read_text())
        params["config"] |= {key.replace("__", "."): value for key, value in changes.items()}
        (run / "params.json").write_text(json.dumps(params))

    return attack


def manifest(change: Callable[[dict[str, Any]], object]) -> Attack:
    """Change the manifest of the newest snapshot, with a hash that fits."""

    def attack(run: Path) -> None:
        file = snapshot_of(run) / "manifest.json"
        content = json.loads(file.read_text())
        change(content)
        content["sha256"] = self_hash(content)
        file.write_text(json.dumps(content))

    return attack


def tree(node: Any, key: str = "agent") -> Attack:
    """Replace an entry of the state by something else."""

    def change(content: dict[str, Any]) -> None:
        content["ranks"][0]["tree"]["dict"][key] = node

    return manifest(change)


def array(**facts: Any) -> Attack:
    """Add a large array to the state that the manifest describes so, over one real chunk."""

    def attack(run: Path) -> None:
        folder = snapshot_of(run) / "chunks"
        folder.mkdir(exist_ok=True)
        data = bytes(1 << 22)
        name = hashlib.sha256(data).hexdigest()
        (folder / name).write_bytes(data)
        entry = {"dtype": "float32", "shape": [1 << 20], "chunks": [[name, 1 << 22]]} | facts
        entry["chunks"] = [[name if digest == "it" else digest, n] for digest, n in entry["chunks"]]

        def change(content: dict[str, Any]) -> None:
            content["ranks"][0]["large"]["bomb"] = entry
            content["ranks"][0]["tree"]["dict"]["agent"]["dict"]["bomb"] = {
                "tensor": "bomb",
                "dtype": "float32",
                "shape": entry["shape"],
            }

        manifest(change)(run)

    return attack


def repeated(n: int) -> Attack:
    """Name a real large array again and again."""

    def attack(run: Path) -> None:
        array()(run)

        def change(content: dict[str, Any]) -> None:
            agent = content["ranks"][0]["tree"]["dict"]["agent"]["dict"]
            agent |= {f"bomb{i}": agent["bomb"] for i in range(n)}

        manifest(change)(run)

    return attack


def many_snapshots(run: Path) -> None:
    for number in range(3_000):
        (run / "snapshot" / f"step_{number + 10**6:012d}").mkdir()


def last_to(target: str) -> Attack:
    def attack(run: Path) -> None:
        link = run / "snapshot/last"
        link.unlink(missing_ok=True)
        link.symlink_to(target)

    return attack


def snapshots_elsewhere(run: Path) -> None:
    (run / "snapshot").rename(run.parent / "elsewhere")
    (run / "snapshot").symlink_to(run.parent / "elsewhere")


class Bomb:
    """Makes a folder when it is unpickled."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("/tmp/unpickled",)


DEEP = "[" * 100_000
EMPTY_LISTS = b"[" + b"[]," * 3_000_000 + b"0]"
HEADER = b"env_steps,eval/return_mean\n"
YAML_BOMB = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{b}: &{b} [{','.join(['*' + a] * 9)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)
ZERO = "0" * 64
SPECIAL: dict[str, Callable[[Path, Path], object]] = {
    "symlink": lambda place, outside: place.symlink_to(outside),
    "hardlink": lambda place, outside: place.hardlink_to(outside),
    "fifo": lambda place, _: os.mkfifo(place),
    "folder": lambda place, _: place.mkdir(),
    "endless": lambda place, _: place.symlink_to("/dev/zero"),
    "loop": lambda place, _: place.symlink_to(place.name),
}


def study(*command: Any, **entry: Any) -> Attack:
    """An experiment.json of this command with one run."""

    def attack(folder: Path) -> None:
        one = {"name": "run_0", "setting": "", "arguments": {"env": "CartPole-v1", "seed": "0"}, "state": "waiting"}
        one |= {"slot": -1, "attempts": 0, "seconds": 0.0, "exit_status": 0, "reason": "", "has_directory": False}
        words = list(command) or ["env=CartPole-v1", "sweep.seed=0", "runner.n_steps=64"]
        record = {"format": 2, "command": words, "runs": [one | entry]}
        (folder / "experiment.json").write_text(json.dumps(record))

    return attack


def both(*attacks: Attack) -> Attack:
    return lambda folder: [attack(folder) for attack in attacks]


def linked(name: str, how: str) -> Attack:
    return lambda folder: SPECIAL[how](folder / name, folder.parent / "outside")
