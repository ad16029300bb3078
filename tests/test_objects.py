"""rlframe.train and friends take Python objects: every form from a script and from a notebook's kernel, and back."""

import json
import shutil
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch

import rlframe
from rlframe.algos import ppo
from rlframe.core.errors import ConfigError, SnapshotError
from rlframe.core.objects import ObjectName
from rlframe.data import Episode, open_dataset
from rlframe.experiment.objects import named, naming_start
from rlframe.experiment.settings import from_flat
from tests.experiment import forms
from tests.experiment.forms import Slower, Walk
from tests.fork_server import run_python

ROOT = Path(__file__).parents[1]
SERIAL: dict[str, Any] = {"sampler": "serial"}
TWO_WORKERS = {"sampler": "cpu", "sampler.n_workers": 2}
SMALL = {**forms.SMALL, **SERIAL, "model.hidden": [8]}
FEW_UPDATES = {"algo.epochs": 1, "algo.minibatches": 1}
OBJECTS = {"env": Walk, "callbacks": [Slower(0.9)], "algo.optimizer": torch.optim.RAdam}
FEW = ["class", "wrapped instance", "callback", "optimizer", "encoder", "dicts"]


def check_in_script(folder: Path, *checks: str) -> None:
    """Run `forms.py` as a script, whose classes are those of `__main__`."""
    text = Path(forms.__file__).read_text(encoding="utf-8")
    (folder / "forms.py").write_text(text, encoding="utf-8")
    (folder / "script.py").write_text(f"{text}\n{'; '.join(checks)}\n", encoding="utf-8")
    done = run_python([sys.executable, "-W", "error", "script.py"], cwd=folder, timeout=110)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("forms are equal") == len(checks)


def run_notebook(cells: list[str], folder: Path) -> list[Any]:
    """The outputs of all cells, executed by a Jupyter kernel."""
    client, formats = pytest.importorskip("nbclient"), pytest.importorskip("nbformat").v4
    notebook = formats.new_notebook(cells=[formats.new_code_cell(cell) for cell in cells])
    client.NotebookClient(notebook, timeout=110, resources={"metadata": {"path": str(folder)}}).execute()
    return [output for cell in notebook.cells for output in cell.outputs]


@pytest.mark.slow
def test_objects_of_a_script_train_as_their_names_do(tmp_path: Path) -> None:
    check_in_script(tmp_path, f"check({SERIAL}, {FEW})", f"check({TWO_WORKERS}, {FEW[:1]})")


@pytest.mark.slow
@pytest.mark.parametrize("keys", [SERIAL, TWO_WORKERS], ids=str)
def test_every_form_trains_in_a_script_as_by_name(keys: dict[str, Any], tmp_path: Path) -> None:
    check_in_script(tmp_path, f"check({keys})")


@pytest.mark.slow
def test_objects_reach_the_workers_of_the_gpu_sampler(tmp_path: Path) -> None:
    check_in_script(tmp_path, f"check({ {**TWO_WORKERS, 'sampler': 'gpu'} }, {FEW})")


@pytest.mark.slow
@pytest.mark.parametrize("names", [FEW[:4], FEW[4:]], ids=str)
def test_objects_reach_two_ranks(names: list[str], tmp_path: Path) -> None:
    check_in_script(tmp_path, f"check({ {**SERIAL, 'world_size': 2} }, {names})")


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # of Jupyter's own code
@pytest.mark.parametrize("keys", [SERIAL, TWO_WORKERS], ids=str)
def test_every_form_trains_in_a_kernel_as_by_name(keys: dict[str, Any], tmp_path: Path) -> None:
    shutil.copy(forms.__file__, tmp_path / "forms.py")
    cells = [f"import sys; sys.path.insert(0, {str(ROOT)!r})", Path(forms.__file__).read_text(encoding="utf-8")]
    outputs = run_notebook([*cells, f"check({keys})"], tmp_path)
    assert f"{len(forms.FORMS)} forms are equal" in outputs[-1].text


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # of Jupyter's own code
def test_the_notebook_of_the_examples_runs_with_a_progress_bar_and_a_curve(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{':'.join(sys.path)}")
    (tmp_path / "pyproject.toml").touch()  # runs are recorded below the project's root
    notebook = json.loads((ROOT / "examples/notebook.ipynb").read_text(encoding="utf-8"))
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    data = [output.data for output in run_notebook(cells, tmp_path) if "data" in output]
    assert any("<progress" in each.get("text/html", "") for each in data)
    assert any("image/png" in each for each in data)


@pytest.mark.slow
def test_objects_reach_the_background_process(tmp_path: Path) -> None:
    keys = {**SMALL, **OBJECTS, "runner": "async_rl", "sampler.statistics": [forms.Ones], "env.wrappers": [forms.Twice]}
    result = rlframe.train("appo", n_steps=256, log_dir=tmp_path, **keys)
    assert result.metrics["env/ones"] == 1


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run trained by objects, some of which no name leads to."""
    folder = tmp_path_factory.mktemp("objects")
    return rlframe.train(
        "ppo", n_steps=64, log_dir=folder, **{**SMALL, **FEW_UPDATES, **OBJECTS, "env": lambda: Walk()}
    ).directory


def test_a_run_records_the_names_of_its_objects(run_dir: Path) -> None:
    config = json.loads((run_dir / "params.json").read_text())["config"]
    assert config["env"] == "tests.test_objects:run_dir.<locals>.<lambda>()"
    assert config["callbacks"] == ["tests.experiment.forms:Slower()"]
    assert config["algo.optimizer"] == "torch.optim.radam:RAdam"


def test_a_policy_needs_neither_the_callbacks_nor_trust_in_them(run_dir: Path) -> None:
    others = {"env": Walk, "algo.optimizer": torch.optim.RAdam}
    assert rlframe.load_policy(run_dir, **others).observation_space.shape == (6,)


def test_a_run_is_titled_by_the_names_of_its_classes() -> None:
    experiment = from_flat(named({"algo": forms.FastPPO, "env": lambda: Walk()}))
    assert experiment.title() == "FastPPO_lambda"


def test_an_instance_may_have_arguments_that_are_no_json(tmp_path: Path) -> None:
    env = gymnasium.make("Walk-v0", length=np.int64(8))
    run = rlframe.train("ppo", env, n_steps=64, log_dir=tmp_path, **SMALL, **FEW_UPDATES).directory
    assert json.loads((run / "params.json").read_text())["config"]["env"] == "Walk-v0()"
    assert rlframe.load_policy(run, env=env).observation_space.shape == (8,)
    with pytest.raises(ConfigError, match=r"^env_kwargs={.*} cannot be written to .*; let env=functools.partial.MyEnv"):
        rlframe.train("ppo", Walk, n_steps=64, log_dir=tmp_path / "kwargs", env_kwargs={"length": np.int64(8)}, **SMALL)
    with pytest.raises(ConfigError, match=r"^env_kwargs={.*} cannot be written to .*; let env=functools.partial.MyEnv"):
        rlframe.build("ppo", Walk, n_steps=64, env_kwargs={"length": np.int64(8)}, log_dir=tmp_path, **SMALL)
    with (
        rlframe.build("ppo", Walk, n_steps=64, env_kwargs={"length": np.int64(8)}, **SMALL) as unrecorded,
        pytest.raises(ConfigError, match=r"^env_kwargs={.*} cannot be written to params.json"),
    ):
        unrecorded.save(tmp_path / "saved")


class LongUnlessTold(Walk):
    def __init__(self, length: int | None = 4) -> None:
        super().__init__(length or 9)


def test_an_argument_of_an_instance_may_be_none(tmp_path: Path) -> None:
    gymnasium.register("LongUnlessTold-v0", LongUnlessTold)
    env = gymnasium.make("LongUnlessTold-v0", length=None)
    run = rlframe.train("ppo", env, n_steps=64, log_dir=tmp_path, **SMALL, **FEW_UPDATES).directory
    assert json.loads((run / "params.json").read_text())["config"]["env_kwargs"] == {"length": None}
    assert rlframe.load_policy(run, env=env).observation_space.shape == (9,)


def test_a_resumed_run_asks_for_objects_that_no_name_leads_to(run_dir: Path) -> None:
    with pytest.raises(ConfigError, match=r"callbacks=.*Slower.*trust=true; in Python, hand these objects over again"):
        rlframe.restore(run_dir)
    with pytest.raises(ConfigError, match=r"names an object that is not here: env=.*; hand it over: env=\.\.\."):
        rlframe.restore(run_dir, trust=True, callbacks=[Slower()])
    with pytest.raises(ConfigError, match=r"hand it over: rlframe.train\(resume=..., callbacks=\[Slower\(\)\]\)"):
        rlframe.restore(
            run_dir, trust=True, env=ObjectName("tests.test_objects:run_dir.<locals>.<lambda>", Walk, "env")
        )


def test_a_restored_run_says_what_it_goes_on_from_and_that_an_object_is_another(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = Walk()
    vars(other)["goal"] = 3.0
    with rlframe.build("ppo", Walk(), n_steps=64, **{**SMALL, **FEW_UPDATES}) as run:
        run.train()
        saved = run.save(tmp_path / "saved")
    for env, changed in ((Walk(), False), (other, True)):
        with caplog.at_level("INFO", "rlframe"), rlframe.restore(tmp_path / "saved", env=env):
            pass
        assert f"restored from {saved}" in caplog.text
        assert ("has changed since the run was started last" in caplog.text) == changed


def test_a_run_is_restored_with_objects_of_the_recorded_names(tmp_path: Path) -> None:
    callback = Slower(0.9)
    with rlframe.build("ppo", n_steps=256, **{**SMALL, **FEW_UPDATES, **OBJECTS, "callbacks": [callback]}) as run:
        next(run), next(run)
        n_batches = callback.n_batches
        assert n_batches > 0, "the callback itself is called, not a copy"
        run.save(tmp_path / "saved")
        expected = run.train()["algo/value_loss"]
    again = {**OBJECTS, "callbacks": [Slower(0.9)], "algo": {"optimizer": torch.optim.RAdam}}
    del again["algo.optimizer"]
    again["callbacks"][0].n_batches = n_batches  # its only state, as it has no state_dict
    with rlframe.restore(tmp_path / "saved", **again) as run:
        assert run.train()["algo/value_loss"] == expected
    with pytest.raises(ConfigError, match="env cannot change"):
        rlframe.restore(tmp_path / "saved", **{**again, "env": forms.short_walk})
    policy = rlframe.load_policy(tmp_path / "saved", **again)
    assert policy.act(Walk().reset(seed=0)[0]) in (0, 1)


@pytest.fixture(scope="module")
def walked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("walked")
    return rlframe.train("ppo", Walk, n_steps=64, log_dir=folder, **SMALL, **FEW_UPDATES).directory


@pytest.mark.parametrize(
    ("before", "now"),
    [
        ("__main__:Walk", Walk),  # of a notebook, and later in a module
        ("tests.experiment.forms:Walk", "__main__:Walk"),
        ("__main__:<lambda>()", Walk),  # nothing is called so
        ("__main__:Walk()", forms.__file__ + ":Walk"),
        ("forms:Walk", forms.__file__ + ":Walk"),  # of the directory where it was started, and not of this one
    ],
    ids=str,
)
def test_a_run_is_resumed_with_its_object_wherever_that_is_now(
    before: str, now: Any, walked: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Path(shutil.copytree(walked, tmp_path / "run_0", symlinks=True))
    params = json.loads((run / "params.json").read_text())
    params["config"]["env"] = before
    (run / "params.json").write_text(json.dumps(params))
    monkeypatch.setattr(sys.modules["__main__"], "Walk", Walk, raising=False)
    with rlframe.restore(run, trust=True, n_steps=128, env=now) as again:
        assert again.train()["env_steps"] >= 128
    with pytest.raises(ConfigError, match="env cannot change"):
        rlframe.restore(run, trust=True, env="CartPole-v1")


def test_an_error_says_where_a_run_was_started_if_that_was_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "params.json").write_text(json.dumps({"started_in": str(tmp_path)}))
    says = r"^lost \(it was started in .*: names of code and files are looked up from there\)$"
    with pytest.raises(ConfigError, match=says), naming_start(tmp_path / "params.json"):
        raise ConfigError("lost")
    monkeypatch.chdir(tmp_path)
    for record in ("params.json", "none.json"):
        with pytest.raises(ConfigError, match=r"^lost$"), naming_start(tmp_path / record):
            raise ConfigError("lost")


def test_an_object_that_does_not_fit_the_saved_state_is_refused(run_dir: Path) -> None:
    with pytest.raises(SnapshotError, match=r"^the saved state does not fit this run: .*RuntimeError"):
        rlframe.restore(run_dir, trust=True, **{**OBJECTS, "env": forms.short_walk})


class Locked(Walk):
    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


LOCK, WALK = Locked(), Walk()


def test_what_a_function_holds_need_not_be_pickled_in_one_process() -> None:
    lock = threading.Lock()

    def locked() -> Walk:
        env = Walk()
        env.lock = lock
        return env

    with rlframe.build("ppo", locked, n_steps=64, **SMALL, **FEW_UPDATES) as run:
        run.train()


def test_functions_of_episodes_and_players_may_be_objects(tmp_path: Path) -> None:
    def threes(episode: Episode) -> Episode:
        return replace(episode, reward=np.full_like(episode.reward, 3))

    def fives(episode: Episode) -> Episode:
        return replace(episode, reward=episode.reward + 2)

    how = {"record": str(tmp_path / "rows"), "record_transform": threes, "log_dir": tmp_path / "runs"}
    rlframe.train("ppo", Walk, n_steps=64, **how, **SMALL, **FEW_UPDATES)
    recorded = list(open_dataset(tmp_path / "rows").episodes())
    assert {float(x) for each in recorded for x in each.reward} == {3.0}
    data = {"algo.replay": "dataset", "algo.replay.path": str(tmp_path / "rows"), "algo.replay.transform": fives}
    data |= {"algo.n_step": 1}
    with rlframe.build("dqn", Walk, n_steps=64, runner="offline_rl", **data, **SMALL) as run:
        assert run.algo.replay.sample(8).return_.tolist() == [5.0] * 8
    played = {"eval.opponents": ["random", threes], "agents.global_state": False}
    keys = named({"env": "rlframe.envs.debug_agents:TwoStepGame", **played})
    assert keys["eval.opponents"][0] == "random"
    assert keys["eval.opponents"][1].value is threes


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"env": 3}, "env=3 is of type int; give a Gymnasium id, package.module:callable, or one environment: its cl"),
        ({"env": gymnasium.make_vec("CartPole-v1", 2)}, "CartPoleVectorEnv; give .* one environment: its class"),
        ({"env": Locked()}, r"env=.*Locked\(\) cannot be copied by pickling.*_thread.lock.*; give a class, or a funct"),
        ({"env": LOCK.make, **TWO_WORKERS}, r"env=.*make\(\) cannot be copied by pickling, for other processes"),
        ({"callbacks": [3]}, "callbacks=3 is of type int; give rlframe.runners.Callback, a class or an instance"),
        ({"callbacks": [object()]}, r"callbacks=builtins:object\(\) is not a subclass of rlframe.runners.Callback"),
        ({"algo": ppo.PPO}, "algo=rlframe.algos.ppo:PPO is a class; give a name, or a Config of such a part"),
        ({"sampler": forms}, "sampler=.*module.*; give a name, or a Config"),
        ({"model.hidden": Walk}, "model.hidden=tests.experiment.forms:Walk: .* is not a list of whole numbers such as"),
        ({"algo.learning_rate": lambda done: 1 - done}, "algo.learning_rate=.*lambda.* is not a schedule .linear, cos"),
        ({"run_ID": 0, "name": Walk}, "name=tests.experiment.forms:Walk is an object, and this key takes none; give a"),
        ({"callback": Slower}, "unknown key callback; did you mean callbacks"),
        ({"model.encoder": Walk}, "model.encoder=tests.experiment.forms:Walk is not a subclass of torch.nn.Module"),
        ({"algo.optimizer": Walk}, "algo.optimizer=.*Walk is no subclass of torch.optim.Optimizer"),
        ({"sampler.statistics": [forms.Ones()]}, "a function object that makes one"),
        ({"env.wrappers": [forms.Twice(Walk())]}, r"env.wrappers=.*Twice\(\) is .*, not a wrapper or function"),
        ({"eval.function": len}, r"eval.function=builtins:len must be a function of \(policy, make_env\)"),
        ({"algo.clip": 0.1, "algo": {"name": "ppo", "clip": 0.2}}, "algo.clip is given twice; leave one of them out"),
        (
            {"algo": ppo.Config(), "algo.clip": 0.1},
            "algo.clip is given twice, by algo and algo.clip; give it in one",
        ),
        ({"env": lambda: WALK}, "env=.*<lambda> gives the same environment again; write a function that makes a new"),
        ({"env": "__main__:Nowhere"}, "env=__main__:Nowhere: __main__ has no Nowhere"),
    ],
    ids=lambda each: each[:40] if isinstance(each, str) else ",".join(each),
)
def test_an_object_of_the_wrong_kind_is_refused_by_its_key(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        rlframe.build(n_steps=64, **{"env": Walk, **SMALL, **settings})


def test_an_optimizer_instead_of_its_class_is_refused() -> None:
    radam = torch.optim.RAdam([torch.nn.Parameter(torch.ones(1))])  # not at import: it loads torch's compiler
    settings: dict[str, Any] = {"env": Walk, **SMALL, "algo.optimizer": radam}
    with pytest.raises(ConfigError, match=r"algo.optimizer=.*RAdam\(\) is no subclass of .*; give the class"):
        rlframe.build(n_steps=64, **settings)
