"""A stored snapshot of the present format loads with all its values, so a changed format is noticed (see stored.py)."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlframe.core.struct import as_numpy
from rlframe.record.codec import ChunkedArray
from rlframe.record.snapshot import FORMAT, load_snapshot, read_meta
from tests.record import stored

SNAPSHOT = Path(__file__).parent / f"fixtures/format_{FORMAT}/step_000000000072"


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    if hasattr(one, "shape"):
        if str(one.dtype) == "torch.bfloat16":
            one, other = one.float(), other.float()
        return bool(one.dtype == other.dtype and np.array_equal(as_numpy(one), as_numpy(other)))
    return type(one) is type(other) and bool(one == other)


def test_values_and_meta_are_as_they_were() -> None:
    state, meta = load_snapshot(SNAPSHOT)
    assert meta == read_meta(SNAPSHOT) == stored.META
    assert same({key: state[key] for key in stored.plain()}, stored.plain())
    assert same(load_snapshot(SNAPSHOT, key="agent")[0], stored.plain()["agent"])
    rank_1 = load_snapshot(SNAPSHOT, rank=1)[0]
    assert (rank_1["rank"], rank_1["x"].tolist()) == (1, [1.0, 1.0])


@pytest.mark.parametrize("compress", [False, True])
def test_replay_continues_from_it(compress: bool) -> None:
    if compress:
        pytest.importorskip("lz4")
    lived = stored.history()
    replay = stored.replay(compress, lived)
    replay.load_state_dict(load_snapshot(SNAPSHOT)[0]["compressed" if compress else "replay"])
    for _ in range(9):
        lived.batch(4)
    before = 0 if compress else 2  # rows that the frames of the first stack need
    assert (replay.n_rows, replay.n_choices) == (2 * 25, 2 * (25 - before))
    drawn = replay.sample(50)
    for row, index in enumerate(drawn.index):
        time, env = divmod(int(index), 2)
        for inputs, t in ((drawn.inputs, time), (drawn.next_inputs, time + 1)):
            observation = lived.at(t - before, env)["observation"]
            assert same({key: as_numpy(x[row]) for key, x in inputs.observation.items()}, observation)
    assert drawn.bootstrap.unique().tolist() == [0.5]


def test_large_arrays_are_stored_in_chunks() -> None:
    replay = load_snapshot(SNAPSHOT)[0]["replay"]
    frames = next(part for part in replay["parts"][0]["storage"]["observation"] if "frames" in part)["frames"]
    assert isinstance(frames, ChunkedArray)
    assert len(frames.counts) > 3
