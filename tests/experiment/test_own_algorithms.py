"""Algorithms of the user's own: one that its config never makes is named."""

from pathlib import Path

import pytest

import rlframe
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
