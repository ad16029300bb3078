"""The launch command: its runs, their files, refused settings, and resume."""

import csv
import json
import os
import shlex
import shutil
import signal
import sys
from pathlib import Path

import chz
import pytest
import yaml

from rlframe import evaluate
from rlframe.algos import ppo
from rlframe.core.errors import Interrupted
from rlframe.experiment.presets import load_preset, preset_names, presets_dir
from rlframe.experiment.settings import from_flat, to_flat
from rlframe.launch import main
from rlframe.record.snapshot import list_snapshots, load_snapshot, resolve_snapshot
from tests.processes import DEADLINE_S, launched
from tests.variants import variants

SMALL = ["sampler.batch_T=16", "sampler.batch_B=4", "runner.n_steps=256", "runner.log_interval_steps=128"]
SMALL += ["eval.n_episodes=2", "eval.n_envs=2"]
MINIBATCHES = {"ppo": ["algo.minibatches=2", "algo.epochs=2"], "a2c": [], "pg": []}


def launch(log_dir: Path, *words: str) -> int:
    serial = [] if any(word.startswith(("sampler=", "resume=")) for word in words) else ["sampler=serial"]  # no timing
    given = {word.partition("=")[0] for word in words}
    few = [] if given & {"algo", "experiment", "resume"} else MINIBATCHES["ppo"]
    few = [word for word in few if word.partition("=")[0] not in given]
    return main([f"log_dir={log_dir}", *SMALL, *serial, *few, *words])


def rows(run: Path) -> list[dict[str, str]]:
    with (run / "progress.csv").open() as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that is not changed."""
    folder = tmp_path_factory.mktemp("launched")
    assert launch(folder, "env=CartPole-v1", "model.hidden=[8,8]", "algo.clip=0.3") == 0
    return folder / "run_0"


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(trained, tmp_path / "run_0", symlinks=True))


def test_a_run_leaves_the_files_of_the_contract_and_prints_the_commands_to_type_next(tmp_path, capsys):
    assert launch(tmp_path / "two words", "env=CartPole-v1") == 0
    run = tmp_path / "two words" / "run_0"
    assert {path.name for path in run.iterdir()} >= {"params.json", "progress.csv", "debug.log", "snapshot"}
    assert list(run.glob("events.out.tfevents.*"))
    assert [int(row["env_steps"]) > 0 for row in rows(run)] == [False, True, True]
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("evaluate:", "plot:"))]
    assert [shlex.split(line)[-3:] for line in printed] == [
        ["-m", f"rlframe.{command}", str(run)] for command in ("evaluate", "plot")
    ]


def test_params_json_of_a_run_can_be_launched_again(trained, tmp_path):
    config = json.loads((trained / "params.json").read_text())["config"]
    again = from_flat(config)
    assert to_flat(again) == config
    assert again.model.hidden == (8, 8)
    assert again.algo.clip == 0.3
    assert main([f"experiment={trained / 'params.json'}", f"log_dir={tmp_path / 'again'}"]) == 0
    assert [row["algo/entropy"] for row in rows(tmp_path / "again" / "run_0")] == [
        row["algo/entropy"] for row in rows(trained)
    ]


@pytest.mark.parametrize("algo", variants(["ppo", "a2c", "pg"], ("ppo",)))
def test_one_seed_gives_one_result_and_another_seed_another(tmp_path, algo):
    for name, seed in (("one", 3), ("two", 3), ("other", 4)):
        words = (f"algo={algo}", "env=CartPole-v1", f"seed={seed}", *MINIBATCHES[algo])
        assert launch(tmp_path / name, *words) == 0

    def metrics(name: str) -> list[dict[str, str]]:
        found = rows(tmp_path / name / "run_0")
        return [{k: v for k, v in row.items() if not k.startswith(("time/", "memory/", "system/"))} for row in found]

    assert metrics("one") == metrics("two")
    assert metrics("one") != metrics("other")


def test_resume_continues_from_the_snapshot_without_a_duplicate_or_missing_row(run):
    before = load_snapshot(resolve_snapshot(run))[0]
    assert main([f"resume={run}", "runner.n_steps=512"]) == 0
    steps = [int(row["env_steps"]) for row in rows(run)]
    assert steps == sorted(set(steps))
    assert steps[-1] >= 512 > steps[2] >= 256
    after = load_snapshot(resolve_snapshot(run))[0]
    assert after["algo"]["progress"]["updates"] > before["algo"]["progress"]["updates"]
    optimizer = after["algo"]["optimizer"]["state"][0]
    assert optimizer["step"] > before["algo"]["optimizer"]["state"][0]["step"]


def test_resume_takes_the_snapshot_before_a_damaged_one_and_says_so(run, caplog):
    before, newest = list_snapshots(run / "snapshot")
    os.truncate(newest / "arrays.safetensors", 100)
    assert evaluate.main([str(run), "n_episodes=1"]) == 0
    assert evaluate.main([str(newest), "n_episodes=1"]) == 1
    assert main([f"resume={run}"]) == 0
    told = [record.getMessage() for record in caplog.records if "cannot be used" in record.getMessage()]
    assert len(told) == 2
    assert all(newest.name in message and before.name in message for message in told)
    assert (run / f"snapshot/abandoned_{newest.name}").is_dir()
    steps = [int(row["env_steps"]) for row in rows(run)]
    assert [step // 128 for step in steps] == [0, 1, 2]


def test_a_metric_for_best_that_no_run_has_is_named_at_the_first_report(tmp_path, capsys):
    assert launch(tmp_path, "env=CartPole-v1", "snapshot_mode=best", "snapshot_best=eval/return_men") == 2
    assert "did you mean eval/return_mean" in capsys.readouterr().err


def test_resuming_a_complete_run_says_so(run, capsys):
    assert main([f"resume={run}"]) == 0
    assert "nothing is left to train" in capsys.readouterr().out


def test_resume_refuses_to_change_settings_that_decide_the_result(run, capsys):
    assert main([f"resume={run}", "algo.discount=0.5"]) == 2
    assert "algo.discount cannot change" in capsys.readouterr().err
    assert main([f"resume={run}", "algo=sac"]) == 2
    assert "algo cannot change" in capsys.readouterr().err
    assert main([f"resume={run}", "n_steps=500"]) == 2
    assert "unknown key n_steps; did you mean runner.n_steps?" in capsys.readouterr().err
    assert main([f"resume={run}", "algo.discount=99e-2", "seed=0"]) == 0, "they are its own values"


def test_stack_is_false_in_capitals_too(capsys):
    assert main(["stack=False", "dry_run=true", "algo=a2c", "env=CartPole-v1", "sampler=serial"]) == 0
    assert '"algo": "a2c"' in capsys.readouterr().out


def test_an_empty_resume_in_the_directory_of_a_study_is_refused(tmp_path, capsys, monkeypatch):
    (tmp_path / "experiment.json").touch()
    monkeypatch.chdir(tmp_path)
    assert main(["resume=", "dry_run=true"]) == 2
    assert "resume= is empty, perhaps an unset shell variable" in capsys.readouterr().err


@pytest.mark.parametrize("fault", ["raise", "nan", "shape"])
def test_a_failing_environment_ends_the_run_with_its_facts_and_a_snapshot(tmp_path, capsys, fault):
    words = (
        "env=rlframe.envs.debug_envs:faulty",
        f"env_kwargs.fault={fault}",
        "env_kwargs.at=40",
        "runner=minibatch_rl",
    )
    assert launch(tmp_path, *words) == 1
    message = capsys.readouterr().err
    for fact in ("environment 0", "seed", "step 40", "action"):
        assert fact in message
    assert ("Traceback" in message and "in step" in message) == (fault == "raise"), "that of the environment alone"
    assert load_snapshot(resolve_snapshot(tmp_path / "run_0"))[1]["env_steps"] == 128
    assert "Traceback" in (tmp_path / "run_0" / "debug.log").read_text()


def test_ctrl_c_finishes_the_batch_snapshots_and_exits_130(tmp_path):
    words = ["env=CartPole-v1", "runner.n_steps=1e8", "runner.log_interval_steps=1024", "eval.n_episodes=1"]
    with launched(tmp_path, *words) as process:
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 130, output
    assert "Traceback" not in output
    assert f"-m rlframe.launch resume={tmp_path / 'run_0'}\n" in output
    state, meta = load_snapshot(resolve_snapshot(tmp_path / "run_0"))
    assert meta["env_steps"] == state["algo"]["progress"]["env_steps"] > 0


def test_the_line_that_continues_a_run_repeats_what_was_given_beside_resume(run, tmp_path, capsys, monkeypatch):
    def stopped(job):
        error = Interrupted(signal.SIGINT, "stopped")
        error.directory = run
        raise error

    monkeypatch.setattr("rlframe.experiment.train.train", stopped)
    monkeypatch.chdir(tmp_path)
    assert main(["resume=run_0", "stop=env_steps > 9e9", "runner.n_steps=2e3"]) == 130
    assert "rlframe.launch resume=run_0 'stop=env_steps > 9e9' runner.n_steps=2e3\n" in capsys.readouterr().out
    assert main([f"log_dir={tmp_path / 'b c'}", "env=CartPole-v1", f"sync={tmp_path / 'copies'}"]) == 130
    assert f"rlframe.launch resume=run_0 sync={tmp_path / 'copies'}\n" in capsys.readouterr().out


def test_a_users_own_algorithm_file_is_launched_by_path(tmp_path, capsys):
    original = Path(ppo.__file__)
    mine = tmp_path / "my_ppo.py"
    mine.write_text(original.read_text())
    assert launch(tmp_path / "runs", f"algo={mine}", "env=CartPole-v1", *MINIBATCHES["ppo"]) == 0
    config = json.loads((tmp_path / "runs" / "run_0" / "params.json").read_text())["config"]
    assert config["algo"] == str(mine)
    mine.write_text(original.read_text() + "\n")
    assert main([f"resume={tmp_path / 'runs' / 'run_0'}", "trust=true"]) == 2
    assert f"{mine} has changed since this process imported it; restart" in capsys.readouterr().err
    del sys.modules["my_ppo"]  # as in another process
    for is_said in (True, False):
        assert main([f"resume={tmp_path / 'runs' / 'run_0'}", "trust=true", "log_level=WARNING"]) == 0
        assert (f"{mine} has changed since the run was started last" in "".join(capsys.readouterr())) == is_said


def test_another_algorithm_keeps_the_presets_fields_that_it_has_and_the_others_are_told(tmp_path, capsys):
    preset = load_preset("classic/ppo_cartpole")
    experiment = from_flat(preset, {"algo": "a2c"})
    assert type(experiment.algo).__module__ == "rlframe.algos.a2c"
    assert experiment.sampler.batch_T == preset["sampler.batch_T"]
    assert experiment.algo.discount == preset["algo.discount"] != type(experiment.algo)().discount
    mine = tmp_path / "ablated_ppo.py"
    mine.write_text("import chz\nfrom rlframe.algos import ppo\n\n\n@chz.chz\nclass Config(ppo.Config):\n    pass\n")
    ablated = from_flat(preset, {"algo": str(mine)}).algo
    original = from_flat(preset).algo
    assert all(getattr(ablated, name) == getattr(original, name) for name in chz.chz_fields(original))

    words = ["experiment=classic/ppo_cartpole", "algo=a2c"]
    assert launch(tmp_path / "runs", *words) == 0
    log = (tmp_path / "runs/run_0/debug.log").read_text()
    assert "left out, as unknown now: " in log
    assert "algo.epochs=" in log


@pytest.mark.parametrize(
    "word", ["env_kwargs.goal=[1", "eval.env_kwargs.goal={a: [", "env_kwargs={a: [", "env_kwargs.day=2024-99-99"]
)
def test_an_argument_of_the_environment_that_is_not_yaml_is_refused(word, capsys):
    assert main([word]) == 2
    assert f"error: {word} is not valid YAML; write such text in quotes" in capsys.readouterr().err


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_is_a_valid_experiment_and_states_its_claim(name):
    experiment = from_flat(load_preset(name))
    assert to_flat(from_flat(to_flat(experiment))) == to_flat(experiment)
    content = yaml.safe_load((presets_dir() / f"{name}.yaml").read_text())
    assert f"experiment={name}" in content["command"]
    if content.get("measured", "unmeasured") == "unmeasured":
        assert "expect" not in content
        return
    assert set(content["expect"]) == {"metric", "bound", "env_steps"}
    assert set(content["measured"]) >= {"seeds", "reached", "machine", "wall_s"}
    assert content["measured"]["wall_s"] > 0
    assert content["expect"]["env_steps"] <= experiment.runner.n_steps


def test_dry_run_prints_the_config_as_standard_json_and_starts_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["experiment=classic/ppo_cartpole", "dry_run=true"]) == 0
    printed = capsys.readouterr().out
    config, end = json.JSONDecoder(parse_constant=pytest.fail).raw_decode(printed)
    assert (config["env"], config["algo.target_kl"]) == ("CartPole-v1", "inf"), "as JSON has no Infinity"
    for word in ("affinity:\n", "workers  none", "processes:", "main", "1 torch thread;", "memory: about"):
        assert word in printed[end:]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.gpu
@pytest.mark.parametrize("memory", ["none", "lstm"])
def test_training_runs_on_a_gpu_and_its_run_evaluates_on_the_cpu(tmp_path, memory):
    words = ("env=CartPole-v1", "device=cuda:0", f"model.memory={memory}", "model.normalize_observation=true")
    assert launch(tmp_path, *words, "algo.minibatches=2") == 0
    assert evaluate.main([str(tmp_path / "run_0"), "n_episodes=2", "device=cpu"]) == 0


def test_the_log_begins_with_the_size_of_replay(tmp_path):
    words = ["env=CartPole-v1", "algo=dqn", "algo.replay.size=1e4", "algo.learning_starts=64", "runner.n_steps=128"]
    assert main([*words, "sampler=serial", "sampler.batch_T=16", "eval.n_episodes=1", f"log_dir={tmp_path}"]) == 0
    assert "replay: 10,000 rows of " in (tmp_path / "run_0/debug.log").read_text()
