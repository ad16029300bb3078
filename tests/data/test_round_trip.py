"""Round trip of Pong: what the sampler played, read back bit for bit here and by Minari."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlframe import evaluate, launch
from rlframe.core.types import Samples
from rlframe.data import open_dataset
from rlframe.evaluation.recording import EvaluationRecorder
from rlframe.runners.recording import Recorder

Rows = tuple[np.ndarray, ...]  # observation [T+1, ...], action, reward, terminated, truncated


def whole_episodes(played: list[Samples]) -> Iterator[tuple[int, Rows]]:
    """Environment and rows of every whole episode in batches, row by row."""
    running: dict[int, list[Rows]] = {}
    for samples in played:
        inputs = samples.inputs
        for t, b in np.argwhere(samples.valid):
            columns = (inputs.observation, samples.action, samples.reward, samples.terminated, samples.truncated)
            running.setdefault(int(b), []).append(tuple(np.asarray(x[t, b]) for x in columns))
            if samples.terminated[t, b] or samples.truncated[t, b]:
                seen, *others = map(np.stack, zip(*running.pop(int(b)), strict=True))
                yield int(b), (np.concatenate([seen, inputs.observation[t + 1, b][None]]), *others)


def bits(rows: Rows) -> bytes:
    return b"|".join(np.ascontiguousarray(x).tobytes() for x in rows)


@pytest.mark.slow
@pytest.mark.parametrize("by", ["training", "evaluation"])
def test_pong_is_read_back_bit_for_bit_here_and_by_minari(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    import minari

    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    played: list[Samples] = []
    recorder = Recorder if by == "training" else EvaluationRecorder
    original = recorder.on_batch

    def on_batch(self: Any, samples: Samples) -> None:
        played.append(samples.numpy().map(np.copy))
        original(self, samples)

    monkeypatch.setattr(recorder, "on_batch", on_batch)
    words = ["algo=ppo", "env=ALE/Pong-v5", "env.max_episode_steps=150", "sampler=serial", "sampler.batch_T=64"]
    words += [
        "sampler.batch_B=2",
        "eval.n_episodes=0",
        "affinity=none",
        "log_level=WARNING",
        f"log_dir={tmp_path}/runs",
    ]
    words += ["runner.n_steps=1000", "runner.log_interval_steps=1000", "algo.epochs=1", "record_compression=lz4"]
    name = "pong/ppo-v0"
    assert launch.main([*words, f"record={name if by == 'training' else 'pong/other-v0'}"]) == 0
    if by == "evaluation":
        assert evaluate.main([f"{tmp_path}/runs/run_0", "n_episodes=4", "n_envs=2", f"dataset={name}"]) == 0
    expected = sorted(bits(rows) for _, rows in whole_episodes(played))
    assert len(expected) >= 4
    own = [(e.observation, e.action, e.reward, e.terminated, e.truncated) for e in open_dataset(name).episodes()]
    assert sorted(map(bits, own)) == expected
    theirs = minari.load_dataset(name)
    found = [(e.observations, e.actions, e.rewards, e.terminations, e.truncations) for e in theirs]
    assert sorted(map(bits, found)) == expected
    assert theirs.env_spec.id == "ALE/Pong-v5"
    assert all(rows[0].shape == (151, 4, 84, 84) and rows[4][-1] for rows in own)
