"""The documents keep their word: code blocks run, commands parse, links lead somewhere, tables are the code's."""

import re
import shlex
import sys
import types
from pathlib import Path

import pytest

from rlframe import evaluate, launch, plot
from rlframe.envs import atari
from rlframe.experiment.presets import preset_names
from rlframe.record import METRICS, metrics_table
from rlframe.record.writers import read_csv
from rlframe.rollout.env_pool import Supervision
from rlframe.samplers import auto
from tests.fork_server import run_python

ROOT = Path(__file__).parents[1]
EXTEND = ROOT / "docs/extend.md"
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SMALL = {"runner.n_steps": "900", "runner.log_interval_steps": "900", "eval.n_episodes": "1", "sampler.batch_T": "8"}
SMALL |= {"sampler": "serial"}  # spared the timing
name = pytest.mark.parametrize("document", DOCUMENTS, ids=[path.name for path in DOCUMENTS])


def blocks(document: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", document.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


def commands(document: Path, module: str) -> list[list[str]]:
    """The words after `python -m MODULE` of every command line in the document's sh blocks, comments left out."""
    lines = [line for block in blocks(document, "sh") for line in block.splitlines()]
    words = [shlex.split(line, comments=True) for line in lines]
    return [found[3:] for found in words if found[:3] == ["python", "-m", module]]


def save_mine(directory: Path) -> None:
    """Write mine.py as a reader of extend.md does: the blocks that begin with its name, one after another."""
    own = [block for block in blocks(EXTEND, "python") if block.startswith("# mine.py\n")]
    (directory / "mine.py").write_text("\n".join(own), encoding="utf-8")


@pytest.fixture
def in_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short run, in a directory of the name that the documents use."""
    folder = tmp_path_factory.mktemp("docs")
    words = [f"{key}={value}" for key, value in SMALL.items()]
    assert launch.main(["env=CartPole-v1", *words, f"log_dir={folder}"]) == 0
    return (folder / "run_0").rename(folder / "RUN_DIR")


@name
def test_python_blocks_run(document: Path, in_tmp: Path, run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (in_tmp / "RUN_DIR").symlink_to(run_dir)
    module = types.ModuleType(f"blocks_of_{document.stem}")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    for number, block in enumerate(blocks(document, "python")):
        exec(compile(block, f"{document.name}, python block {number}", "exec"), vars(module))


@name
def test_launch_commands_make_a_configuration(
    document: Path, run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(run_dir.parent)
    save_mine(run_dir.parent)
    monkeypatch.setattr(sys, "path", [str(run_dir.parent), *sys.path])
    fork = Supervision()  # a spawned process would spend 2 s on importing what mine.py does
    monkeypatch.setattr(auto, "Supervision", lambda *_, **__: fork)
    for words in commands(document, "rlframe.launch"):
        assert launch.main([*dict.fromkeys([*words, "dry_run=true"])]) == 0, (words, capsys.readouterr().err)
    sys.modules.pop("mine", None)


def test_commands_of_extend_train(in_tmp: Path) -> None:
    save_mine(in_tmp)
    given = [dict(word.split("=", 1) for word in words) for words in commands(EXTEND, "rlframe.launch")]
    runs = [{**keys, **SMALL, "log_dir": "runs", "run_ID": str(index)} for index, keys in enumerate(given)]
    program = (
        "import sys; from rlframe.launch import main; sys.exit(sum(main(words.split()) for words in sys.argv[1:]))"
    )
    done = run_python(  # of its own, for mine.py is imported; python -m finds it in the working directory, as here
        [sys.executable, "-c", program, *[" ".join(f"{k}={v}" for k, v in keys.items()) for keys in runs]],
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert len(runs) == 3
    assert "env/place" in (in_tmp / "runs/run_0/progress.csv").read_text()


def test_evaluate_commands_of_the_readme_run(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(run_dir.parent)
    for words in commands(ROOT / "README.md", "rlframe.evaluate"):
        if any(word.startswith("video=") for word in words):
            pytest.importorskip("imageio")
            pytest.importorskip("pygame")
        assert evaluate.main(words) == 0, capsys.readouterr().err
    assert (run_dir.parent / "summary.json").is_file()


def test_plot_commands_of_the_readme_parse(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run_dir.parent)
    found = commands(ROOT / "README.md", "rlframe.plot")
    assert [plot.parse(words).dirs for words in found] == [(Path("RUN_DIR"),)]


@name
def test_links_lead_to_files(document: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", document.read_text(encoding="utf-8")):
        if not target.startswith("https://"):
            assert (document.parent / target).exists(), f"{document.name}: {target}"


def test_the_metrics_page_is_the_table_of_the_code() -> None:
    page = (ROOT / "docs/metrics.md").read_text(encoding="utf-8")
    assert page[page.index("| name |") :] == metrics_table(), "write metrics_table() into docs/metrics.md again"


@pytest.mark.quick
@pytest.mark.parametrize("algo", ["ppo", "a2c", "pg"])
def test_every_metric_of_a_run_is_explained(algo: str, tmp_path: Path) -> None:
    words = [f"{key}={value}" for key, value in SMALL.items()]
    assert launch.main(["env=CartPole-v1", f"algo={algo}", *words, f"log_dir={tmp_path}"]) == 0
    header, _ = read_csv(tmp_path / "run_0/progress.csv")
    assert "episode/return_mean" in header
    assert [column for column in header if column not in METRICS and not column.startswith("env/")] == []


def test_the_atari_page_has_every_option_with_its_default() -> None:
    rows = re.findall(r"^\| (`.*?) \| (.*?) \|", (ROOT / "docs/atari.md").read_text(encoding="utf-8"), re.MULTILINE)
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


def test_the_readme_names_every_preset() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert [preset for preset in preset_names() if f"`{preset}`" not in text] == []
