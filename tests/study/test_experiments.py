"""Studies in YAML files: what a file may hold, what the command line overrides, and what a record may name."""

import json
from pathlib import Path
from typing import Any

import pytest

from rlframe.core.errors import ConfigError
from rlframe.experiment.presets import load_preset
from rlframe.launch import main
from rlframe.study.words import read_experiments

SHORT = "env: CartPole-v1\nsampler: serial\nsampler.batch_T: 16\nrunner.n_steps: 512\neval.n_episodes: 1\n"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "mine.yaml"


def experiments(file: Path, text: str, **given: str) -> dict[str, dict[str, str]]:
    file.write_text(text)
    return read_experiments({"experiment": str(file), **given})


def test_entries_of_a_grid_may_stand_beside_config_or_in_it(file: Path) -> None:
    words = {"env": "x", "sweep.algo.clip": "0.1,0.2", "zip.seed": "0,1", "repeats": "3"}
    beside = "config: {env: x}\nsweep: {algo.clip: [0.1, 0.2]}\nzip.seed: 0,1\nrepeats: 3\nmeasured: 5\n"
    inside = "config: {env: x, sweep: {algo.clip: [0.1, 0.2]}, zip.seed: [0, 1], repeats: 3}\n"
    alone = "env: x\nsweep.algo.clip: 0.1,0.2\nzip: {seed: [0, 1]}\nrepeats: 3\n"
    for text in (beside, inside, alone):
        assert experiments(file, text) == {"": words}
        assert load_preset(str(file)) == {"env": "x"}


def test_values_become_the_words_of_a_command_line(file: Path) -> None:
    text = """
      model.hidden: [64, 64]
      algo.normalize: true
      env_kwargs: {mode: "1", size: [2, 3], least: 0.00001, most: .inf, limit: null}
      env_kwargs.table: {0: 0.5}
      env_kwargs.text: hard
      env_kwargs.number: "5"
      env_kwargs.text_of_number: "1e-5"
      env_kwargs.least: 1e-5
      env_vars.COMMIT: 12e4567
      sweep.model.hidden: [[64, 64], [256, 256]]
      sweep.algo.rate: [1e-3, 0.0003]
      sweep.env_kwargs.flag: [true, "true", b]
      sweep.one: 3
    """
    assert experiments(file, text)[""] == {
        "model.hidden": "[64,64]",
        "algo.normalize": "true",
        "env_kwargs": '{"mode": "1", "size": [2, 3], "least": 1e-05, "most": {"!float": "inf"}, "limit": null}',
        "env_kwargs.table": '{"!pairs": [[0, 0.5]]}',
        "env_kwargs.text": "hard",
        "env_kwargs.number": '"5"',
        "env_kwargs.text_of_number": '"1e-5"',
        "env_kwargs.least": "1e-05",
        "env_vars.COMMIT": "12e4567",
        "sweep.model.hidden": "[64,64],[256,256]",
        "sweep.algo.rate": "1e-3,0.0003",
        "sweep.env_kwargs.flag": 'true,"true",b',
        "sweep.one": "3",
    }


def test_named_experiments_override_the_common_keys_and_the_command_line_overrides_both(file: Path) -> None:
    text = """
      config: {env: x, algo.clip: 0.1, sweep.algo.discount: [0.9, 0.99], repeats: 5}
      experiments:
        one: {experiment: classic/ppo_cartpole, algo.clip: 0.2}
        two: {algo.discount: 0.5, sweep.seed: [7, 8]}
    """
    assert experiments(file, text) == {
        "one": {
            "env": "x",
            "sweep.algo.discount": "0.9,0.99",
            "repeats": "5",
            "experiment": "classic/ppo_cartpole",
            "algo.clip": "0.2",
        },
        "two": {"env": "x", "algo.clip": "0.1", "algo.discount": "0.5", "sweep.seed": "7,8"},
    }
    given = {"zip.algo.discount": "1,2", "zip.algo.clip": "3,4", "repeats": "2", "log_dir": "there"}
    assert experiments(file, text, **given) == {
        "one": {"env": "x", "experiment": "classic/ppo_cartpole", **given},
        "two": {"env": "x", **given},
    }
    assert experiments(file, text, seed="3")["one"]["repeats"] == "5"
    assert "sweep.seed" not in experiments(file, text, seed="3")["two"]


def test_a_short_key_and_its_full_name_are_one_key(file: Path) -> None:
    text = "config: {algo: dqn, explore.epsilon: 0.1, repeats: 2, sweep.replay.size: [100, 200]}"
    given = {"sweep.algo.explore.epsilon": "0.2,0.3", "algo.replay.size": "300"}
    assert experiments(file, text, **given) == {"": {"algo": "dqn", "repeats": "2", **given}}


def test_a_file_of_one_run_is_left_to_the_runs_of_a_sweep(file: Path) -> None:
    given = {"sweep.seed": "0,1"}
    assert experiments(file, "config: {env: x}", **given) == {"": {"experiment": str(file), **given}}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("experiments: [1]", "mine.yaml: experiments needs the form {name: {key: value}}, not [1]"),
        ("experiments: {}", "mine.yaml: experiments needs the form"),
        ("experiments: {one: 3}", "mine.yaml: one: an experiment needs the form {key: value}, not 3"),
        ("experiments: {../one: {}}", "mine.yaml: ../one: an experiment's name is a directory"),
        ("experiments: {run_0: {}}", "run_0: an experiment's name is a directory"),
        ('experiments: {"": {}}', "mine.yaml: : an experiment's name is a directory"),
        ('experiments: {" a": {}}', "mine.yaml:  a: an experiment's name is a directory"),
        ("experiments: {null: {}}", "None: an experiment's name is text, not None; write it in quotes, as 'None'"),
        ("experiments: {64: {}}", "64: an experiment's name is text, not 64; write it in quotes, as '64'"),
        ("experiments: {true: {}}", "True: an experiment's name is text, not True"),
        ("experiments: {2026-01-02: {}}", "2026-01-02: an experiment's name is text"),
        ("experiments: {a: {}, a: {}}", "the key a is there twice"),
        ("sweep.seed: [1]\nsweep: {seed: [2]}", "mine.yaml: sweep.seed is set twice: 1 and 2; remove one"),
        ("zip: {seed: [1]}\nzip.seed: [2]", "mine.yaml: zip.seed is set twice: 1 and 2; remove one"),
        ("sweep: {1: [2], '1': [3]}", "mine.yaml: sweep.1 is set twice"),
        ("experiments: {one: {sweep.seed: [1], sweep: {seed: 2}}}", "one: sweep.seed is set twice: 1 and 2"),
        ("experiments: {one: {log_dir: x}}", "one: log_dir is for the whole study; set it beside experiments:"),
        ("experiments: {one: {env: null}}", "mine.yaml: one: env has no value; leave it out for its default"),
        ("log_dir:\nsweep: {seed: [0, 1]}", "mine.yaml: log_dir has no value; leave it out for its default"),
        ("sweep: {seed: null}", "mine.yaml: sweep.seed has no value"),
        ("experiments: {one: {sweep: [1]}}", "one: sweep needs the form {KEY: [value, value]}, not [1]"),
        ('sweep.model.hidden: ["64,64"]', "mine.yaml: sweep.model.hidden: the value 64,64 has a comma"),
    ],
)
def test_an_entry_of_another_form_is_an_error(file: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        experiments(file, text)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ("{algo.learning_rte: 3}", "error: two/run_0: unknown key algo.learning_rte; did you mean algo.learning_rate"),
        ("{sweep.algo.clip: [0.1, -1]}", "error: two/clip=-1/run_0: algo.clip=-1"),
        ("{zip.algo.clip: [0.1], zip.seed: [0, 1]}", "error: two: zipped keys need the same number of values"),
        ("{repeats: 2, sweep.seed: [1]}", "error: two: repeats=2 and sweep.seed=1 both set the seeds"),
        ("{experiment: classic/ppo_cartpol}", "error: two/run_0: no preset 'classic/ppo_cartpol'"),
        ("{experiment: FILE}", "is a study of several runs, as it has experiments"),
    ],
)
def test_errors_name_the_experiment_and_the_key_before_anything_starts(
    file: Path, capsys: pytest.CaptureFixture[str], entries: str, message: str
) -> None:
    file.write_text(f"{SHORT}experiments: {{one: {{}}, two: {entries.replace('FILE', str(file))}}}")
    assert main([f"experiment={file}", f"log_dir={file.parent / 'study'}"]) == 2
    assert message in capsys.readouterr().err
    assert list(file.parent.iterdir()) == [file]


def recorded(study: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((study / "experiment.json").read_text())
    return content


@pytest.mark.slow
def test_a_study_of_named_experiments_is_one_queue_and_resumes_without_its_file(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file.write_text(f"{SHORT}experiments: {{one: {{}}, two: {{zip.algo.clip: [0.3], zip.seed: [5]}}}}")
    study = tmp_path / "study"
    assert main([f"experiment={file}", f"log_dir={study}", "retries=1"]) == 0
    names = ["one/run_0", "two/clip=0.3/run_5"]
    assert [(run["name"], run["state"]) for run in recorded(study)["runs"]] == [(name, "done") for name in names]
    assert all((study / name / "progress.csv").is_file() for name in names)
    config = json.loads((study / names[1] / "params.json").read_text())["config"]
    assert (config["algo.clip"], config["seed"], config["runner.n_steps"]) == (0.3, 5, 512)
    capsys.readouterr()
    assert main([f"experiment={file}", f"log_dir={study}"]) == 0
    assert "2 already done" in capsys.readouterr().out
    file.unlink()
    assert main([f"resume={study}"]) == 0
    assert "2 already done" in capsys.readouterr().out
    assert recorded(study)["command"] == [f"experiment={file}", f"log_dir={study}"]


@pytest.mark.parametrize(
    ("name", "words", "message"),
    [
        ("one", {"sweep.env": "CartPole-v1,os:getcwd"}, "env=os:getcwd; if you trust its author, or it"),
        ("one", {"zip.algo": "ppo,./mine.py"}, "algo=./mine.py; if you trust its author"),
        ("one", {"callbacks": "[os:getcwd]"}, "callbacks=[os:getcwd]; if you trust its author"),
        ("one", {"experiment": "./mine.yaml"}, "experiment=./mine.yaml; if you trust its author"),
        ("one", {"trust": "true"}, "one: trust=true belongs on the command line"),
        ("../one", {}, "is damaged"),
        ("one", [], "is damaged"),
        ("one", {"seed": 3}, "is damaged"),
        ("one", {"repeats": "1e15"}, "repeats=1000000000000000 must be from 1 to 5,000"),
    ],
)
def test_a_record_from_a_stranger_may_name_only_parts_of_rlframe(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, words: Any, message: str
) -> None:
    record = {"format": 2, "command": [], "experiments": {name: words}, "runs": []}
    (tmp_path / "experiment.json").write_text(json.dumps(record))
    assert main([f"resume={tmp_path}"]) == 2
    assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["experiment.json"]


def test_a_damaged_record_is_refused_whatever_words_are_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "experiment.json").write_text('{"format": 2, "command": [], "experiments": [1], "runs": []}')
    assert main([f"resume={tmp_path}", "runner.n_steps=5"]) == 2
    assert "experiment.json is damaged; move it away" in capsys.readouterr().err


def test_another_file_than_a_studys_is_needed_where_one_run_is_made(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file.write_text(f"{SHORT}repeats: 2")
    assert main([f"experiment={file}", "--show"]) == 2
    assert "is a study of several runs, as it has repeats; start it with" in capsys.readouterr().err
