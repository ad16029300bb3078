"""Algorithms of the user's own: one that its config never makes is named."""

import json
from pathlib import Path

import pytest

import rlframe
from rlframe import launch
from rlframe.core.errors import warn_once

FILE = """
import chz
from rlframe.algos import ppo

class Mine(ppo.PPO):
    pass

@chz.chz
class Config(ppo.Config):
    def {method}(self, agent, batch_spec, n_steps, seed=0):
        return Mine(agent, batch_spec, n_steps, self, seed)
"""


@pytest.mark.parametrize(("method", "n_warnings"), [("make_algoritm", 1), ("make_algorithm", 0)])
def test_an_algorithm_that_its_config_never_makes_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, method: str, n_warnings: int
) -> None:
    file = tmp_path / f"own_{method}.py"
    file.write_text(FILE.format(method=method))
    warn_once.cache_clear()
    words = {"sampler": "serial", "runner.n_steps": 64, "eval.n_episodes": 0, "affinity": "none"}
    rlframe.train(str(file), "CartPole-v1", log_dir=tmp_path / "runs", **words)
    says = f"the config of own_{method} makes rlframe.algos.ppo:PPO, not Mine; see its make_algorithm"
    assert caplog.text.count(says) == n_warnings


def test_a_renamed_or_undecorated_config_is_told_from_a_slip_in_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    decorated = FILE.format(method="make_algorithm").replace("    def make", "    extra: int = 3\n    def make")
    files = {name: tmp_path / f"own_config_{name}.py" for name in ("given", "undecorated")}
    files["given"].write_text(decorated)
    files["undecorated"].write_text(decorated.replace("@chz.chz\n", ""))
    run = tmp_path / "runs/run_0"
    run.mkdir(parents=True)
    config = {"env": "CartPole-v1", "algo": str(files["given"]), "algo.extras": 4, "runner.n_steps": 64, "seed": 0}
    (run / "params.json").write_text(json.dumps({"config": {**config, "sampler.batch_T": 8, "sampler.batch_B": 1}}))
    said = "run_0/params.json does not fit your code as it is now: unknown key algo.extras; did you mean algo.extra?"
    for words, says in {
        f"resume={run} trust=true": said,
        f"algo={files['given']} algo.extras=4": "error: unknown key algo.extras; did you mean algo.extra?",
        f"algo={files['undecorated']} algo.extra=4": "is not decorated, so its fields are no keys; write @chz.chz",
    }.items():
        assert launch.main(words.split()) == 2
        assert says in capsys.readouterr().err
