"""Runs with several policies in use: load_policy, evaluate, export, and weights for other runs."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import rlframe
from rlframe import evaluate, export, launch
from rlframe.agents.team import Team
from rlframe.core.errors import ConfigError
from rlframe.core.multi_agent import PolicyMap
from rlframe.core.struct import leaves, map_tree
from rlframe.core.types import AgentInputs
from rlframe.deploy.load import load_trained
from rlframe.envs.multi_agent import MultiAgentEnv
from rlframe.envs.options import EnvOptions
from rlframe.record import snapshot
from rlframe.record.snapshot import list_snapshots

simple_tag = pytest.importorskip("mpe2.simple_tag_v3")

TAG = ["env=mpe2/simple_tag_v3", "agents.map.adversary_*=pred", "agents.map.agent_*=prey", "sampler=serial"]
TAG += ["sampler.batch_T=8", "sampler.batch_B=2", "model.hidden=[8]", "runner.log_interval_steps=60"]
TAG += ["agents.policies.pred.model.memory=lstm", "agents.policies.pred.model.memory_size=8"]
TAG += [
    "algo.epochs=1",
    "algo.minibatches=1",
    "agents.policies.prey.algo=dqn",
    "agents.policies.prey.algo.batch_size=4",
]
TAG += ["agents.policies.prey.algo.learning_starts=16", "agents.policies.prey.algo.replay.size=200"]
MAP = PolicyMap({"adversary_*": "pred", "agent_*": "prey"}, policies=("pred", "prey"))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tag")
    assert launch.main([*TAG, "runner=minibatch_rl", "runner.n_steps=60", f"log_dir={folder}"]) == 0
    return folder / "run_0"


def test_a_team_policy_acts_in_pettingzoos_loop_as_the_agents_of_a_sampler_do(run: Path) -> None:
    trained = load_trained(run, "cpu")
    team, rows = trained.agent, MultiAgentEnv(simple_tag.parallel_env(), MAP, EnvOptions())
    assert isinstance(team, Team)
    state = team.initial_state([0])
    noise = map_tree(lambda x: torch.from_numpy(np.zeros_like(x)[None]), team.noise(np.random.default_rng(0), ()))
    action: Any = {"pred": torch.zeros(1, 3, dtype=torch.long), "prey": torch.zeros(1, 1, dtype=torch.long)}
    policy, env = rlframe.load_policy(run), simple_tag.parallel_env()
    seen, _ = rows.reset(seed=5)
    observations, infos = env.reset(seed=int(np.random.Generator(np.random.PCG64(5)).integers(2**31)))
    while env.agents:
        observation = map_tree(lambda x: torch.from_numpy(x.copy())[None], seen)
        first = torch.ones(1, dtype=torch.bool)
        step = team.step(AgentInputs(observation, action, torch.zeros(1), first), state, noise)
        action, state = step.action, step.state
        actions = policy.act(observations, infos)
        assert [actions[f"adversary_{i}"] for i in range(3)] == action["pred"][0].tolist()
        assert actions["agent_0"] == action["prey"][0, 0]
        seen, *_ = rows.step(map_tree(lambda x: x[0].numpy(), action))
        observations, _, _, _, infos = env.step(actions)


def test_all_policies_are_of_one_snapshot_also_where_the_run_replaces_it_meanwhile(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(run, tmp_path / "run", symlinks=True)
    old = list_snapshots(tmp_path / "run/snapshot")[-1]

    def read_and_replaced(*arguments: Any) -> Any:
        found = read(*arguments)
        if old.exists():
            old.rename(old.with_name("step_000000009999"))
        return found

    read = snapshot.read_rank_state
    monkeypatch.setattr(snapshot, "read_rank_state", read_and_replaced)
    assert load_trained(tmp_path / "run", "cpu").snapshot == old


def test_an_agent_starts_an_episode_at_a_reset_and_after_an_absence(run: Path) -> None:
    policy = rlframe.load_policy(run)
    memory = policy.of("pred").greedy.initial_state(1)["memory"]
    here, there = {"adversary_0": np.ones(16, np.float32)}, {"agent_0": np.ones(14, np.float32)}

    def memory_of(agent: str) -> Any:
        return policy._by_agent[agent]._state["memory"]

    policy.act(here)
    once = map_tree(lambda x: x.clone(), memory_of("adversary_0"))
    policy.act(here)
    assert _differ(memory_of("adversary_0"), once)
    assert _differ(once, memory)
    policy.act(there)
    policy.act(here)
    assert not _differ(memory_of("adversary_0"), once)
    policy.act(here)
    policy.reset()
    policy.act(here)
    assert not _differ(memory_of("adversary_0"), once)


def test_each_episode_explores_with_noise_of_its_own_and_a_new_policy_repeats_them(run: Path) -> None:
    def episodes() -> list[list[int]]:
        policy, found = rlframe.load_policy(run), []
        for _ in range(3):
            policy.reset()
            acts = [policy.act({"agent_0": np.zeros(14, np.float32)}, explore=True) for _ in range(20)]
            found.append([int(each["agent_0"]) for each in acts])
        return found

    first = episodes()
    assert len({tuple(each) for each in first}) == 3
    assert episodes() == first


def _differ(one: Any, other: Any) -> bool:
    return any(not torch.equal(a, b) for a, b in zip(leaves(one), leaves(other), strict=True))


def test_load_policy_by_name_takes_the_observations_of_one_agent(run: Path) -> None:
    policy = rlframe.load_policy(run, policy="prey")
    assert policy.act(np.zeros(14, np.float32)).shape == ()
    assert policy.act(np.zeros((5, 14), np.float32), explore=True).shape == (5,)
    with pytest.raises(ConfigError, match="policy=red: there is none of this name; there are pred, prey"):
        rlframe.load_policy(run, policy="red")
    with pytest.raises(ValueError, match="agent agent_7 is unknown; did you mean agent_0"):
        rlframe.load_policy(run).act({"agent_7": np.zeros(14, np.float32)})


def test_evaluate_says_what_an_agent_of_each_policy_got(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "found.json"
    assert evaluate.main([str(run), "n_episodes=2", "epsilon=0.5", f"out={out}"]) == 0
    found = json.loads(out.read_text())
    for policy in ("pred", "prey"):
        each = [episode[f"episode/{policy}/return"] for episode in found["episodes"]]
        assert found[f"eval/{policy}/return_mean"] == pytest.approx(sum(each) / 2)
    assert found["eval/return_mean"] == pytest.approx(
        3 * found["eval/pred/return_mean"] + found["eval/prey/return_mean"], abs=1e-4
    )
    assert f"; an agent's: pred {found['eval/pred/return_mean']:.1f}, prey" in capsys.readouterr().out
    assert evaluate.main([str(run), f"dataset={tmp_path / 'data'}"]) == 2
    assert "dataset=" in (said := capsys.readouterr().err)
    assert "load_policy" in said


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_export_writes_a_file_for_each_policy_or_for_one(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert export.main([str(run), f"out={tmp_path / 'all'}"]) == 0, capsys.readouterr().err
    assert sorted(path.name for path in (tmp_path / "all").iterdir()) == ["pred.pt2", "prey.pt2"]
    assert export.main([str(run), "policy=prey", f"out={tmp_path / 'one.pt2'}"]) == 0
    assert (tmp_path / "one.pt2").is_file()
    assert export.main([str(run), "policy=red", f"out={tmp_path / 'two.pt2'}"]) == 2
    assert "there are pred, prey" in capsys.readouterr().err
    assert not (tmp_path / "two.pt2").exists()


@pytest.mark.slow
def test_evaluate_and_training_film_environments_of_several_agents(run: Path, tmp_path: Path) -> None:
    pytest.importorskip("imageio_ffmpeg")
    assert evaluate.main([str(run), "n_episodes=1", f"video={tmp_path / 'films'}"]) == 0
    assert (tmp_path / "films/episode_0.mp4").stat().st_size
    words = [*TAG, "runner.n_steps=20", "eval.n_episodes=1", "eval.video_every=1", f"log_dir={tmp_path}"]
    assert launch.main(words) == 0
    assert len(list((tmp_path / "run_0/videos").glob("*.mp4"))) == 2


def test_a_policys_numbers_can_change_when_a_run_is_restored(run: Path) -> None:
    changed = "agents.policies.pred.algo.learning_rate"
    with rlframe.restore(run, n_steps=80, **{changed: 1e-5}) as restored:
        row = restored.train()
    assert row["algo/pred/learning_rate"] == pytest.approx(1e-5)
    assert row["algo/prey/learning_rate"] == pytest.approx(1e-3 * (1 - 70 / 80)), (
        "linear(1e-3,0), before the last batch"
    )
    with pytest.raises(ConfigError, match=r"algo\.learning_rate cannot change"):
        rlframe.restore(run, n_steps=80, **{"algo.learning_rate": 1e-5})
    with pytest.raises(ConfigError, match=r"has the policies pred, prey; write agents\.policies\.pred\.model"):
        rlframe.load_policy(run, **{"model.hidden": [16]})


def test_init_takes_one_of_several_policies_by_its_name(run: Path, tmp_path: Path) -> None:
    donor = shutil.copytree(run, tmp_path / "donor")
    settings = dict(word.split("=", 1) for word in TAG) | {"agents.train": "[prey]"}
    settings |= {"agents.policies.pred.init": f"{donor}:pred", "runner": "minibatch_rl"}
    with rlframe.build(n_steps=20, **settings) as made:
        made.train()
        made.save(tmp_path / "mine")
        expected = load_trained(run, "cpu").agent.state_dict()
        own = {name: x for name, x in made.agent.state_dict().items() if name.startswith("policies.pred.")}
        assert own
        assert all(torch.equal(x, expected[name]) for name, x in own.items())
    shutil.rmtree(donor)  # a trained run has its own weights
    assert rlframe.load_policy(tmp_path / "mine").policies == ("pred", "prey")
    with pytest.raises(ConfigError, match=f"policies pred, prey, and none is red; name one of them: init={run}:pred"):
        rlframe.build(n_steps=20, **{**settings, "agents.policies.pred.init": f"{run}:red"})
    with pytest.raises(ConfigError, match=r"policy pred of agent adversary_0: init=.*:prey holds another network: "):
        rlframe.build(n_steps=20, **{**settings, "agents.policies.pred.init": f"{run}:prey"})


def test_a_policy_needs_a_name_that_a_module_of_torch_may_have() -> None:
    settings = dict(word.split("=", 1) for word in TAG if "polic" not in word) | {"agents.map.agent_*": "update"}
    with pytest.raises(ConfigError, match="policy update of agent agent_0: torch cannot name a module so; rename it"):
        rlframe.build(n_steps=20, **settings)
