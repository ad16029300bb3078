"""A saved replay goes on exactly, also through a snapshot's format, and after the environments began anew."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rlframe.core.struct import leaves
from rlframe.record.tree import decode, encode
from rlframe.replay import NStep, Whole
from tests.replay.history import History
from tests.replay.made import replay_for, same

PLANS = [NStep(0.5), NStep(0.5, 3), Whole(5)]


def saved(state: Any) -> Any:
    """As a snapshot gives it back."""
    arrays: dict[str, np.ndarray] = {}
    tree = encode(state, arrays)
    return decode(tree, {name: array.copy() for name, array in arrays.items()})


@pytest.mark.parametrize("n_batches", [2, 9], ids=["part", "full"])
@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize("alpha", [0.0, 0.6])
@pytest.mark.parametrize("config", [{}, {"compress": True}, {"memory": "device"}, {"memory": "disk"}], ids=str)
def test_the_same_is_drawn_after_loading(plan: Any, alpha: float, config: dict[str, Any], n_batches: int) -> None:
    history, rng = History(2, "both"), np.random.default_rng(0)
    one = replay_for(history, plan, L=26, config=config, alpha=alpha, previous=True)
    for _ in range(n_batches):
        one.append(history.batch(4))
        if one.n_choices:
            one.update_priorities(one.sample(8).index, rng.random(8))
    other = replay_for(history, plan, L=26, config=config, alpha=alpha, previous=True, seed=1)
    other.load_state_dict(saved(one.state_dict()))
    assert (one.n_rows, one.n_choices) == (other.n_rows, other.n_choices)
    for _ in range(8):
        batch = history.batch(4)
        one.append(batch)
        other.append(batch)
        a, b = one.sample(8, beta=0.5), other.sample(8, beta=0.5)
        assert same(a, b)
        for replay in (one, other):
            replay.update_priorities(a.index, np.arange(8.0) + 1)
        assert one.newest().tolist() == other.newest().tolist()


def test_after_a_resume_episodes_begin_anew_and_what_ran_is_truncated() -> None:
    history = History(2, ends=0.0)
    replay = replay_for(history, NStep(0.5, 2))
    replay.append(history.batch(4))
    resumed = replay_for(history, NStep(0.5, 2))
    resumed.load_state_dict(saved(replay.state_dict()))
    resumed.append(History(2, ends=0.0, seed=1).batch(4))
    assert resumed.n_rows == 16
    assert resumed.n_choices == 14  # but the newest of each environment
    found = resumed.sample(200)
    at_cut = found.index // 2 == 3
    assert found.bootstrap[at_cut].unique().tolist() == [0.5]
    assert (found.next_inputs.observation[at_cut, 0].int() - 1 == found.index[at_cut] + 2).all()


def test_another_kind_or_size_is_refused() -> None:
    history = History(2)
    state = replay_for(history).state_dict()
    for other in (
        replay_for(history, L=41),
        replay_for(history, alpha=0.6),
        replay_for(history, NStep(0.5, 2)),
        replay_for(History(2, "frames")),
        replay_for(History(3)),
    ):
        with pytest.raises(ValueError, match="the saved replay is a"):
            other.load_state_dict(state)


def test_only_what_is_filled_is_saved() -> None:
    history = History(2)
    replay = replay_for(history, L=4_000)
    replay.append(history.batch(4))
    assert max(x.nbytes for x in leaves(replay.state_dict()["storage"]["observation"][0])) == 5 * 2 * 12
