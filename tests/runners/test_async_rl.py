"""AsyncRl: every batch learned once and in order, ratios held, and what happens when a process dies or hangs."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from rlframe.algos import a2c, appo, ddpg, dqn, impala, ppo, pqn, r2d1, sac, td3
from rlframe.algos.base import Algorithm
from rlframe.core.errors import ConfigError, Interrupted
from rlframe.core.types import Samples
from rlframe.envs import EnvConfig, EnvError
from rlframe.evaluation import EvalConfig, Evaluator
from rlframe.exploration import EpsilonConfig
from rlframe.launch import main
from rlframe.models import ModelConfig
from rlframe.record import logger_context
from rlframe.record.snapshot import load_snapshot, resolve_snapshot
from rlframe.replay import InMemory
from rlframe.rewards import rewards_for
from rlframe.runners import AsyncRl, AsyncRlConfig, Learner, MinibatchRl, RunnerConfig
from rlframe.runners.learner import Learners
from rlframe.samplers import BackgroundProcess, BackgroundSampler, serial
from rlframe.system.service import Supervision
from rlframe.updates.progress import Progress
from tests.processes import DEADLINE_S, descendants, is_running, launched, until
from tests.samplers import faulty
from tests.samplers.faulty import Coded, Fault, HangsAfter
from tests.tables import read_csv
from tests.variants import variants

SLOW = pytest.mark.slow
SERIAL = serial.Config(batch_T=8, batch_B=4)
EVAL = EvalConfig(n_envs=2, n_episodes=2)
PENDULUM = EnvConfig("Pendulum-v1", backend="python")


@contextmanager
def runner_for(
    config: Any,
    env: EnvConfig = PENDULUM,
    n_steps: int = 640,
    sampling: Any = SERIAL,
    n_slots: int = 2,
    sampler_waits: bool = False,
    **model: Any,
) -> Iterator[AsyncRl]:
    """A runner that trains `config`; at the end its processes have exited."""
    process = BackgroundProcess(sampling, env, supervision=Supervision(90.0, 9, name="sampler"))
    try:
        agent = config.make_agent(process.observation_space, process.action_space, ModelConfig(hidden=(8,), **model), 0)
        sampler = BackgroundSampler(process, agent, n_slots)
        algo = config.make_algorithm(agent, sampler.batch_spec, n_steps, 0)
        eval_env = EnvConfig(env.id, {}, "python")
        evaluator = Evaluator(eval_env, agent, EVAL)
        options = AsyncRlConfig(n_steps=n_steps, log_interval_steps=n_steps // 2, sampler_waits=sampler_waits)
        with AsyncRl(sampler, Learner(agent, algo, rewards_for(sampler, algo)), options, evaluator) as runner:
            yield runner
    finally:
        process.close()
        until(lambda: not is_running(process.child.pid))


class Recorder(Algorithm):
    """Learns nothing; keeps the observations of its batches, and an update takes `pace_s`."""

    def __init__(self, pace_s: float = 0.0, n_due: int = 1) -> None:
        self.progress, self.pace_s, self.n_due = Progress(), pace_s, n_due
        self.due = 0
        self.received: list[torch.Tensor] = []
        self.learned = 0

    def receive(self, samples: Samples) -> None:
        self.progress.count(samples)
        self.received.append(samples.inputs.observation.clone())
        self.due += self.n_due

    def updates_due(self) -> int:
        return self.due

    def update(self) -> dict[str, float]:
        time.sleep(self.pace_s)
        self.due -= 1
        self.learned += 1
        self.progress.updates += 1
        return {}

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Any) -> None:
        """Nothing."""


@contextmanager
def recorded(algo: Recorder, n_steps: int, **options: Any) -> Iterator[AsyncRl]:
    """A runner of Recorder on Coded environments."""
    with runner_for(a2c.Config(), EnvConfig(Coded, {}, "python"), n_steps, **options) as runner:
        runner.learners = Learners(Learner(runner.agent, algo))
        yield runner


@pytest.mark.parametrize("pace_s", [0.0, 0.02])
def test_batches_are_learned_once_each_and_in_order(pace_s: float) -> None:
    algo = Recorder(pace_s)
    with recorded(algo, 1_000) as runner:
        row = runner.train()
    assert algo.learned == len(algo.received) == row["updates"]
    for one, other in zip(algo.received, algo.received[1:], strict=False):
        torch.testing.assert_close(other[0], one[-1])  # each goes on where the one before ended
    assert row["async/staleness_max"] <= 2


def test_with_a_slow_learner_batches_wait_and_are_one_update_stale() -> None:
    with recorded(Recorder(0.05), 640) as runner:
        row = runner.train()
    assert row["async/queue_mean"] > 0.5
    assert 0.5 < row["async/staleness_mean"] <= 1.0
    assert row["time/fraction_sampler_waiting"] > 0.3


@pytest.mark.parametrize(("waits", "pace_s", "n_steps"), [(True, 0.002, 640), (False, 0.02, 320)])
def test_a_slow_learner_receives_batches_while_updates_are_due_unless_the_sampler_waits(
    waits: bool, pace_s: float, n_steps: int
) -> None:
    algo = Recorder(pace_s, n_due=5)
    with recorded(algo, n_steps, sampler_waits=waits) as runner:
        receive, due = algo.receive, []
        algo.receive = lambda samples: (due.append(algo.due), receive(samples))[1]  # type: ignore[method-assign]
        runner.train()
    assert (max(due) == 0) == waits
    assert algo.learned == 5 * len(algo.received), "the last updates are made at the end"


def test_beside_a_learner_from_replay_an_on_policy_learner_loses_no_batch() -> None:
    replay = Recorder(0.005, n_due=5)
    with recorded(replay, 640, n_slots=8) as runner:
        algo = a2c.Config().make_algorithm(runner.agent, runner.sampler.batch_spec, 640)
        runner.learners = Learners({"a": Learner(runner.agent, algo), "b": Learner(runner.agent, replay)})
        collect, receive, waiting = runner.sampler.collect, algo.receive, []
        runner.sampler.collect = lambda: dict.fromkeys("ab", collect())  # type: ignore[assignment,method-assign,return-value]
        algo.receive = lambda samples: (waiting.extend(algo.samples), receive(samples))[1]  # type: ignore[method-assign]
        runner.train()
    assert not waiting
    assert algo.progress.updates == len(replay.received) >= 20


REPLAY: dict[str, Any] = {"replay": InMemory(size=2_000), "learning_starts": 64, "batch_size": 16}
RATIO = 2.0
OFF_POLICY: dict[str, Any] = {
    "dqn": (dqn, "CartPole-v1", {}),
    "r2d1": (r2d1, "CartPole-v1", {"batch_size": 4, "burn_in": 2, "learn_T": 6}),
    "sac": (sac, "Pendulum-v1", {}),
    "td3": (td3, "Pendulum-v1", {}),
    "ddpg": (ddpg, "Pendulum-v1", {"prioritized": True}),
}


@pytest.mark.parametrize("name", variants(OFF_POLICY, ("dqn", "r2d1")))  # sac: below, with a kill
def test_the_replay_ratio_is_exact_if_sampling_waits(name: str) -> None:
    module, env, settings = OFF_POLICY[name]
    config = module.Config(**{**REPLAY, "replay_ratio": RATIO, **settings})
    model = {"memory": "lstm", "memory_size": 4} if name == "r2d1" else {}
    with runner_for(config, EnvConfig(env, backend="python"), sampler_waits=True, **model) as runner:
        row = runner.train()
    assert row["replay/ratio"] == pytest.approx(RATIO, rel=0.05)
    assert "replay/dropped_updates" not in row
    assert all(bool(parameter.isfinite().all()) for parameter in runner.agent.parameters())


def test_the_replay_ratio_is_an_upper_bound_if_sampling_does_not_wait_and_lost_updates_are_counted() -> None:
    config = sac.Config(**{**REPLAY, "batch_size": 64}, replay_ratio=64.0)
    with runner_for(config, n_steps=500) as runner:  # an update per env step; it takes much longer than the step
        row = runner.train()
    assert 0 < row["replay/ratio"] < 64.0
    owed = row["env_steps"] - 64
    assert row["updates"] + row["replay/dropped_updates"] == pytest.approx(owed, abs=1.0)


ON_POLICY = {
    "a2c": a2c.Config(),
    "ppo": ppo.Config(minibatches=2, epochs=2),
    "impala": impala.Config(),
    "appo": appo.Config(),
    "pqn": pqn.Config(minibatches=2, epochs=2),
}


@pytest.mark.parametrize(
    "name", ["impala", *(pytest.param(name, marks=SLOW) for name in ("ppo", "a2c", "appo", "pqn"))]
)
def test_algorithms_without_replay_learn_from_each_batch(name: str) -> None:
    env = EnvConfig("CartPole-v1", backend="python") if name == "pqn" else PENDULUM
    with runner_for(ON_POLICY[name], env, memory="gru", memory_size=4) as runner:
        before = [parameter.clone() for parameter in runner.agent.parameters()]
        row = runner.train()
        assert any(not torch.equal(a, b) for a, b in zip(before, runner.agent.parameters(), strict=True))
    assert row["env_steps"] >= 640
    assert row["eval/n_episodes"] == 2
    assert row["async/staleness_max"] >= row["async/staleness_mean"] >= 0


def test_parameters_and_exploration_reach_the_sampler() -> None:
    config = dqn.Config(**REPLAY, explore=EpsilonConfig(epsilon="linear(0,1,0.02)"))
    with runner_for(config, EnvConfig("CartPole-v1", backend="python"), sampler_waits=True) as runner:
        runner.train()
        samples = runner.sampler.collect()
        while runner.sampler.version < runner.sampler.posted_version:
            samples = runner.sampler.collect()
        q, _ = runner.agent(samples.inputs[:-1], ())
        torch.testing.assert_close(samples.info.q, q.squeeze(-1).detach(), rtol=1e-4, atol=1e-4)  # type: ignore[attr-defined]
        assert (samples.action != q.squeeze(-1).argmax(-1)).any(), "all are random by now, and none was at first"


def test_a_killed_sampler_is_replaced_and_training_continues() -> None:
    with runner_for(sac.Config(**REPLAY, replay_ratio=RATIO), sampler_waits=True) as runner:
        update, killed = runner.algo.update, []

        def kill_once() -> Any:
            if not killed and runner.env_steps > 300:
                killed.append(runner.sampler.process.child.pid)
                os.kill(killed[0], signal.SIGKILL)
            return update()

        runner.algo.update = kill_once  # type: ignore[method-assign]
        row = runner.train()
    assert row["env_steps"] >= 640
    assert row["sampler/restarts"] == 1
    assert row["replay/ratio"] == pytest.approx(RATIO, rel=0.05)


def test_an_error_in_an_environment_ends_the_run_after_a_snapshot(tmp_path: Path) -> None:
    env = EnvConfig(Coded, {"faults": (Fault(faulty.diverge, at=30),)}, "python")
    with (
        pytest.raises(EnvError, match="the simulator diverged") as caught,
        logger_context(tmp_path, console=False) as run,
        runner_for(a2c.Config(), env, 10_000) as runner,
    ):
        runner.train()
    assert "in diverge" in str(caught.value.__cause__)
    state, meta = load_snapshot(resolve_snapshot(run.directory))
    assert 0 < meta["env_steps"] < 140
    for name, value in runner.agent.state_dict().items():
        assert (state["agent"][name] == value).all()


@pytest.mark.parametrize("of_the_next_process", [False, True])
def test_a_stop_does_not_wait_for_a_batch_that_does_not_come(of_the_next_process: bool, tmp_path: Path) -> None:
    path = str(tmp_path / "died")
    what = Fault(faulty.kill, at=30, path=path) if of_the_next_process else Fault(faulty.hang_in_python, at=30)
    env = EnvConfig(HangsAfter, {"faults": (what,), "path": f"{path}.0"}, "python")
    with logger_context(tmp_path, console=False) as run, runner_for(a2c.Config(), env, 10_000) as runner:
        waited, waits = runner.sampler.wait, []

        def stop_at_last() -> bool:
            waits.append(came := waited())
            if True in waits and waits[-3:] == [False] * 3:
                os.kill(os.getpid(), signal.SIGTERM)
            return came

        runner.sampler.wait = stop_at_last  # type: ignore[method-assign]
        with pytest.raises(Interrupted, match="snapshot written"):
            runner.train()
        assert runner.sampler.counters()["sampler/restarts"] == of_the_next_process
    assert 0 < load_snapshot(resolve_snapshot(run.directory))[1]["env_steps"] == runner.env_steps < 140


def test_a_run_is_resumed_and_also_by_another_runner(tmp_path: Path) -> None:
    config = sac.Config(**{**REPLAY, "replay_ratio": RATIO})
    with runner_for(config, n_steps=320, sampler_waits=True) as runner:
        runner.train()
        state = runner.state_dict()
    with runner_for(config, n_steps=640, sampler_waits=True) as other:
        other.load_state_dict(state)
        assert other.env_steps == runner.env_steps
        row = other.train()
    assert row["env_steps"] >= 640
    assert row["replay/ratio"] == pytest.approx(RATIO, rel=0.05)
    envs = SERIAL.make_envs(PENDULUM, 0, ())
    agent = config.make_agent(envs.observation_space, envs.action_space, ModelConfig(hidden=(8,)), 0)
    sampler = SERIAL.make_sampler(envs, agent, 0)
    algo = config.make_algorithm(agent, sampler.batch_spec, 640, 0)
    options = RunnerConfig(n_steps=640, log_interval_steps=320)
    with MinibatchRl(sampler, Learner(agent, algo), options, Evaluator(PENDULUM, agent, EVAL)) as third:
        third.load_state_dict(state)
        assert third.train()["env_steps"] >= 640


def test_a_sampler_of_this_process_is_refused() -> None:
    envs = SERIAL.make_envs(PENDULUM, 0, ())
    config = a2c.Config()
    agent = config.make_agent(envs.observation_space, envs.action_space, ModelConfig(), 0)
    sampler = SERIAL.make_sampler(envs, agent, 0)
    evaluator = Evaluator(PENDULUM, agent, EVAL)
    learner = Learner(agent, config.make_algorithm(agent, sampler.batch_spec, 10, 0))
    with pytest.raises(ConfigError, match=r"AsyncRl needs a sampler that collects ahead.*got SerialSampler"):
        AsyncRl(sampler, learner, AsyncRlConfig(n_steps=10), evaluator)
    evaluator.close()
    sampler.close()


WORDS = ["runner=async_rl", "env=Pendulum-v1", "algo=a2c", "sampler.batch_T=8", "sampler.batch_B=4", "eval.n_envs=2"]
WORDS += ["eval.n_episodes=2", "eval.n_workers=0", "runner.log_interval_steps=256", "affinity=none"]
TWO = ["sampler=gpu", "sampler.n_workers=2"]


@pytest.mark.quick
def test_launch_trains_and_resumes_and_prints_the_cores_of_each_process(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*WORDS, "sampler=serial"]
    assert main([*words, "runner.n_steps=512", f"log_dir={tmp_path}"]) == 0
    run = tmp_path / "run_0"
    assert "in a background process" in (run / "debug.log").read_text()
    header, _ = read_csv(run / "progress.csv")
    assert {"async/staleness_mean", "async/queue_mean", "time/fraction_sampler_waiting"} <= set(header)
    assert main([f"resume={run}", "runner.n_steps=1024"]) == 0
    assert int(float(read_csv(run / "progress.csv")[1][-1]["env_steps"])) >= 1024
    capsys.readouterr()
    assert main([*words, "dry_run=true"]) == 0
    printed = capsys.readouterr().out
    for line in ("sampler  not pinned", "main          learns on cpu", "sampler       steps and acts; 2 slots"):
        assert line in printed


@SLOW
@pytest.mark.parametrize("how", [["sampler=serial"], TWO])
def test_all_processes_end_when_the_learner_is_killed(how: list[str], tmp_path: Path) -> None:
    with launched(tmp_path, *WORDS, *how, "runner.n_steps=1e8") as process:
        children = descendants(process.pid)
        assert len(children) >= 2
        process.kill()
        until(lambda: not any(map(is_running, children)))


@pytest.mark.parametrize("signum", [pytest.param(signal.SIGINT, marks=SLOW), signal.SIGTERM])
def test_a_signal_to_all_ends_the_run_in_order(signum: int, tmp_path: Path) -> None:
    with launched(tmp_path, *WORDS, *TWO, "runner.n_steps=1e8") as process:
        children = descendants(process.pid)
        os.killpg(process.pid, signum)
        output, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 128 + signum, output
    assert "Traceback" not in output
    assert "leaked" not in output
    assert "restart" not in output
    assert load_snapshot(resolve_snapshot(tmp_path / "run_0"))[1]["env_steps"] > 0
    until(lambda: not any(map(is_running, children)))


def test_impossible_settings_are_refused_with_their_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    for word, said in [
        ("runner.n_slots=0", "runner.n_slots=0 must be from 1 to 4096"),
        ("runner.sampler_timeout_s=0", "runner.sampler_timeout_s=0.0 must be above 0"),
    ]:
        assert main([*WORDS, word]) == 2
        assert said in capsys.readouterr().err
