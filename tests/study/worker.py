"""The programs that the queue's tests run, chosen by `do=`: short, without heavy imports, leaving files behind.

`worker.py queue LOG_DIR AFFINITY DO SEEDS` is the queue itself.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

HERE = str(Path(__file__))


def run(do: str, directory: Path, resume: bool) -> int:
    if do in ("none", "absent"):
        return 0 if do == "none" else 2
    directory.mkdir(parents=True, exist_ok=True)
    if do == "vanish":  # at first, as if removed while it goes on
        if not (mark := directory.with_name("vanished")).exists():
            mark.touch()
            time.sleep(3)
        directory.rmdir()
        return 0
    cpus, begin = ",".join(map(str, sorted(os.sched_getaffinity(0)))), time.monotonic()
    (directory / ("resumed" if resume else "started")).write_text(str(os.getpid()))
    status = globals()[f"_{do}"](directory, resume) or 0
    (directory / "trace").write_text(f"{cpus} {begin} {time.monotonic()}")
    return int(status)


def _brief(directory: Path, resume: bool) -> None:
    time.sleep(0.2)


def _meet(directory: Path, resume: bool) -> None:
    """Ends once another run runs at the same time; the last may find none, and waits for ten seconds."""
    end = time.monotonic() + 10
    while time.monotonic() < end:
        if any(
            not (path.parent / "trace").exists()
            for path in directory.parent.glob("run_*/started")
            if path.parent != directory
        ):
            time.sleep(0.05)
            return
        time.sleep(0.01)


def _raise(directory: Path, resume: bool) -> None:
    raise ValueError("the 42nd step went wrong")


def _refuse(directory: Path, resume: bool) -> int:
    print("error: unknown key", file=sys.stderr)
    return 2


def _flaky(directory: Path, resume: bool) -> int:
    """Fails unless it can go on from the snapshot that it wrote before."""
    (directory / "snapshot/step_000000000100").mkdir(parents=True, exist_ok=True)
    return 0 if resume else 1


def _no_snapshot(directory: Path, resume: bool) -> int:
    return 1


def _hang(directory: Path, resume: bool) -> None:
    """Ignores signals, and has a child; done at once where the study has a file `go`."""
    if (directory.parent / "go").exists():
        return
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)
    child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
    (directory / "child").write_text(str(child.pid))
    time.sleep(600)


def _polite(directory: Path, resume: bool) -> int:
    """Works until interrupted, then writes a snapshot; done when resumed from it."""
    if resume:
        return 0
    asked: list[int] = []
    signal.signal(signal.SIGINT, lambda *_: asked.append(1))
    (directory / "ready").touch()
    deadline = time.monotonic() + 100
    while not asked and time.monotonic() < deadline:
        time.sleep(0.01)
    (directory / "snapshot/step_000000000100").mkdir(parents=True)
    return 130


def _first_brief_then_polite(directory: Path, resume: bool) -> int:
    return _polite(directory, resume) if directory.name != "run_0" else 0


def _queue(log_dir: str, affinity: str, do: str, seeds: str) -> int:
    from rlframe.study import run_study

    return run_study([sys.executable, "-S", HERE], [{"do": do}], [*range(int(seeds))], log_dir, affinity)


if __name__ == "__main__":
    if sys.argv[1] == "queue":
        sys.exit(_queue(*sys.argv[2:]))
    words = dict(word.split("=", 1) for word in sys.argv[1:])
    sys.exit(run(words["do"], Path(words["log_dir"]) / f"run_{words['run_ID']}", words.get("resume") == "true"))
