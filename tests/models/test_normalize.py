"""Observation normalisation: exact running statistics that travel with the model."""

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.spaces import Space

from rlframe.core.errors import warn_once
from rlframe.core.struct import map_tree
from rlframe.models.normalize import ObservationNorm, RunningNorm, normalization_of

FLOATS = spaces.Box(-np.inf, np.inf, (2,), np.float32)


def fed(norm: RunningNorm, *batches: np.ndarray) -> RunningNorm:
    for batch in batches:
        norm.update(torch.from_numpy(batch))
    return norm


def test_merged_statistics_are_those_of_all_the_data() -> None:
    rng = np.random.default_rng(0)
    batches = [rng.normal(3, 2, (T, B, 2)).astype(np.float32) for T, B in ((1, 1), (5, 3), (40, 7), (2, 1))]
    norm = fed(RunningNorm((2,)), *batches)
    rows = np.concatenate([batch.reshape(-1, 2) for batch in batches]).astype(np.float64)
    np.testing.assert_allclose(norm.mean, rows.mean(0), rtol=1e-12)
    np.testing.assert_allclose(norm.variance, rows.var(0), rtol=1e-12)
    assert norm.count == len(rows)


def test_statistics_keep_float64_precision_far_from_zero() -> None:
    rng = np.random.default_rng(0)
    batches = [(10_000 + rng.normal(0, 0.1, (100, 1))).astype(np.float32) for _ in range(200)]
    norm = fed(RunningNorm((1,)), *batches)
    rows = np.concatenate(batches).astype(np.float64)
    np.testing.assert_allclose(norm.variance, rows.var(0), rtol=1e-9)  # a float32 sum of squares has lost it


def test_normalised_data_have_mean_0_and_variance_1() -> None:
    data = np.random.default_rng(0).normal([5, -50], [0.1, 20], (1000, 2)).astype(np.float32)
    norm = fed(RunningNorm((2,)), data)
    scaled = norm(torch.from_numpy(data))
    assert scaled.dtype == torch.float32
    torch.testing.assert_close(scaled.mean(0), torch.zeros(2), rtol=0, atol=1e-3)
    torch.testing.assert_close(scaled.std(0, correction=0), torch.ones(2), rtol=1e-3, atol=0)


def test_it_is_the_identity_before_any_update() -> None:
    x = torch.tensor([[-9.0, 0.25]])
    torch.testing.assert_close(RunningNorm((2,))(x), x, rtol=1e-7, atol=0)


def test_outliers_are_cut_at_ten_deviations() -> None:
    norm = fed(RunningNorm((1,)), np.array([[-1.0], [1.0]], np.float32))
    torch.testing.assert_close(norm(torch.tensor([[1e6], [-1e6]])), torch.tensor([[10.0], [-10.0]]), rtol=0, atol=0)


def test_a_constant_is_normalised_to_zero() -> None:
    norm = fed(RunningNorm((1,)), np.full((5, 1), 3.0, np.float32))
    assert norm(torch.tensor([[3.0]])).item() == 0.0


MIXED = spaces.Dict(
    {
        "a.vector": FLOATS,  # a name with a dot, as robots have
        "camera": spaces.Box(0, 255, (16, 16, 3), np.uint8),
        "float_camera": spaces.Box(0, 1, (16, 16, 3), np.float32),
        "class": spaces.Discrete(3),
        "inner": spaces.Tuple((spaces.Box(-np.inf, np.inf, (2, 3)), spaces.Box(-1, 1, ()))),
    }
)


def random_rows(space: Space, *lead: int) -> Any:
    torch.manual_seed(0)
    boxes: dict[str, Any] = {
        "a.vector": 5 + torch.rand(*lead, 2),
        "camera": torch.randint(0, 255, (*lead, 16, 16, 3), dtype=torch.uint8),
        "float_camera": torch.rand(*lead, 16, 16, 3),
        "class": torch.randint(0, 3, lead),
        "inner": (5 + torch.rand(*lead, 2, 3), 5 + torch.rand(*lead)),
    }
    return {key: boxes[key] for key in space.spaces}  # type: ignore[attr-defined]


def test_float_vectors_of_any_rank_are_normalised_and_nothing_else() -> None:
    norm = ObservationNorm(MIXED)
    rows = random_rows(MIXED, 6, 5)
    norm.update(rows)
    scaled = norm(rows)
    for x in (scaled["a.vector"], *scaled["inner"]):
        torch.testing.assert_close(x.mean((0, 1)), torch.zeros(x.shape[2:]), rtol=0, atol=1e-5)
    for key in ("camera", "float_camera", "class"):
        assert scaled[key] is rows[key]


@pytest.mark.parametrize(("dtype", "says"), [(np.int64, 1), (np.float32, 0)])
def test_where_nothing_is_normalised_it_is_told(dtype: Any, says: int, caplog: pytest.LogCaptureFixture) -> None:
    warn_once.cache_clear()
    assert normalization_of(spaces.Box(-9, 9, (3,), dtype), True, ()) is not None
    assert len(caplog.records) == says
    assert normalization_of(spaces.Box(-9, 9, (3,), dtype), False, ()) is None


def test_only_update_changes_the_statistics() -> None:
    norm = ObservationNorm(FLOATS)
    before = map_tree(torch.clone, dict(norm.state_dict()))
    norm.train()(torch.full((4, 2), 7.0))
    for key, value in norm.state_dict().items():
        torch.testing.assert_close(value, before[key], rtol=0, atol=0)


def test_statistics_are_saved_with_the_model() -> None:
    norm = ObservationNorm(MIXED)
    rows = random_rows(MIXED, 6, 5)
    norm.update(rows)
    other = ObservationNorm(MIXED)
    other.load_state_dict(norm.state_dict())
    torch.testing.assert_close(other(rows), norm(rows), rtol=0, atol=0)
