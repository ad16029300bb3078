"""The script that test_orphans runs: it steps environments in workers, without torch, and ends in the given way."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path

from rlframe.envs import EnvConfig
from rlframe.rollout.buffer import empty_rows
from rlframe.rollout.stepper import worker_steppers
from rlframe.rollout.worker_pool import WorkerPool
from rlframe.system.service import Supervision
from rlframe.system.shared import share_zeros
from rlframe.system.signals import stop_request
from tests.samplers import faulty

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs begin with it ignored
method, what, path, ending = sys.argv[1:]
known = (faulty.hang_in_c, faulty.hang_in_python, faulty.stop, faulty.start_program)
acts = {each.__name__: each for each in known}
faults = (faulty.Fault(acts[what], path=path),) if what in acts else ()
supervision = Supervision(60.0, 9, method)
envs = WorkerPool(EnvConfig(faulty.Coded, {"faults": faults}, "python"), 4, [1, 2, 3, 4], 2, (), supervision)
rows = share_zeros(empty_rows(envs.observation_space, envs.action_space, 8, 4), "rows")
(stepper,) = worker_steppers(envs, rows, 1)


def step(n_rounds: int) -> None:
    """Step every environment 8 times per round."""
    for _ in range(n_rounds):
        for t in range(8):
            stepper.start_step(t)
            stepper.finish_step(t)


def work_for_a_while() -> None:
    """Step, or make a worker hang without waiting for it."""
    if not faults:
        step(10)
        return
    stepper.start_step(0)
    while not Path(f"{path}.0").exists():
        time.sleep(0.005)


print(*[worker.child.pid for worker in envs.workers], flush=True)
match ending:
    case "raise":
        work_for_a_while()
        raise ValueError("enough")
    case "exit":
        work_for_a_while()
        sys.exit(5)
    case "leave":
        work_for_a_while()
    case "close":
        try:
            step(10**9)
        finally:
            print("closing", flush=True)
            envs.close()
    case "stop":
        with stop_request() as stop:
            print("ready", flush=True)
            while not stop:
                step(1)
            step(100)
        print(f"{envs.restarts} restarts", flush=True)
    case "endless":
        step(1 if not faults else 0)
        print("ready", flush=True)
        step(10**9)
    case "many":
        step(2000)
        print(f"{envs.restarts} restarts", flush=True)
