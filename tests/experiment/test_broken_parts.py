"""Parts of a user's own that fail: one line that names the part and what it was asked; and none is called unseen."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlframe import launch
from tests.experiment.broken_parts import CALLED
from tests.experiment.hostile import WORDS

HERE = "tests.experiment.broken_parts"
DIVIDED = ": ZeroDivisionError: by my part"
RUNS = {  # the word, and what the error says
    "callbacks=MadeCallback": f"callbacks={HERE}:MadeCallback cannot be made{DIVIDED}",
    "callbacks=SavedCallback": f"callback {HERE}:SavedCallback failed in state_dict{DIVIDED}",
    "callbacks=LogsText": f"callback {HERE}:LogsText failed in on_batch: ValueError: metric 'a/b' must be a single "
    "number, got str 'text'",
    "callbacks=LogsArray": f"callback {HERE}:LogsArray failed in on_batch: ValueError: metric 'a/b_last' must be a "
    "single number, got shape (3,); take its mean",
    "callbacks=SetCallback": "state.callbacks.0.state.a is a set, which a snapshot cannot hold; make it arrays and "
    "plain values",
    "callbacks=LeavingCallback": f"callbacks={HERE}:LeavingCallback cannot be made: SystemExit: 3",
    "callbacks=LeavesAtStart": f"callback {HERE}:LeavesAtStart failed in on_start: SystemExit: 3",
    "callbacks=LeavesAtEnd": f"callback {HERE}:LeavesAtEnd failed in on_end: SystemExit: 3",
    "callbacks=LongName": f"callback {HERE}:LongName failed in on_batch: ValueError: metric 'a/{'b' * 101}' must be "
    "named group/name, such as my_group/name, each of at most 100 characters",
    "sampler.statistics=MadeStatistic": f"sampler.statistics={HERE}:MadeStatistic cannot be made{DIVIDED}",
    "sampler.statistics=AddedStatistic": f"sampler.statistics {HERE}:AddedStatistic failed in add{DIVIDED}",
    "sampler.statistics=ResultStatistic": f"sampler.statistics {HERE}:ResultStatistic failed in result{DIVIDED}",
    "sampler.statistics=TextStatistic": f"sampler.statistics {HERE}:TextStatistic failed in result: ValueError: could "
    "not convert string to float: 'text'",
    "sampler.statistics=SavedStatistic": f"sampler.statistics {HERE}:SavedStatistic failed in state_dict{DIVIDED}",
    "loggers=MadeLogger": f"logger {HERE}:MadeLogger cannot start{DIVIDED}",
    "loggers=WrittenLogger": f"logger {HERE}:WrittenLogger failed in write{DIVIDED}",
    "loggers=CheckedLogger": f"logger {HERE}:CheckedLogger failed in check{DIVIDED}",
    "loggers=LeavingLogger": f"logger {HERE}:LeavingLogger failed in close: SystemExit: 3",
    "loggers=ClosedLogger": f"logger {HERE}:ClosedLogger failed in close{DIVIDED}",
    "model.encoder=MadeEncoder": f"model.encoder={HERE}:MadeEncoder cannot be made{DIVIDED}",
    "model.encoder=AppliedEncoder": f"model.encoder={HERE}:AppliedEncoder failed in forward{DIVIDED}",
    "algo.optimizer=SteppedOptimizer": f"algo.optimizer={HERE}:SteppedOptimizer failed in step{DIVIDED}",
    "algo.optimizer=SavedOptimizer": f"algo.optimizer={HERE}:SavedOptimizer failed in state_dict{DIVIDED}",
    "algo.optimizer=MadeOptimizer": f"algo.optimizer={HERE}:MadeOptimizer cannot be made{DIVIDED}",
    "algo=dqn algo.learning_starts=64 algo.explore=MadeExploration": f"algo.explore={HERE}:MadeExploration cannot be "
    f"made{DIVIDED}",
    "env=Pendulum-v1 model.distribution=MadeDistribution": f"model.distribution={HERE}:MadeDistribution cannot be made"
    f"{DIVIDED}",
}


def launched(words: str, tmp_path: Path) -> int:
    """Train with `KEY=Class` of `broken_parts` last."""
    *others, word = words.split()
    key, _, name = word.partition("=")
    given = ["runner.n_steps=128", *others, f"{key}={HERE}:{name}", f"log_dir={tmp_path}"]
    layered = dict(each.split("=", 1) for each in [*WORDS, *given])
    for absent in [each for each in layered if each in ("algo.minibatches", "algo.epochs") and "algo=dqn" in others]:
        del layered[absent]
    return launch.main([f"{key}={value}" for key, value in layered.items()])


@pytest.mark.parametrize("words", RUNS)
def test_an_error_of_a_part_is_a_line_that_names_it(
    words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launched(words, tmp_path) == 1
    said = capsys.readouterr().err.splitlines()
    assert said[-1] == f"error: {RUNS[words]}"
    assert len(said) < 30, "the traceback of the part alone"


@pytest.mark.parametrize(
    ("part", "method"), [("callbacks=LoadedCallback", "load_state_dict"), ("loggers=TrimmedLogger", "truncate_after")]
)
def test_an_error_of_a_part_on_resume_is_a_line_that_names_it(
    part: str, method: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launched(part, tmp_path) == 0
    capsys.readouterr()
    assert launch.main([f"resume={tmp_path}/run_0", "trust=true"]) == 1
    kind, _, name = part.partition("=")
    assert capsys.readouterr().err.splitlines()[-1] == f"error: {kind[:-1]} {HERE}:{name} failed in {method}{DIVIDED}"


def test_a_logger_that_fails_to_close_does_not_hide_why_the_run_failed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launched(f"callbacks={HERE}:LogsText loggers=ClosedLogger", tmp_path) == 1
    assert capsys.readouterr().err.splitlines()[-1].startswith(f"error: callback {HERE}:LogsText failed in on_batch")
    assert "failed" in json.loads((tmp_path / "run_0/result.json").read_text())["ended"]


@pytest.mark.parametrize(
    "words",
    [
        *("callbacks=NoPart", "loggers=NoPart", "sampler.statistics=NoPart", "model.encoder=NoPart"),
        *("algo.optimizer=NoPart", "algo=dqn algo.explore=NoPart", "env=Pendulum-v1 model.distribution=NoPart"),
        *("env.wrappers=NoPart", "env=NoPart", "eval.function=NoPart"),
    ],
)
def test_a_class_of_another_kind_is_not_called(words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    CALLED.clear()
    assert launched(words, tmp_path) == 2
    assert f"{HERE}:NoPart" in capsys.readouterr().err
    assert CALLED == []


@pytest.mark.parametrize("key", ["callbacks", "loggers", "sampler.statistics", "model.encoder", "algo.optimizer"])
def test_a_function_in_a_classs_place_is_not_called(
    key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert launched(f"{key}=fail", tmp_path) == 2
    assert "subclass of" in capsys.readouterr().err


@pytest.mark.parametrize("word", ["algo={}", "callbacks=[{}:C]", "model.encoder={}:E", "env={}:make"])
@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("x = (", "SyntaxError: '(' was never closed"),
        ("\nimport not_there", "ModuleNotFoundError: No module named 'not_there'"),
    ],
)
def test_a_file_that_cannot_be_imported_is_one_line_with_the_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], word: str, text: str, says: str
) -> None:
    key, name = word.partition("=")[0], f"broken_{word[:3]}_{says[:3]}"  # each imported once
    (path := tmp_path / f"{name}.py").write_text(text)
    assert launch.main([word.format(path), "dry_run=true"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    place = f" ({name}.py, line {len(text.splitlines())})"
    assert line.startswith(f"error: {key}=")
    assert line.endswith(f"importing {path} raised {says}{place}")
