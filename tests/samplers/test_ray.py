"""Samplers in Ray actors: the samples of one sampler, the first to arrive, deaths, and messages without Ray or room."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from rlframe.agents import PolicyAgent
from rlframe.core.errors import ConfigError
from rlframe.envs import EnvConfig, EnvError
from rlframe.samplers import ray as on_ray
from rlframe.samplers import serial
from rlframe.system.cluster import RayOptions, check_room, connect
from tests.clusters import ray as ray
from tests.clusters import with_cluster
from tests.processes import DEADLINE_S, until
from tests.runners.resumed import log, stopped_at
from tests.samplers import faulty
from tests.samplers.faulty import Coded, Fault
from tests.samplers.made import agent_for, assert_equal, copied

CONFIG = on_ray.Config(batch_T=8, batch_B=4, cpus=0.5)
SERIAL = serial.Config(batch_T=8, batch_B=4)


def ray_address(ray: Any) -> str:
    return str(ray.get_runtime_context().gcs_address)


@contextmanager
def actors(kwargs: Any = None, config: Any = CONFIG) -> Iterator[tuple[on_ray.RayActors, PolicyAgent]]:
    made = on_ray.RayActors(config, EnvConfig(Coded, kwargs or {}, "python"), 3)
    try:
        yield made, agent_for(made.observation_space, made.action_space, 0)
    finally:
        made.close()


def kill(ray: Any, actor: Any) -> None:
    """Kill an actor, which answers until its process is gone."""

    def is_gone() -> bool:
        try:
            ray.get(actor.spaces.remote(), timeout=DEADLINE_S)
        except ray.exceptions.ActorDiedError:
            return True
        except ray.exceptions.ActorUnavailableError:
            pass
        return False

    ray.kill(actor)
    until(is_gone)


@pytest.mark.ray
@with_cluster
def test_together_they_give_the_samples_of_one_sampler(ray: Any) -> None:
    envs = SERIAL.make_envs(EnvConfig(Coded, {}, "python"), 3, ())
    with actors() as (made, agent):
        sampler, here = on_ray.RaySampler(made, agent), SERIAL.make_sampler(envs, agent, 3)
        for number in range(4):
            assert_equal(batch := copied(sampler.collect()), same := copied(here.collect()))
            assert (batch.start, batch.n_env_steps) == (8 * number, same.n_env_steps)
            with torch.no_grad():
                next(agent.parameters()).add_(0.3)
            sampler.refresh(agent)  # the next batch has them
        assert sorted(sampler.trajectories(), key=str) == sorted(here.trajectories(), key=str) != []
        assert len(sampler.state_dict()["noise"]) == 4
        for_resume = sampler.state_dict()
        assert len(sampler.load_state_dict(for_resume)) == 4
    envs.close()


@pytest.mark.ray
@with_cluster
def test_an_actor_that_is_killed_is_replaced_and_counted(ray: Any, caplog: pytest.LogCaptureFixture) -> None:
    with actors() as (made, agent):
        sampler = on_ray.RaySampler(made, agent)
        sampler.collect()
        kill(ray, made.actors[1])
        batch = sampler.collect()
        assert batch.start == 9, "a gap, so that open episodes are cut"
        assert batch.inputs.first[0, 2:].all(), "new episodes"
        assert sampler.counters()["sampler/restarts"] == 1
        kill(ray, made.actors[0])
        assert len(sampler.state_dict()["noise"]) == 4, "a snapshot does not fail by a death"
    assert "actor 1 of sampler=ray: ActorDiedError; restarted with fresh seeds" in caplog.text


@with_cluster
@pytest.mark.parametrize("of", [on_ray.RaySampler, on_ray.RayCollectors])
def test_an_actor_replaced_after_a_resume_has_other_seeds_than_one_replaced_before(ray: Any, of: Any) -> None:
    seeds, saved = [], None
    for _ in range(2):
        with actors() as (made, agent):
            sampler = of(made, agent)
            if saved is not None:
                sampler.load_state_dict(saved)
            sampler.collect()
            kill(ray, made.actors[0])
            batch = sampler.collect()
            while not sampler.counters()["sampler/restarts"] or batch.stream:
                batch = sampler.collect()
            seeds.append(batch.inputs.observation[0, 0, 0].item())
            saved = sampler.state_dict()
    assert seeds[0] != seeds[1]


@pytest.mark.ray
@with_cluster
def test_the_first_to_arrive_is_given_and_a_dead_one_is_replaced(ray: Any) -> None:
    with actors() as (made, agent):
        sampler = on_ray.RayCollectors(made, agent, 2)
        seen: dict[int, int] = {}
        while len(seen) < 2 or sum(seen.values()) < 64:  # one may have sent several before the other's first
            batch = sampler.collect()
            assert batch.start == seen.get(batch.stream, 0)
            seen[batch.stream] = batch.start + 8
        kill(ray, made.actors[0])
        while not sampler.counters()["sampler/restarts"]:
            sampler.collect()
        while sampler.collect().stream != 0:
            pass
        assert sampler.counters()["sampler/restarts"] == 1
        assert sampler.batch_spec == (8, 2, 2)


@with_cluster
def test_an_error_of_an_environment_is_raised_as_it_was(ray: Any) -> None:
    with actors({"faults": (Fault(faulty.diverge, at=9),)}) as (made, agent):
        sampler = on_ray.RaySampler(made, agent)
        sampler.collect()
        with pytest.raises(EnvError, match="the simulator diverged"):
            sampler.collect()


@with_cluster
def test_an_error_of_a_constructor_is_raised_as_it_was(ray: Any) -> None:
    fault = Fault(faulty.diverge, "constructor")
    with pytest.raises(EnvError, match="the simulator diverged"), actors({"faults": (fault,)}):
        pass


@with_cluster
def test_actors_that_die_before_the_first_batch_are_replaced(ray: Any, tmp_path: Path) -> None:
    fault = Fault(faulty.kill, "constructor", path=str(tmp_path / "fault"))
    with actors({"faults": (fault,)}) as (made, agent):
        assert made.restarts.n == 1
        kill(ray, made.actors[1])
        sampler = on_ray.RaySampler(made, agent)
        assert copied(sampler.collect()).valid.any()
        assert sampler.counters()["sampler/restarts"] == 2


@with_cluster
def test_wishes_beyond_the_cluster_are_refused_with_both_numbers(ray: Any) -> None:
    with pytest.raises(ConfigError, match=r"wants 8 CPUs of the Ray cluster, which has 2"):
        check_room(4, 2.0, "sampler.n_samplers=4")


def test_more_memory_for_objects_than_half_of_the_machine_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlframe.system.cluster.imported", lambda: SimpleNamespace(is_initialized=lambda: False))
    with pytest.raises(ConfigError, match=r"object_store_gb=1e\+06 for each of ray.fake_nodes=2 is more than half"):
        connect(RayOptions(object_store_gb=1e6, fake_nodes=2))


def test_without_ray_one_line_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match=r'pip install "rlframe\[ray\]"'):
        connect(RayOptions())


RUN = (
    "env=CartPole-v1 sampler=ray sampler.cpus=0.5 sampler.batch_B=4 model.hidden=[8] eval.n_episodes=1 eval.n_envs=1 "
    "eval.n_workers=0 runner.n_steps=640 runner.log_interval_steps=160"
)


def test_an_address_at_which_nothing_answers_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pytest.importorskip("ray"), "is_initialized", lambda: False)
    with pytest.raises(ConfigError, match=r"no Ray cluster at ray.address=127.0.0.1:9: .*refused"):
        connect(RayOptions(address="127.0.0.1:9"))


@with_cluster
def test_pretended_nodes_and_a_running_cluster_give_the_samples_of_this_machines(ray: Any, tmp_path: Path) -> None:
    rows = []
    ways = (["ray.num_cpus=1", "ray.fake_nodes=2"], ["ray.num_cpus=2"], [f"ray.address={ray_address(ray)}"])
    for i, given in enumerate(ways):
        command = [sys.executable, "-m", "rlframe.launch", "algo=ppo", *RUN.split(), "sampler.cpus=0.1", *given]
        words_ = {word.partition("=")[0]: word for word in command[3:]}
        run = [*command[:3], *words_.values(), "compile=false", "affinity=none", f"log_dir={tmp_path / str(i)}"]
        subprocess.run(run, check=True, stdout=subprocess.DEVNULL)
        rows.append(log(tmp_path / str(i) / "run_0")[-1])
    assert rows[0] == rows[1] == rows[2]


def test_a_number_that_does_not_divide_is_refused() -> None:
    with pytest.raises(ConfigError, match="n_samplers=3 must divide sampler"):
        on_ray.Config(batch_B=4, n_samplers=3).part_of()


@with_cluster
@pytest.mark.parametrize(
    "case",
    [
        "algo=ppo sampler.batch_T=16 algo.minibatches=2",
        "algo=ppo sampler.batch_T=16 algo.minibatches=2 runner=async_rl",
        pytest.param(
            "algo=dqn sampler.batch_T=4 algo.learning_starts=80 algo.replay_ratio=1 algo.batch_size=8 runner=async_rl",
            marks=pytest.mark.ray,
        ),
        "algo=ppo sampler.batch_T=16 sampler.inner=cpu sampler.inner.n_workers=1",
    ],
)
def test_a_run_learns_is_stopped_and_goes_on(
    ray: Any, case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped_at(200, f"{case} {RUN}", tmp_path, monkeypatch)
    row = log(tmp_path / "run_0")[-1]
    assert int(row["env_steps"]) >= 640
    assert int(row["updates"]) > 4
    assert float(row["sampler/restarts"]) == 0


@with_cluster
def test_nothing_is_left_of_a_run_that_is_killed(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    command = [sys.executable, "-m", "rlframe.launch", "algo=ppo", *RUN.replace("=640", "=10_000_000").split()]
    given = [*command, "compile=false", "affinity=none", f"log_dir={tmp_path}"]
    process = subprocess.Popen(given, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    log_file = tmp_path / "run_0/progress.csv"
    until(lambda: log_file.is_file() and len(log_file.read_text().splitlines()) > 2)
    family = psutil.Process(process.pid).children(recursive=True)
    assert any("raylet" in " ".join(each.cmdline()) for each in family)
    process.kill()
    process.wait()
    _, left = psutil.wait_procs(family, timeout=10.0)
    assert left == []
