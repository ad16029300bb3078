"""The docs are correct: code blocks run, commands parse, links lead to files, and the site builds.

Blocks marked `python` are executed, one after another on each page. Blocks marked `py` are not: other libraries' code,
and code that cannot run here. A block that begins with `# NAME.py` is also saved as that file, for the page's commands.
"""

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
import types
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
from gymnasium import Space

import rlframe
from rlframe import evaluate, launch, plot
from rlframe.algos import ppo
from rlframe.core.parts import Part, known_keys, module_names
from rlframe.core.types import BatchSpec
from rlframe.envs import EnvConfig, atari, make_envs
from rlframe.envs.make import fixed_backend
from rlframe.experiment import defaults, hardware, tuning
from rlframe.experiment.config import Experiment
from rlframe.experiment.presets import preset_names
from rlframe.record import METRICS
from rlframe.samplers import auto
from rlframe.system import cluster
from rlframe.system.machine import n_cpus
from tests.data.episodes import CARTPOLE, episodes, stored
from tests.fork_server import run_python
from tests.tables import read_csv

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs").rglob("*.md"))
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *PAGES]
TUTORIALS = [
    ROOT / f"docs/{name}.md"
    for name in (
        "tutorials/own_environment",
        "tutorials/own_network",
        "tutorials/own_loss",
        "tutorials/own_algorithm",
        "guides/extend",
    )
]
SMALL = {"runner.n_steps": "900", "runner.log_interval_steps": "900", "eval.n_episodes": "1", "sampler.batch_T": "8"}
SMALL |= {"sampler": "serial"}  # sampler=auto would spend time on measuring
FEW_UPDATES = ["algo.epochs=1", "algo.minibatches=1"]  # of PPO
name = pytest.mark.parametrize("document", DOCUMENTS, ids=[str(path.relative_to(ROOT)) for path in DOCUMENTS])


def blocks(document: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", document.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def commands(document: Path, module: str) -> list[list[str]]:
    """The words after `python -m MODULE` of every command line in the document's sh blocks, without comments."""
    lines = [line for block in blocks(document, "sh") for line in block.splitlines()]
    words = [shlex.split(line, comments=True) for line in lines]
    return [found[3:] for found in words if found[:3] == ["python", "-m", module]]


def save_files(document: Path, directory: Path) -> None:
    """Write the files that the document tells its readers to save: blocks of one name are one file."""
    for block in [*blocks(document, "python"), *blocks(document, "yaml")]:
        if file := re.match(r"# (\w+\.(py|yaml))\n", block):
            with (directory / file[1]).open("a", encoding="utf-8") as out:
                out.write(f"{block}\n\n")


def run_dir_with(directory: Path, run_dir: Path) -> Path:
    """A directory in which the document's commands find a run under the name RUN_DIR."""
    (directory / "RUN_DIR").symlink_to(run_dir)
    return directory


@contextmanager
def datasets_of(words: list[str], folder: Path) -> Iterator[None]:
    """In the block there are the datasets that a command reads, of CartPole."""
    found = [
        word.partition("algo.replay.path=")[2].strip("{}") for word in words if word.startswith("algo.replay.path=")
    ]
    names = [part.partition(":")[0].strip() for word in found for part in word.split(",")]
    paths = [Path(stored(folder / "made", episodes([4], *CARTPOLE), *CARTPOLE)).rename(folder / name) for name in names]
    yield
    for path in paths:
        shutil.rmtree(path)


@pytest.fixture(scope="module")
def checked() -> set[frozenset[str]]:
    """The words of the launch commands that were tried."""
    return set()


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("docs")
    words = [f"{key}={value}" for key, value in SMALL.items()]
    assert launch.main(["env=CartPole-v1", *words, *FEW_UPDATES, f"log_dir={folder}"]) == 0
    return folder / "run_0"


class Untimed:
    """In the place of the process that times environments: one of them, in this process."""

    known: ClassVar[dict[str, tuple[Space, Space]]] = {}

    def __init__(self, env: EnvConfig, n_all: int, n: int, timeout_s: float = 60.0) -> None:
        config = replace(env, backend=fixed_backend(env, n_all), n_threads=1)
        if repr(config) not in self.known or not str(env.id).startswith("ALE/"):  # a game takes 0.2 s
            with closing(make_envs(config, 1, [0])) as envs:
                self.known[repr(config)] = envs.observation_space, envs.action_space
        self.observation_space, self.action_space = self.known[repr(config)]

    def step_s(self) -> float:
        return 1e-7  # so that no processes are started for it

    def memory_mb(self) -> float:
        return 50.0

    def close(self) -> None:
        """Nothing."""


def chosen_untimed(choose: Callable[..., Any], experiment: Any, affinity: Any, n_workers: int, tune: bool) -> Any:
    """What sampler=auto chooses where all samplers are as fast: for the times, it would make another agent."""
    if tune or experiment.runner.evolves:
        return choose(experiment, affinity, n_workers, tune)
    return auto.SamplerChoice(auto.candidates(experiment.sampler, n_workers)["serial"], "serial: untimed")


@name
def test_python_blocks_run(document: Path, tmp_path: Path, run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run_dir_with(tmp_path, run_dir))
    module = types.ModuleType(f"blocks_of_{document.stem}")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for user in (auto, defaults):
        monkeypatch.setattr(user, "TimingProcess", Untimed)
    for kind in ("for_vectors", "for_continuous"):
        found = getattr(ppo.Config, kind)
        few = {**found.own, "epochs": 1, "minibatches": 2}
        monkeypatch.setattr(ppo.Config, kind, replace(found, batch=BatchSpec(T=32, B=16), own=few))
    for call in (rlframe.train, rlframe.build):
        monkeypatch.setattr(rlframe, call.__name__, partial(call, **{"eval.n_episodes": 2}))
    for number, block in enumerate(blocks(document, "python")):
        n_steps = "1_200" if "dqn" in block else "600"  # DQN learns after 1,000
        short = re.sub(r"\b(n_steps\W+)(\d\d|[2-9])_000\b", rf"\g<1>{n_steps}", block)
        exec(compile(short, f"{document.name}, python block {number}", "exec"), vars(module))


@name
def test_launch_commands_make_a_configuration(
    document: Path,
    tmp_path: Path,
    run_dir: Path,
    checked: set[frozenset[str]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(run_dir_with(tmp_path, run_dir))
    save_files(document, tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr(hardware, "_choice_for", partial(chosen_untimed, hardware._choice_for))
    for module in (auto, defaults):
        monkeypatch.setattr(module, "TimingProcess", Untimed)
    monkeypatch.setattr(tuning, "_measure", lambda experiment, affinity, ways: {str(way): 1.0 for way in ways})
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    monkeypatch.setattr(cluster, "imported", lambda: None)  # Ray, which the tests do not need
    for words in commands(document, "rlframe.launch"):
        families = [word.removeprefix("experiment=").partition("/")[0] for word in words]
        if any(name in families and importlib.util.find_spec(name) is None for name in ("mujoco", "minatar")):
            continue  # extras that the tests do not need
        if frozenset(words) in checked:  # on another page
            continue
        if not list(tmp_path.glob("*.*")):  # it needs no file of this page
            checked.add(frozenset(words))
        shared = ["affinity=none"] if n_cpus() == 1 and not any(word.startswith("affinity=") for word in words) else []
        with datasets_of(words, tmp_path):
            given = [*dict.fromkeys([*words, *shared, "dry_run=true"])]
            assert launch.main(given) == 0, (words, capsys.readouterr().err)
    for file in tmp_path.glob("*.py"):
        sys.modules.pop(file.stem, None)


@pytest.mark.slow
def test_commands_of_the_tutorials_train(tmp_path: Path) -> None:
    given = []
    for document in TUTORIALS:
        save_files(document, tmp_path)
        given += [dict(word.split("=", 1) for word in words) for words in commands(document, "rlframe.launch")]
    with_replay = {"algo.learning_starts", "algo.double"}
    given = [keys | ({"algo.learning_starts": "500"} if with_replay & keys.keys() else {}) for keys in given]
    samplers = [{"sampler": keys.get("sampler", "serial")} for keys in given]
    runs = [{**given[n], **SMALL, **samplers[n], "log_dir": "runs", "run_ID": str(n)} for n in range(len(given))]
    program = (
        "import sys; from rlframe.launch import main; sys.exit(sum(main(words.split()) for words in sys.argv[1:]))"
    )
    done = run_python(  # a separate process finds the files in its working directory, as python -m does
        [sys.executable, "-c", program, *[" ".join(f"{k}={v}" for k, v in keys.items()) for keys in runs]],
        cwd=tmp_path,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert len(runs) == 22
    assert "env/place" in (tmp_path / "runs/run_0/progress.csv").read_text()


def test_evaluate_commands_run(
    tmp_path: Path, run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(run_dir_with(tmp_path, run_dir))
    for words in commands(ROOT / "docs/getting_started.md", "rlframe.evaluate"):
        if any(word.startswith("video=") for word in words):
            pytest.importorskip("imageio")
            pytest.importorskip("pygame")
        assert evaluate.main(words) == 0, capsys.readouterr().err
    assert (tmp_path / "summary.json").is_file()


def test_plot_commands_parse(tmp_path: Path, run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run_dir_with(tmp_path, run_dir))
    found = commands(ROOT / "README.md", "rlframe.plot")
    assert [plot.parse(words).dirs for words in found] == [(Path("RUN_DIR"),)]


@name
def test_links_lead_to_files(document: Path) -> None:
    for target, anchor in re.findall(r"\]\(([^)#]*)#?([^)]*)\)", document.read_text(encoding="utf-8")):
        if not target.startswith("https://"):
            path = document.parent / target if target else document
            assert path.exists(), f"{document.name}: {target}"
            assert not anchor or anchor in anchors(path), f"{document.name}: {target}#{anchor}"


def anchors(page: Path) -> list[str]:
    """What headings of a page can be linked by."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return [re.sub(r"[^\w\- ]", "", each).strip().lower().replace(" ", "-") for each in headings]


@pytest.mark.parametrize("algo", module_names("rlframe.algos"))
def test_the_page_of_an_algorithm_has_its_keys_metrics_and_references(algo: str) -> None:
    page = (ROOT / f"docs/algorithms/{algo}.md").read_text(encoding="utf-8")
    for heading, has in (("Keys", f"<!-- keys: {algo} -->"), ("Metrics", "<!-- metrics: "), ("References", "\n- ")):
        assert has in page.partition(f"## {heading}\n")[2].partition("\n## ")[0], heading


def site_tables() -> Any:
    spec = importlib.util.spec_from_file_location("site_tables", ROOT / "docs/site_tables.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "given",
    [
        {"sampler": "gpu", "runner": "async_rl"},
        {"sampler": "ray", "algo": "dqn", "algo.replay": "ray"},
        {"runner": "offline_rl", "algo": "dqn", "algo.replay": "dataset"},
        {"runner": "evolution", "algo": "es"},
    ],
)
def test_the_page_of_keys_has_all_but_those_of_algorithms(given: dict[str, str]) -> None:
    page = site_tables().on_page_markdown((ROOT / "docs/reference/keys.md").read_text(encoding="utf-8"))
    keys = [key for key, x in known_keys(Experiment, given).items() if not isinstance(x, Part | type)]
    own = [key for key in keys if not re.match(r"algo\.(?!replay\.)|sampler\.inner\.", key)]
    assert [key for key in own if f"`{key}`" not in page] == []


def test_a_default_of_minus_one_is_no_auto() -> None:
    assert "| `algo.munchausen_clip` | `-1.0` |" in site_tables().keys("dqn")


def test_the_test_files_of_the_fault_matrix_exist() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    found = re.findall(r"`(tests/[\w/]+\.py)`", text)
    assert len(found) > 30
    assert [path for path in found if not (ROOT / path).exists()] == []


@pytest.mark.slow
def test_the_site_builds_without_a_warning_and_loads_nothing_from_the_network(tmp_path: Path) -> None:
    for package in ("mkdocs", "material", "mkdocstrings"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed: pip install -e '.[docs]'")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr, done.stderr
    for page in (tmp_path / "site").rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        loaded = re.findall(r"<(?:script|img|iframe)\b[^>]*\bsrc=[\"']?([^\"' >]+)", text)
        loaded += re.findall(r"<link\b[^>]*\bhref=[\"']?([^\"' >]+)", text)
        assert [target for target in loaded if re.match(r"(https?:)?//", target)] == [], page.name
        assert "<!-- keys" not in text, page.name
        assert "iframe-worker.js" in " ".join(loaded), "search of a page opened as a file needs it"
    index = (tmp_path / "site/search/search_index.js").read_text(encoding="utf-8")
    assert index.startswith("var __index = "), "pages opened as files cannot read JSON"
    assert "gae_lambda" in index
    assert "algo.gae_lambda" in (tmp_path / "site/algorithms/ppo.html").read_text(encoding="utf-8")
    assert "MinibatchRlEval" in (tmp_path / "site/reference/runners.html").read_text(encoding="utf-8")


@pytest.mark.quick
@pytest.mark.parametrize("algo", ["ppo", "a2c", "pg"])
def test_every_metric_of_a_run_is_explained(algo: str, tmp_path: Path) -> None:
    words = [f"{key}={value}" for key, value in SMALL.items()] + (FEW_UPDATES if algo == "ppo" else [])
    assert launch.main(["env=CartPole-v1", f"algo={algo}", *words, f"log_dir={tmp_path}"]) == 0
    header, _ = read_csv(tmp_path / "run_0/progress.csv")
    assert "episode/return_mean" in header
    assert [column for column in header if column not in METRICS and not column.startswith("env/")] == []


def test_the_table_of_names_in_other_frameworks_names_our_metrics() -> None:
    text = (ROOT / "docs/guides/metrics.md").read_text(encoding="utf-8")
    table = text.partition("## Names in other frameworks")[2].partition("##")[0]
    ours = [name for cell in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE) for name in re.findall("`(.*?)`", cell)]
    assert len(ours) > 20
    assert [metric for metric in ours if metric not in METRICS] == []


def test_the_atari_page_has_every_option_with_its_default() -> None:
    page_text = (ROOT / "docs/guides/atari.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`.*?) \| (.*?) \|", page_text, re.MULTILINE)
    page = {
        option.strip("` "): default
        for options, defaults in rows[1:]
        for option, default in zip(
            options.split(","), defaults.split(", ") if "," in options else [defaults], strict=True
        )
    }
    code = {option: str(default).lower() for option, default in atari._OPTIONS.items()}
    del page["num_threads"], code["num_threads"]  # depends on the machine
    assert page == code


def test_the_results_name_every_preset() -> None:
    text = (ROOT / "docs/results.md").read_text(encoding="utf-8")
    assert [preset for preset in preset_names() if f"`{preset}`" not in text] == []


def test_the_readme_has_at_most_ten_results() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert 0 < sum(f"| `{preset}` |" in text for preset in preset_names()) <= 10


def test_the_table_of_extras_has_every_extra_for_users() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    page = (ROOT / "docs/getting_started.md").read_text(encoding="utf-8")
    listed = {name for row in re.findall(r"^\| (`.+?`) \|", page, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)}
    assert project["optional-dependencies"].keys() - {"all", "bench", "dev", "docs"} - listed == set()
