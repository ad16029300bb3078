"""Descriptions of batches in debug.log: what they say, and when."""

import re
from pathlib import Path

import pytest
import torch

from rlframe.launch import main
from rlframe.runners.described import describe_tree

RUN = (
    "algo=ppo env=CartPole-v1 sampler=serial sampler.batch_T=4 sampler.batch_B=2 algo.minibatches=1 algo.epochs=1 "
    "runner.n_steps=32 runner.log_interval_steps=16 eval.n_episodes=0 model.hidden=[4]"
)


def test_a_description_has_shape_type_range_mean_and_counts_what_is_not_finite() -> None:
    tree = {
        "x": torch.tensor([[1.0, 3.0, float("nan")], [float("inf"), 2.0, float("nan")]]),
        "n": (torch.arange(4, dtype=torch.uint8), torch.zeros(0, 2)),
        "none": torch.full((2,), float("-inf")),
    }
    assert describe_tree(tree, "s") == [
        "  s.x [2, 3] float32: 1 to 3, mean 2, 2 NaN, 1 infinite",
        "  s.n.0 [4] uint8: 0 to 3, mean 1.5",
        "  s.n.1 [0, 2] float32: no finite values",
        "  s.none [2] float32: no finite values, 2 infinite",
    ]


@pytest.mark.parametrize(
    ("level", "expected"), [("DEBUG", ["first batch", "batch until env_steps 24"]), ("INFO", ["first batch"])]
)
def test_the_first_batch_is_described_and_with_debug_one_after_each_row(
    level: str, expected: list[str], tmp_path: Path
) -> None:
    assert main([*RUN.split(), f"log_dir={tmp_path}", f"log_level={level}"]) == 0
    log = (tmp_path / "run_0" / "debug.log").read_text(encoding="utf-8")
    assert re.findall(r"rlframe: (.*batch.*):\n  samples", log) == expected
    assert log.count("samples.reward [4, 2] float32: 1 to 1, mean 1") == len(expected)
