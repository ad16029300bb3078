"""Rows that keep their bits among others are told from rows that do not, and a run says which it has."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import Space, spaces

from rlframe import launch
from rlframe.models import numpy_inference
from rlframe.rollout.inference import rows_keep_their_bits
from tests.experiment.hostile import WORDS
from tests.samplers.made import agent_for

CHOICE = spaces.Discrete(3)
SAYS = "this processor rounds a row differently among other rows"


def by_rows(monkeypatch: pytest.MonkeyPatch, factor: float) -> None:
    """Let the last bits of products in NumPy depend on whether one block is multiplied, or several."""
    affine = numpy_inference.affine

    def changed(*pair: Any) -> Any:
        product = affine(*pair)
        return lambda x: product(x) * (np.float32(factor) if x.ndim == 3 else np.float32(1))

    monkeypatch.setattr(numpy_inference, "affine", changed)


def test_a_change_of_the_last_bit_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    space = spaces.Box(-1, 1, (5,), np.float32)
    by_rows(monkeypatch, 1 + 2.0**-23)
    assert not rows_keep_their_bits(agent_for(space, CHOICE), space, CHOICE, 9)
    assert rows_keep_their_bits(agent_for(space, CHOICE), space, CHOICE, 4), "4 rows are never split"


SPACES: dict[str, Space] = {
    "unbounded": spaces.Box(-np.inf, np.inf, (3,), np.float64),
    "choices": spaces.Tuple([spaces.Discrete(1), spaces.MultiDiscrete([2, 3]), spaces.MultiBinary(4)]),
    "image": spaces.Box(0, 255, (84, 84, 3), np.uint8),
    "whole": spaces.Box(-3, 7, (2,), np.int64),
}


@pytest.mark.parametrize("name", SPACES)
def test_what_is_tried_lies_in_the_space(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    space = spaces.Dict({"a": SPACES[name], "b": spaces.Box(0.5, 0.75, (2,), np.float32)})
    seen, agent = [], agent_for(space, CHOICE)
    monkeypatch.setattr(agent, "numpy_step", lambda n: None)  # all act in torch, by step
    step = agent.step
    monkeypatch.setattr(agent, "step", lambda inputs, *rest: seen.append(inputs.numpy()) or step(inputs, *rest))
    rows_keep_their_bits(agent, space, CHOICE, 6)
    assert len(seen) == 1 + 2 + 1, "all 8, two blocks of 4, one of 8"
    observed = seen[0].observation["b"]
    assert observed.min() >= 0.5
    assert observed.max() <= 0.75
    if isinstance(SPACES[name], spaces.Box):
        low, high = SPACES[name].low, SPACES[name].high  # type: ignore[attr-defined]
        assert ((seen[0].observation["a"] >= low) & (seen[0].observation["a"] <= high)).all()


def test_a_run_says_that_samplers_differ_only_where_they_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for keeps in (True, False):
        monkeypatch.setattr("rlframe.experiment.build.rows_keep_their_bits", lambda *_, keeps=keeps: keeps)
        words = [*WORDS, "sampler.batch_B=8", "affinity=none", f"log_dir={tmp_path / str(keeps)}"]
        assert launch.main(list({word.partition("=")[0]: word for word in words}.values())) == 0
        assert (SAYS in capsys.readouterr().out) != keeps
