"""Kill runs at random moments and resume them: log and last snapshot equal those of a run that was not killed.

All cases with 30 kills each: pytest -m slow tests/runners/test_kill_resume.py; KILLS=N sets another number.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from subprocess import DEVNULL

import numpy as np
import pytest

from rlframe import launch
from tests.fork_server import Popen
from tests.processes import DEADLINE_S, until
from tests.runners.resumed import TRUST, assert_runs_equal, words

N_KILLS = int(os.environ.get("KILLS", "30"))
ROWS = max(24, N_KILLS)
ENVS = {
    "cartpole": "env=CartPole-v1",
    "pendulum": "env=Pendulum-v1 env_kwargs.max_episode_steps=60",
    "cheetah": "env=HalfCheetah-v5 env_backend=python env_kwargs.max_episode_steps=60",
    "pong": "env=ALE/Pong-v5 env_backend=python env_kwargs.obs_type=ram env_kwargs.max_episode_steps=60",
    "tag": "env=mpe2/simple_tag_v3",
    "connect_four": "env=classic/connect_four_v3",
}
ON_POLICY, REPLAY = (
    "sampler.batch_T=16 sampler.batch_B=4",
    "sampler.batch_T=4 sampler.batch_B=4 algo.learning_starts=100",
)
ALGOS = {
    "ppo": f"algo=ppo algo.epochs=2 algo.minibatches=2 model.hidden=[16] {ON_POLICY}",
    "ppo_lstm": f"algo=ppo algo.minibatches=4 model.memory=lstm model.memory_size=16 {ON_POLICY}",
    "dqn": f"algo=dqn algo.prioritized=true algo.batch_size=16 {REPLAY}",
    "r2d1": f"algo=r2d1 algo.batch_size=4 algo.burn_in=4 algo.learn_T=8 model.memory=lstm {REPLAY}",
    "sac": f"algo=sac algo.batch_size=16 algo.replay_ratio=2 model.hidden=[16] {REPLAY}",
    "ppo_and_dqn": f"algo=ppo agents.map.adversary_*=pred agents.map.agent_*=prey model.hidden=[16] {ON_POLICY} "
    "agents.policies.prey.algo=dqn agents.policies.prey.algo.learning_starts=100 "
    "agents.policies.prey.algo.batch_size=16 agents.policies.prey.algo.replay_ratio=1",
    "ppo_compiled": f"algo=ppo compile=true model.hidden=[16] {ON_POLICY}",
    "sac_compiled": f"algo=sac compile=true algo.batch_size=16 algo.replay_ratio=2 model.hidden=[16] {REPLAY}",
}
SAMPLERS = {"serial": "sampler=serial", "cpu": "sampler=cpu sampler.n_workers=2"}
CASES = [
    *(f"{algo}-cartpole-{sampler}" for algo in ("ppo", "ppo_lstm", "dqn", "r2d1") for sampler in SAMPLERS),
    *(
        f"{algo}-{env}-{sampler}"
        for algo in ("ppo", "ppo_lstm", "sac")
        for env in ("pendulum", "cheetah")
        for sampler in SAMPLERS
    ),
    "ppo-pong-serial",
    "dqn-pong-serial",
    "ppo_and_dqn-tag-serial",
    "ppo_and_dqn-tag-cpu",
    "ppo-connect_four-serial",
    "ppo-connect_four-cpu",
    "ppo_compiled-cartpole-serial",
    "sac_compiled-pendulum-cpu",
]


def line(case: str, interval: int = 200, rows: int = ROWS) -> str:
    """The command line of a case, for so many rows of the log."""
    algo, env, sampler = case.split("-")
    length = f"runner.log_interval_steps={interval} runner.n_steps={interval * rows} eval.n_episodes=2 eval.n_envs=2"
    return f"{ALGOS[algo]} {ENVS[env]} {SAMPLERS[sampler]} {length} eval.n_workers=0"


def start_words(command: str, directory: Path) -> list[str]:
    """The command line that starts the run, or resumes it."""
    run = directory / "run_0"
    if (run / "params.json").is_file():
        return [f"resume={run}", TRUST]
    shutil.rmtree(run, ignore_errors=True)  # it was killed before it had a config
    return words(command, directory)


def kill_within(command: str, directory: Path, seconds: float) -> bool:
    """Start or resume the run and kill it some seconds after its first log line; False if it ended before."""
    log = directory / "run_0" / "debug.log"
    size = log.stat().st_size if log.exists() else 0
    arguments = [sys.executable, "-m", "rlframe.launch", *start_words(command, directory)]
    with Popen(arguments, stdout=DEVNULL, start_new_session=True) as process:
        until(lambda: process.poll() is not None or (log.exists() and log.stat().st_size > size), 4 * DEADLINE_S)
        time.sleep(seconds)  # a random moment
        ended = process.poll()
        with suppress(ProcessLookupError):  # it may have ended
            os.killpg(process.pid, signal.SIGKILL)
    assert ended in (None, 0), "it failed without being killed"
    return ended is None


def compare_with_kills(command: str, directory: Path, n_kills: int, seconds: float, seed: int) -> None:
    """Train once without and once with kills, each at a random moment up to `seconds` after a start, and compare."""
    assert launch.main(words(command, directory / "whole")) == 0
    rng = np.random.default_rng(seed)
    killed = [kill_within(command, directory / "killed", rng.uniform(0, seconds)) for _ in range(n_kills)]
    assert any(killed)
    assert launch.main(start_words(command, directory / "killed")) == 0
    assert_runs_equal(directory / "whole/run_0", directory / "killed/run_0")


def test_a_run_that_was_killed_twice_equals_one_that_was_not(tmp_path: Path) -> None:
    """6 s: two processes are started and killed."""
    compare_with_kills(line("ppo-cartpole-serial", rows=8), tmp_path, 2, 0.2, 0)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("case", CASES)
def test_a_run_that_was_killed_often_equals_one_that_was_not(case: str, tmp_path: Path) -> None:
    pytest.importorskip("pettingzoo" if any(name in case for name in ("tag", "connect_four")) else "torch")
    pytest.importorskip("mujoco" if "cheetah" in case else "ale_py" if "pong" in case else "torch")
    start = time.monotonic()
    command = line(case)
    assert launch.main(words(command, tmp_path / "timed")) == 0
    seconds = 3 * (time.monotonic() - start) / ROWS  # each attempt gets one or two rows further
    seconds += 3 * ("compiled" in case)  # in which torch's compiler is imported
    compare_with_kills(command, tmp_path, N_KILLS, seconds, sum(map(ord, case)))
