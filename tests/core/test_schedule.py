"""Schedules over env_steps."""

import pytest

from rlframe.core.schedule import Linear, annealed


def test_linear_by_hand() -> None:
    schedule = Linear(1.0, 0.2, n_steps=100)
    assert [schedule(0), schedule(50), schedule(100)] == pytest.approx([1.0, 0.6, 0.2])


def test_linear_is_constant_after_its_end_and_before_its_start() -> None:
    schedule = Linear(1.0, 0.2, n_steps=100)
    assert schedule(10_000) == pytest.approx(0.2)
    assert schedule(-5) == 1.0


def test_linear_may_rise() -> None:
    assert Linear(0.4, 1.0, n_steps=10)(5) == pytest.approx(0.7)


def test_linear_without_length_is_refused() -> None:
    with pytest.raises(ValueError, match="n_steps=0 of a schedule must be > 0"):
        Linear(1.0, 0.0, n_steps=0)


def test_constant_stays() -> None:
    schedule = annealed("constant", 3e-4, n_steps=100)
    assert schedule(0) == schedule(73) == schedule(1000) == 3e-4


def test_linear_anneals_to_zero() -> None:
    schedule = annealed("linear", 3e-4, n_steps=100)
    assert schedule(50) == pytest.approx(1.5e-4)
    assert schedule(100) == 0


def test_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="schedule='cosine'"):
        annealed("cosine", 1.0, n_steps=100)
