"""Directories made to do harm: every command ends within seconds, in little memory, and touches nothing outside."""

from __future__ import annotations

import itertools
import pickle
import struct
from pathlib import Path

import pytest

from rlframe import launch
from tests.experiment.hostile import (
    COMMANDS,
    DEEP,
    EMPTY_LISTS,
    HEADER,
    SECRET,
    SPECIAL,
    YAML_BOMB,
    ZERO,
    Attack,
    Bomb,
    array,
    both,
    bounded,
    config,
    holes,
    last_to,
    linked,
    manifest,
    many_snapshots,
    repeated,
    replaced,
    snapshots_elsewhere,
    study,
    tree,
    write,
)
from tests.variants import variants

# name: (attack, commands, statuses that are right); what ends well does so without harm.
ERRORS, ANY = (1, 2), (0, 1, 2)
ATTACKS: dict[str, tuple[Attack, tuple[str, ...], tuple[int, ...]]] = {
    # params.json
    **{
        f"params {name}": (write("params.json", content), ("evaluate", "resume", "again"), ERRORS)
        for name, content in {
            "empty": b"",
            "list": b"[]",
            "nothing": b"{}",
            "deep": DEEP,
            "deep config": '{"config": ' + DEEP,
            "text": b"\xff\xfe\x00",
            "digits": b"9" * 5_000,
            "number": b'{"config": 1e99999}',
            "lists": EMPTY_LISTS,
            "pickle": pickle.dumps(Bomb()),
            "null": b'{"config": null}',
            "keys": b'{"config": {' + b",".join(b'"k%d": 1' % i for i in range(100_000)) + b"}}",
            "long key": b'{"config": {"' + b"k" * 10**6 + b'": 1}}',
            "long value": b'{"config": {"env": "' + b"v" * 10**6 + b'"}}',
        }.items()
    },
    "params of 20 GB": (holes("params.json", 20 * 10**9), ("evaluate", "resume", "again", "plot"), ANY),
    **{
        f"params as {name}": (replaced("params.json", by), ("evaluate", "resume", "again", "plot"), ANY)
        for name, by in SPECIAL.items()
    },
    # sizes and code in the config
    **{
        f"config {changes}": (config(**changes), ("evaluate", "resume", "again"), ERRORS)
        for changes in (
            {"runner__n_slots": 10**9, "runner": "async_rl"},
            {"model__hidden": [16_000, 16_000]},
            {"model__hidden": "[16000,16000]"},
            {"model__hidden": [8_000] * 4},
            {"model__hidden": [1] * 1_000},
            {"model__memory": "lstm", "model__memory_size": 10**6},
            {"model__memory": "gru", "model__memory_size": 15_000},
            {"sampler__batch_B": 10**9},
            {"sampler__batch_T": 10**15},
            {"sampler__batch_T": "1e300"},
            {"sampler": "cpu", "sampler__n_workers": 10**9},
            {"eval__n_envs": 10**9},
            {"eval__n_workers": 10**9},
            {"world_size": 10**9},
            {"threads": 10**9},
            {"algo__minibatches": 10**18},
            {"algo__epochs": -1},
            {"algo__learning_rate": "nan"},
            {"env": "ALE/Pong-v5", "env_kwargs": {"img_height": 10**5, "img_width": 10**5}},
            {"env": "ALE/Pong-v5", "env_kwargs": {"stack_num": 10**9}},
            {"env": "os:system", "env_kwargs": {"command": "touch x"}},
            {"env": "../../x"},
            {"env": ""},
            {"env": 3},
            {"env": ["CartPole-v1"]},
            {"env_kwargs": [1, 2]},
            {"env_kwargs": {"x": [1] * 20_000}},
            {"env_kwargs": "{a: &a [1, 1], b: [*a, *a]}"},
            {"env_kwargs": {"xml_file": "/etc/passwd"}},
            {"algo": "evil.algo"},
            {"algo": "./evil.py"},
            {"algo": None},
            {"algo": {"a": 1}},
            {"model__encoder": "evil:Encoder"},
            {"precision": "evil"},
            {"seed": -1},
            {"seed": 1.5},
            {"seed": "os:getpid"},
            {"no_such_key": 1},
            {"__class__": "x"},
            {"algo__replay": "make"},
        )
    },
    **{
        f"{key} resumed": (config(**{key: "os:system"}), ("resume", "again"), ERRORS)
        for key in ("callbacks", "loggers")
    },
    "callbacks evaluated": (config(callbacks="os:system", loggers="os:system"), ("evaluate",), (0,)),  # without them
    **{
        f"place {changes}": (config(**changes), ("evaluate", "resume"), ANY)
        for changes in (
            {"name": "../../../evil"},
            {"name": "x" * 10_000},
            {"log_dir": "/etc"},
            {"log_dir": "../outside"},
            {"init": "/dev/zero"},
            {"run_ID": 10**9},
            {"device": "cuda:99"},
            {"affinity": "9" * 1_000 + "cpu"},
        )
    },
    # progress.csv
    **{
        f"progress {name}": (write("progress.csv", content), ("plot", "resume"), ANY)
        for name, content in {
            "of 500,000 rows": HEADER + b"1,\n" * 500_000,
            "of 60 MB in one line": b"1," * 30_000_000,
            "of 60 MB in 100 columns": b",".join(b"c%d" % i for i in range(100))
            + b"\n"
            + (b"7," * 99 + b"7\n") * 3 * 10**5,
            "with 400,000 columns": b"env_steps" + b"," * 400_000 + b"\n" + (b"1" + b"," * 400_000 + b"\n") * 3,
            "of NUL": bytes(10**6),
            "of quotes": b'"' * 10**6 + b"\n",
            "with an open quote": b'"env_steps,loss\n10,0.5\n20,0.25\n',
            "without numbers": HEADER + b"x,y\nz,\n",
            "of huge numbers": HEADER + b"1e999,-1e999\nnan,inf\n" + b"9" * 5_000 + b",1\n",
            "of bytes": bytes(range(256)) * 1_000,
        }.items()
    },
    "progress of 20 GB": (holes("progress.csv", 20 * 10**9), ("plot", "resume"), ERRORS),
    **{
        f"progress as {name}": (replaced("progress.csv", by), ("plot", "resume", "evaluate"), ANY)
        for name, by in SPECIAL.items()
    },
    # other files of a run
    **{
        f"{file} as {name}": (replaced(file, by), ("resume", "evaluate", "plot"), ANY)
        for file in ("debug.log", "lock.json", ".new-params.json", ".new-progress.csv")
        for name, by in SPECIAL.items()
    },
    **{
        f"lock {name}": (write("lock.json", content), ("resume",), (0,))
        for name, content in {
            "lists": EMPTY_LISTS,
            "of process 1": '{"host": "x", "pid": 1, "started": 0, "command": "\\u001b[2J"}',
            "of process -1": '{"host": "x", "pid": -1, "started": 1e300, "command": "y"}',
            "digits": b"9" * 60_000,
        }.items()
    },
    # the manifest
    **{
        f"manifest {name}": (write("manifest.json", content), ("evaluate", "resume", "export"), ANY)
        for name, content in {
            "empty": b"",
            "deep": DEEP,
            "lists": EMPTY_LISTS,
            "pickle": pickle.dumps(Bomb()),
            "null": b"null",
        }.items()
    },
    "manifest of 20 GB": (holes("manifest.json", 20 * 10**9), ("evaluate", "resume"), ANY),
    **{
        f"manifest with {name}": (manifest(change), ("evaluate", "resume"), ANY)
        for name, change in {
            "no ranks": lambda content: content.update(ranks=[]),
            "a million ranks": lambda content: content.update(ranks=[0] * 10**6),
            "ranks that are no list": lambda content: content.update(ranks={"0": {}}),
            "format 10^300": lambda content: content.update(format=10**300),
            "format -1": lambda content: content.update(format=-1),
            "env_steps -1": lambda content: content["meta"].update(env_steps=-1),
            "env_steps true": lambda content: content["meta"].update(env_steps=True),
            "env_steps 10^400": lambda content: content["meta"].update(env_steps=10**400),
            "bytes 10^30": lambda content: content["ranks"][0].update(bytes=10**30),
            "bytes text": lambda content: content["ranks"][0].update(bytes="x"),
            "sha256 3": lambda content: content["ranks"][0].update(sha256=3),
            "large list": lambda content: content["ranks"][0].update(large=[]),
            "large of text": lambda content: content["ranks"][0].update(large={"state.x": "y"}),
            "a tree of text": lambda content: content["ranks"][0].update(tree="x"),
        }.items()
    },
    **{
        f"state with {name}": (tree(node), ("evaluate", "resume"), ERRORS)
        for name, node in {
            "an unknown tag": {"call": "os.system"},
            "a huge int": {"int": "9" * 10**6},
            "a huge float": {"float": "9" * 10**6},
            "text as int": {"int": "x"},
            "a missing tensor": {"tensor": "nothing", "dtype": "float32", "shape": [2]},
            "dtype object": {"array": "nothing", "dtype": "object", "shape": []},
            "pairs of one": {"pairs": [[1]]},
            "keys that are lists": {"pairs": [[[1], 2]]},
            "a million entries": [0] * 10**6,
            "a tuple": {"tuple": []},
            "nothing": None,
        }.items()
    },
    **{
        f"array with {name}": (array(**facts), ("evaluate", "resume"), ERRORS)
        for name, facts in {
            "a chunk listed 1,000 times": {"chunks": [["it", 1 << 22]] * 1_000, "shape": [1_000 << 20]},
            "a chunk listed 50 times": {"chunks": [["it", 1 << 22]] * 50, "shape": [50 << 20]},
            "a chunk of 2^40 bytes": {"chunks": [[ZERO, 2**40]], "shape": [2**38]},
            "a path": {"chunks": [["../../../outside", 1 << 22]]},
            "a negative size": {"chunks": [[ZERO, -4]]},
            "a negative shape": {"shape": [-1, -(1 << 20)]},
            "a hundred dimensions": {"shape": [1 << 20, *[1] * 99]},
            "dtype object": {"dtype": "object"},
        }.items()
    },
    "an array named 1,000 times": (repeated(1_000), ("evaluate", "resume"), ERRORS),
    # arrays.safetensors
    **{
        f"arrays {name}": (write("arrays.safetensors", content), ("evaluate", "resume", "init"), ANY)
        for name, content in {
            "empty": b"",
            "pickle": pickle.dumps(Bomb()),
            "header of 2^60 bytes": struct.pack("<Q", 2**60) + b"{}",
            "header without end": struct.pack("<Q", 100) + b"[" * 100,
        }.items()
    },
    "arrays of 20 GB": (holes("arrays.safetensors", 20 * 10**9), ("evaluate", "resume", "init"), ANY),
    **{
        f"arrays as {name}": (replaced("arrays.safetensors", by), ("evaluate", "resume", "init"), ANY)
        for name, by in SPECIAL.items()
    },
    # the folder of snapshots
    "3,000 empty snapshots": (many_snapshots, ("evaluate", "resume"), ANY),
    "snapshots elsewhere": (snapshots_elsewhere, ("evaluate", "resume"), ERRORS),
    **{
        f"last is {target}": (last_to(target), ("evaluate", "resume"), ANY)
        for target in ("/", "/dev/zero", "../../..", "last", ".")
    },
    # presets
    **{
        f"preset {name}": (write("mine.yaml", content), ("preset",), (2,))
        for name, content in {
            "bomb": YAML_BOMB + "config: {env: CartPole-v1, env_kwargs: *i}",
            "code": "config: !!python/object/apply:os.system ['touch x']",
            "deep": "config: " + DEEP,
            "of 1 MB": "config: {" + "a: 1, " * 180_000 + "}",
            "bytes": b"\xff\xfe\x00\x01",
            "number": "3",
            "list": "config: [1, 2]",
            "numbers as keys": "config: {1: 2}",
            "dates": "config: {seed: 2001-99-99}",
        }.items()
    },
    "preset as fifo": (replaced("mine.yaml", SPECIAL["fifo"]), ("preset",), (2,)),
    "preset as endless": (replaced("mine.yaml", SPECIAL["endless"]), ("preset",), (2,)),
}


SLOW = {"progress of 500,000 rows", "progress of 60 MB in 100 columns", "params keys", "3,000 empty snapshots"}
SLOW |= {"progress with 400,000 columns", "state with a million entries", "preset deep", "manifest null"}
SLOW |= {"array with a chunk listed 50 times", "array with a negative shape", "manifest with a million ranks"}
SLOW |= {"manifest lists", "lock.json as endless", "arrays header without end"}
SLOW |= {f"{file} as {name}" for file in (".new-params.json", "debug.log") for name in SPECIAL if name != "symlink"}
SLOW |= {f".new-progress.csv as {name}" for name in ("loop", "endless", "folder", "hardlink")}
SLOW |= {f"lock.json as {name}" for name in ("loop", "folder", "hardlink")} | {"manifest pickle"}


def every_fourth(names: list[str]) -> list[str]:
    """Of names that begin alike, the first, and every fourth one after it: many are alike."""
    groups = itertools.groupby(sorted(names, key=lambda name: name.split()[0]), lambda name: name.split()[0])
    return [name for _, group in groups for name in [*group][::4]]


FAST = every_fourth([name for name in ATTACKS if name not in SLOW])


@pytest.mark.parametrize("name", variants(ATTACKS, FAST))
def test_no_command_comes_to_harm(name: str, run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    attack, commands, right = ATTACKS[name]
    (run.parent.parent / "outside").write_text(SECRET)
    attack(run)
    for command in commands:
        with bounded():
            status = COMMANDS[command](run)
        captured = capfd.readouterr()
        assert status in right, f"{command}: {captured.out}{captured.err}"
        assert "Traceback" not in captured.out + captured.err
        assert not status or len(captured.err.strip().splitlines()) < 6
        assert "\x1b" not in captured.out + captured.err
        assert (run.parent.parent / "outside").read_text() == SECRET
        assert not Path("/tmp/unpickled").exists()


ARGUMENTS = {"env": "CartPole-v1", "runner.n_steps": "64", "seed": "0"}
DONE = both(  # nothing is left to do
    study(arguments=ARGUMENTS, state="done", has_directory=True), lambda folder: (folder / "run_0").mkdir()
)
STUDIES: dict[str, Attack] = {
    "nine million runs": study(
        *[f"sweep.env_kwargs.k{i}=" + ",".join("123456789") for i in range(8)], "env=CartPole-v1"
    ),
    "foreign code": study("sweep.algo=evil.one,evil.two", "env=CartPole-v1"),
    "a foreign environment": study("sweep.seed=0", "env=os:system"),
    "no sweep": study("env=CartPole-v1", "runner.n_steps=1_024", "sampler=serial", "eval.n_episodes=0"),
    "words that are numbers": study(1, 2, 3),
    "a long word": study("sweep.seed=" + "1" * 10**6, "env=CartPole-v1"),
    "a run outside": study(name="../../outside"),
    "other arguments": study(arguments={"env": "CartPole-v1", "seed": "7"}, state="done"),
    "arguments that are a list": study(arguments=[]),
    "an unknown state": study(state="x", has_directory="y"),
    "a lists record": write("experiment.json", EMPTY_LISTS),
    "a deep record": write("experiment.json", DEEP),
    "a record without runs": write("experiment.json", '{"format": 2, "command": ["sweep.seed=0"], "runs": 3}'),
    "a record of 20 GB": holes("experiment.json", 20 * 10**9),
    "a record as fifo": linked("experiment.json", "fifo"),
    "a run as symlink": both(study(), linked("run_0", "symlink")),
    **{
        f"a run's log as {how}": both(study(), linked("run_0.log", how))
        for how in ("symlink", "fifo", "endless", "loop")
    },
    "a lock as fifo": both(DONE, linked("lock.json", "fifo")),
}


TRAINED = {"a run outside", "an unknown state", "no sweep"}  # slow: a run is started; study/test_queue.py does


@pytest.mark.parametrize("name", variants(STUDIES, STUDIES.keys() - TRAINED))
def test_no_study_comes_to_harm(name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "study"
    folder.mkdir()
    (tmp_path / "outside").write_text(SECRET)
    STUDIES[name](folder)
    with bounded():
        status = launch.main([f"resume={folder}", "affinity=none", "dry_run=true"])
        if status == 0:  # the plan is harmless; now the run itself is kept from its place
            status = launch.main([f"resume={folder}", "affinity=none"])
    captured = capfd.readouterr()
    assert status or name in {*TRAINED, "a lock as fifo"}, captured.out + captured.err
    assert not status or name != "a lock as fifo", "it was taken over"
    assert "Traceback" not in captured.out + captured.err
    assert (tmp_path / "outside").read_text() == SECRET
