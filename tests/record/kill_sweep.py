"""SIGKILL at every file operation of a snapshot, one after another: python -m tests.record.kill_sweep DIR CASE...

    small   a state of a few arrays, in chunks too, and the snapshot before dropped: some seconds
    ppo     PPO on CartPole-v1
    sac     SAC on Pendulum-v1 with its replay, whose chunks are linked

Each time a process that saves is killed before the k-th operation, or in the middle of it if it writes. Then the
newest snapshot must load and be the old or the new state, bit by bit; the next save must work, with no temporary left;
and a run (of ppo and sac) must go on from what was loaded. Prints how many operations there were, by name.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlframe.algos import ppo, sac
from rlframe.envs import EnvConfig, make_envs
from rlframe.models import ModelConfig
from rlframe.record import codec, rank_state
from rlframe.record.codec import ChunkedArray
from rlframe.record.retention import Retention, SnapshotPolicy
from rlframe.record.snapshot import load_newest
from rlframe.replay import InMemory
from rlframe.runners import Learner, MinibatchRl, RunnerConfig
from rlframe.samplers import SerialSampler

OPERATIONS = ("open", "write", "fsync", "link", "symlink", "mkdir", "rename", "replace", "unlink", "rmdir")
POLICY = SnapshotPolicy("best", keep=1)
Go = Callable[[Any], int]  # goes on from a state, and returns 0


def die_at(k: int, log: Path) -> None:
    """From now on this process notes its file operations, and dies at the k-th."""
    seen, lock = 0, threading.Lock()
    noted = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    write = os.write

    def watched(name: str, operation: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal seen
            with lock:
                seen += 1
                write(noted, f"{name}\n".encode())
                if seen == k:
                    if name == "write":
                        write(arguments[0], bytes(arguments[1])[: len(arguments[1]) // 2])
                    os.kill(os.getpid(), signal.SIGKILL)
            return operation(*arguments, **options)

        return call

    for name in OPERATIONS:
        setattr(os, name, watched(name, getattr(os, name)))


def fingerprint(value: Any) -> str:
    """The same for states that are the same, bit by bit."""
    match value:
        case ChunkedArray():
            return fingerprint(value.to_numpy())
        case torch.Tensor():
            return f"tensor {fingerprint(value.detach().numpy())}"
        case np.ndarray():
            return f"{value.dtype}{value.shape}{hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()}"
        case dict():
            return f"{{{', '.join(f'{key!r}: {fingerprint(item)}' for key, item in value.items())}}}"
        case list() | tuple():
            return f"{type(value).__name__}({', '.join(map(fingerprint, value))})"
        case _:
            return repr(value)


def in_child(work: Callable[[], object]) -> int:
    """The exit status of a forked process that does it: 0, or -9 if it was killed."""
    sys.stdout.flush()
    if (pid := os.fork()) == 0:
        try:
            work()
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def save(run: Path, state: Any, env_steps: int) -> None:
    """As a run does, better each time."""
    Retention(run / "snapshot", POLICY).save_if_due(lambda: state, env_steps, float(env_steps), 0, False)


def sweep(folder: Path, states: list[Any], go_on: Go) -> Counter[str]:
    """Kill the saving of the last state, where those before are saved; the operations that there were."""
    *before, new = states
    base, known = folder / "base", [fingerprint(states[-2]), fingerprint(new)]
    for number, state in enumerate(before):
        save(base, state, number)
    k, status = 0, -9
    while status == -9:
        k += 1
        run, log = folder / f"killed_{k}", folder / f"operations_{k}"
        shutil.copytree(base, run, symlinks=True, copy_function=os.link)
        status = in_child(lambda: (die_at(k, log), save(run, new, len(before))))  # noqa: B023
        _, state, meta = load_newest(run)
        found = fingerprint(state)
        assert found in known, f"killed at {k}: neither the old state nor the new one"
        assert meta["env_steps"] == len(before) - 1 + known.index(found)
        for link in ("last", "best"):
            assert fingerprint(load_newest(run / "snapshot" / link)[1]) in known, f"killed at {k}: {link}"
        assert go_on(state) == 0, f"killed at {k}: does not go on"
        save(run, new, len(states))
        names = sorted(entry.name for entry in (run / "snapshot").iterdir())
        assert names == ["best", "last", f"step_{len(states):012d}"], f"killed at {k}: {names}"
        assert fingerprint(load_newest(run)[1]) == known[1]
        shutil.rmtree(run)
    assert status == 0, status
    operations = Counter(log.read_text().split())
    assert operations.total() == k - 1
    return operations


def small(folder: Path) -> Counter[str]:
    """Three arrays in chunks of 100 bytes, of which a few change."""
    rng = np.random.default_rng(0)
    arrays, tail = [rng.random(50, np.float32), rng.random((5, 5))], rng.random(40)
    states = []
    for n in range(3):
        tens = [np.full(10, float(n)), *tail.reshape(4, 10)]
        digests = ["", *(hashlib.sha256(ten.tobytes()).hexdigest() for ten in tens[1:])]
        chunks = ChunkedArray(np.dtype(np.float64), (), [10] * 5, tens.__getitem__, digests)
        states.append({"n": n, "chunks": chunks, "rest": arrays, "tensor": torch.full((2, 2), float(n))})
    return sweep(folder, states, lambda state: 0)


def trained(module: Any, env: str, **settings: Any) -> Callable[[], MinibatchRl]:
    """Makes runners of 2,000 env_steps."""

    def make() -> MinibatchRl:
        envs = make_envs(EnvConfig(env), 2, [0, 1])
        config = module.Config(**settings)
        agent = config.make_agent(envs.observation_space, envs.action_space, ModelConfig(hidden=(16,)), 0)
        sampler = SerialSampler(envs, agent, 16)
        return MinibatchRl(
            sampler,
            Learner(agent, config.make_algorithm(agent, sampler.batch_spec, 2_000, 0)),
            RunnerConfig(n_steps=2_000, log_interval_steps=10_000),
        )

    return make


def whole_run(folder: Path, make: Callable[[], MinibatchRl]) -> Counter[str]:
    """Snapshots of a run that learns, each some batches after the one before."""
    runner = make()
    kept = folder / "kept"
    runner.sampler.refresh(runner.agent)
    for number in range(3):
        for _ in range(10):
            runner.iterate()
        save(kept / str(number), runner.state_dict(), 0)
    states = [load_newest(kept / str(number))[1] for number in range(3)]

    def go_on(state: Any) -> None:
        other = make()
        other.resume(state)
        other.iterate()

    return sweep(folder, states, lambda state: in_child(lambda: go_on(state)))


@contextmanager
def small_chunks(n_bytes: int) -> Iterator[None]:
    """Arrays that are small are kept as large ones are."""
    before = rank_state.LARGE_BYTES, codec.CHUNK_BYTES
    rank_state.LARGE_BYTES, codec.CHUNK_BYTES = n_bytes, n_bytes
    try:
        yield
    finally:
        rank_state.LARGE_BYTES, codec.CHUNK_BYTES = before


def case(name: str, folder: Path) -> Counter[str]:
    """One of those above."""
    if name == "small":
        with small_chunks(100):
            return small(folder)
    replay = InMemory(size=1_000)
    with small_chunks(1_000):
        if name == "sac":
            return whole_run(folder, trained(sac, "Pendulum-v1", replay=replay, learning_starts=64, batch_size=16))
        return whole_run(folder, trained(ppo, "CartPole-v1"))


if __name__ == "__main__":
    for chosen in sys.argv[2:]:
        found = case(chosen, Path(sys.argv[1]) / chosen)
        print(chosen, found.total(), dict(found), flush=True)
