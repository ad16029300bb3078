"""Run directories from other people: their content is read, and no code that they name is run without trust."""

import json
import math
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from rlframe import evaluate, launch, plot
from rlframe.core.errors import ConfigError
from rlframe.experiment.settings import from_flat, to_flat
from rlframe.experiment.trust import check_network, check_trusted, foreign, read_config
from rlframe.record.snapshot import load_snapshot, resolve_snapshot, save_snapshot, self_hash


def rewrite(run: Path, **changes: Any) -> None:
    params = json.loads((run / "params.json").read_text())
    params["config"] |= {key.replace("__", "."): value for key, value in changes.items()}
    (run / "params.json").write_text(json.dumps(params))


EVIL: list[dict[str, Any]] = [
    {"algo": "evil.algo"},
    {"algo": "./evil.py"},
    {"runner": "os.path"},
    {"sampler": "/tmp/evil.py"},
    {"model__encoder": "evil:Encoder"},
    {"model__encoder": "./evil.py:Encoder"},
    {"env": "evil:CartPole-v1"},
    {"env": "evil:make"},
    {"env": "os:system", "env_kwargs.command": "touch x"},
    {"env.wrappers": ["rlframe.envs.wrappers:find_attribute"]},
    {"env.wrappers": "[rlframe.envs.wrappers:ActionMaskFromInfo,os:system]"},
    {"env": "rlframe.core.parts:find_module", "env_kwargs.name": "evil.evil"},
    {"env": "rlframe.envs.debug_envs:action_parts"},
    {"eval.env": "rlframe.envs.debug_envs:nearest"},
    {"env_kwargs": {"xml_file": "/tmp/evil.xml"}},
    {"env_kwargs": {"xml_file": "./evil.xml"}},
    {"env_kwargs.env_id": "evil:CartPole-v1"},
    {"eval.env_kwargs": {"deep": [{"x": "evil:call"}]}},
    {"env_kwargs.x": "{a: 'evil:call'}"},
    {"threads": "os:getpid"},
    {"threads": "lambda: 1"},
    {"algo__learning_rate": "evil.thing"},
    {"model": "rlframe.models:ModelConfig"},
    {"model": "choose_device"},
    {"algo__replay": "./mine.py:Mine"},
    {"...encoder": "evil:Encoder"},
    {"model__hidden": [100_000, 100_000]},
    {"model__hidden": "[100000,100000]"},
    {"model__memory": "lstm", "model__memory_size": 10**6},
    {"model__action_embedding": 10**6},
    {"model__hidden": [1] * 1_000},
    {"model__memory": "transformer", "model__memory_size": 10**4},
    {"model__memory": "transformer", "model__memory_layers": 10**6},
    {"model__channels": [10_000, 10_000]},
    {"model__channels": [1_000, 1_000], "model__kernels": [3, 100]},
    {"model__kernels": [1] * 1_000},
    {"model__distribution": "evil:Own"},
    {"sampler.batch_B": 10**9},
    {"sampler.batch_T": "1e12"},
    {"eval.n_envs": 10**9},
    {"threads": 10**9},
    {"agents.map_function": "evil:policy_of"},
    {"agents.map": "evil:policy_of"},
    {"agents.map.red_*": "evil:red"},
    {"agents.global_state": "evil:state"},
    {"agents.policies.red.algo": "evil.algo"},
    {"agents.policies.red.model.encoder": "evil:Encoder"},
    {"agents.policies.red.model.hidden": [1] * 1_000},
    {f"agents.policies.p{i}.algo": "ppo" for i in range(2_000)},
    {"env_kwargs": "[" * 5_000},
    {"env_kwargs.x": "{a: &a [1, 1], b: &b [*a, *a], c: [*b, *b]}"},
    {"env_kwargs.x": "[" + "1, " * 5_000 + "]"},
]


@pytest.mark.parametrize("changes", EVIL, ids=lambda changes: str(changes)[:100])
def test_foreign_entries_are_named_and_refused_unless_trusted(
    run: Path, changes: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    rewrite(run, **changes)
    with pytest.raises(ConfigError, match="trust=true") as caught:
        read_config(run / "params.json", trust=False)
    key = re.escape(next(iter(changes)).replace("__", "."))
    too_large = r"model\.\*: at least|agents\.policies\.\*: 2,000"
    assert re.search(rf"(rlframe: |, )({key}=|{too_large})", str(caught.value))
    assert read_config(run / "params.json", trust=True)


def test_what_is_given_in_the_place_of_foreign_entries_leaves_nothing_to_trust(run: Path) -> None:
    rewrite(run, env="evil:make", callbacks=["evil:call"])
    with pytest.raises(ConfigError, match=r"not part of rlframe: callbacks=\['evil:call'\]; if you"):
        read_config(run / "params.json", False, {"env": "CartPole-v1"})
    rewrite(run, callbacks=[])
    read_config(run / "params.json", False, {"env": "CartPole-v1"})
    assert evaluate.main([str(run), "env=CartPole-v1", "n_episodes=1"]) == 0


def test_auto_leaves_what_is_recorded_in_its_place_and_is_refused(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (run.parent / "evil.py").write_text("raise SystemExit('evil code ran')")
    monkeypatch.chdir(run.parent)
    for changes in ({"sampler": "./evil.py"}, {"sampler": "cpu", "sampler.n_workers": 10**6}):
        rewrite(run, **changes)
        assert launch.main([f"resume={run}", *(f"{key}=auto" for key in changes)]) == 2
        assert "add trust=true" in capsys.readouterr().err


def test_the_weights_of_all_policies_count() -> None:
    one = {"agents.policies.red.model.hidden": [10_000, 10_000]}
    two = {f"agents.policies.{name}.model.hidden": [12_000, 12_000] for name in ("red", "blue")}
    assert not foreign(one)
    assert foreign(two) == ["model.*: at least 288,048,000 weights"]
    with pytest.raises(ConfigError, match="holds another network: 0 weights, and the config at least 288,048,000"):
        check_network(two, {}, "here")


@pytest.mark.parametrize("command", ["evaluate", "resume", "again"])
def test_every_command_refuses_foreign_code_before_importing_it(
    run: Path, command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = run.parent / "ran"
    name = f"evil_{command}.py"
    (run.parent / name).write_text(f"import pathlib\npathlib.Path({str(mark)!r}).touch()")
    monkeypatch.chdir(run.parent)
    rewrite(run, algo=f"./{name}")
    main, words = {
        "evaluate": (evaluate.main, [str(run)]),
        "resume": (launch.main, [f"resume={run}"]),
        "again": (launch.main, [f"experiment={run}/params.json", "log_dir=elsewhere"]),
    }[command]
    assert main(words) == 2
    assert f"algo=./{name}" in capsys.readouterr().err
    assert not mark.exists()
    assert main([*words, "trust=true"]) == 2  # imported now, but it is not an algorithm
    assert "no class Config" in capsys.readouterr().err
    assert mark.exists()


@pytest.mark.parametrize("metric", ["episode/return_mean", "-algo/loss"])
def test_a_study_for_a_metric_needs_no_trust(metric: str) -> None:
    assert foreign({"metric": metric}) == []


def test_a_study_with_foreign_code_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = {"format": 2, "command": ["sweep.algo=evil.one,evil.two", "env=CartPole-v1"], "runs": []}
    (tmp_path / "experiment.json").write_text(json.dumps(record))
    assert launch.main([f"resume={tmp_path}"]) == 2
    assert "algo=evil.one" in capsys.readouterr().err


def test_a_value_on_the_command_line_is_never_evaluated() -> None:
    for value in ("os:getpid", "lambda: 1", "os.getpid"):
        with pytest.raises(ConfigError, match="threads"):
            from_flat({"threads": value})


@pytest.mark.parametrize(
    "words",
    [
        {"algo": "sac", "env": "Pendulum-v1", "algo.learning_rate": "3e-4", "algo.max_grad_norm": "inf"},
        {"algo": "dqn", "env": "ALE/Pong-v5", "env_kwargs.frameskip": 4, "env_kwargs.map_name": "4x4"},
        {"algo": "r2d1", "model.memory": "lstm", "model.memory_size": 512, "device": "cuda:0"},
        {"model.memory": "transformer", "model.channels": [32, 64], "model.kernels": [5, 3], "model.strides": [2, 1]},
        {"env": "Pendulum-v1", "model.distribution": "squashed_gaussian", "model.norm": "layer"},
        {"env": "Taxi-v4", "env.wrappers": ["rlframe.envs.wrappers:ActionMaskFromInfo"]},
        {"env": "rlframe.envs.debug_envs:identity", "runner": "async_rl", "affinity": "16cpu_4gpu_1gpr_0slt"},
        {
            "snapshot_mode": "best",
            "snapshot_best": "-eval/length_mean",
            "stop": "updates > 9 or env_steps > 1",
        },
        {"env": "HalfCheetah-v5", "env_kwargs.xml_file": "half_cheetah.xml", "init": "/else/run_0"},
        {"env": "mpe2/simple_spread_v3", "agents.global_state": True},
    ],
)
def test_configs_of_built_in_parts_need_no_trust(words: dict[str, Any]) -> None:
    assert foreign(to_flat(from_flat(words))) == []


def test_control_characters_in_logs_and_configs_do_not_reach_the_terminal(
    run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    escape = "\x1b]0;owned\x07\x1b[2J"
    rewrite(run, name=escape, env=f"CartPole-v1{escape}")
    lines = (run / "progress.csv").read_text().splitlines()
    (run / "progress.csv").write_text("\n".join([f"{lines[0]},{escape}", *(f"{line},1" for line in lines[1:])]) + "\n")
    renamed = run.rename(run.with_name(f"run{escape}"))
    for words in ([str(renamed), f"out={tmp_path}/x.png"], [str(renamed), "y=nothing"]):
        plot.main(words)
    evaluate.main([str(renamed)])
    launch.main([f"resume={renamed}"])
    captured = capfd.readouterr()
    assert captured.err
    assert "\x1b" not in captured.out + captured.err
    assert "\x07" not in captured.out + captured.err


def test_a_config_that_is_launched_again_does_not_choose_the_directory(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = run.parent / "their_data"
    rewrite(run, log_dir=str(run.parent / "theirs"), record=str(theirs), record_compression="zstd")
    mine = run.parent / "mine"
    mine.mkdir()
    monkeypatch.chdir(mine)
    monkeypatch.setattr("pyprojroot.here", lambda: mine)
    assert launch.main([f"experiment={run}/params.json"]) == 0
    assert not (run.parent / "theirs").exists()
    assert not theirs.exists()
    assert list(mine.glob("data/local/*/*/*/run_0/params.json"))


def test_a_run_whose_script_recorded_no_experiment_is_left_to_it(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = tmp_path / "own"
    shutil.copytree(run, own)
    (own / "params.json").write_text(json.dumps({"config": {"seed": 0}}))
    for command, words in ((evaluate.main, [str(own)]), (launch.main, [f"resume={own}"])):
        assert command(words) == 2
        assert "names no env, so only the script that trained this run can make its agent" in capsys.readouterr().err


def test_a_run_is_resumed_without_the_weights_of_init(run: Path) -> None:
    rewrite(run, init="/gone")
    assert launch.main([f"resume={run}", "runner.n_steps=96"]) == 0


@pytest.mark.parametrize("part", ["agent", "algo", "sampler", "runner", ""])
def test_a_state_that_does_not_fit_the_run_is_one_readable_line(
    run: Path, part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = resolve_snapshot(run) / "manifest.json"
    manifest = json.loads(file.read_text())
    if part:
        manifest["ranks"][0]["tree"]["dict"][part] = {"dict": {}}
    else:
        manifest["ranks"][0]["tree"] = []
    manifest["sha256"] = self_hash(manifest)
    file.write_text(json.dumps(manifest))
    log = (run / "progress.csv").read_text()
    assert launch.main([f"resume={run}", "runner.n_steps=96"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert str(file.parent) in line
    assert (run / "progress.csv").read_text() == log, "the log is not trimmed for a state that cannot be used"


def test_a_parameter_that_is_nan_ends_a_resume_before_anything_is_trimmed(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    snapshot = resolve_snapshot(run)
    state, meta = load_snapshot(snapshot)
    next(x for x in state["agent"].values() if x.is_floating_point())[0] = math.nan
    shutil.rmtree(snapshot)
    save_snapshot(run / "snapshot", state, meta)
    log = (run / "progress.csv").read_text()
    assert launch.main([f"resume={run}", "runner.n_steps=96"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{snapshot} does not fit this run: ValueError: a parameter is NaN or Inf" in line
    assert (run / "progress.csv").read_text() == log


def test_only_objects_can_be_handed_over_in_place_of_trust() -> None:
    for config, is_said in (({"env_kwargs": {"at": "1:30"}}, False), ({"env": "mine:Env"}, True)):
        with pytest.raises(ConfigError, match=r"if you trust its author, or it is yours, add trust=true") as found:
            check_trusted(config, "params.json", trust=False)
        assert ("hand these objects over again" in str(found.value)) == is_said
