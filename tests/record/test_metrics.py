"""Averaging over an interval, and the table of names."""

import math

import pytest
import torch

from rlframe.record.metrics import METRICS, Metrics, metrics_table, over_ranks


def test_flush_means_over_the_interval_and_starts_anew() -> None:
    metrics = Metrics()
    metrics.add({"loss": torch.tensor(1.0, requires_grad=True), "kl": 0.5})
    metrics.add({"loss": torch.tensor(2.0), "kl": 1.5})
    assert metrics.flush() == {"loss": 1.5, "kl": 1.0}
    metrics.add({"loss": 7.0})
    assert metrics.flush() == {"loss": 7.0}
    assert metrics.flush() == {}


def test_an_absent_metric_is_averaged_over_where_it_was() -> None:
    metrics = Metrics()
    for values in ({"a": 1.0}, {"a": 3.0, "b": 10.0}, {"b": torch.tensor(20.0)}):
        metrics.add(values)
    assert metrics.flush() == {"a": 2.0, "b": 15.0}


def test_a_value_overwritten_later_counts_as_it_was() -> None:
    metrics, value = Metrics(), torch.tensor(1.0)
    metrics.add({"a": value})
    value.fill_(100.0)
    assert metrics.flush() == {"a": 1.0}


def test_nothing_that_a_device_still_computes_is_made_a_float_before_flush(monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = Metrics()
    monkeypatch.setattr(torch.Tensor, "is_cpu", False)

    def forbidden(_: torch.Tensor) -> float:
        raise AssertionError("a tensor was read")

    with monkeypatch.context() as patch:
        for name in ("item", "tolist", "__float__", "cpu"):
            patch.setattr(torch.Tensor, name, forbidden)
        metrics.add({"a": torch.tensor(1.0)})
        metrics.add({"a": torch.tensor(3.0)})
    assert metrics.flush() == {"a": 2.0}


def test_tensors_of_a_device_are_added_together_and_a_wrong_one_adds_none(monkeypatch: pytest.MonkeyPatch) -> None:
    metrics = Metrics()
    monkeypatch.setattr(torch.Tensor, "is_cpu", False)
    metrics.add({"a": torch.tensor(2**24 + 1), "b": torch.tensor(0.5)})
    metrics.add({"b": torch.tensor(1.5), "c": torch.tensor([True])})
    with pytest.raises(ValueError, match="'wrong' must be a single number"):
        metrics.add({"d": torch.tensor(1.0), "wrong": torch.zeros(2)})
    saved = Metrics()
    saved.load_state_dict(metrics.state_dict())
    for each in (metrics, saved):
        assert list(each.flush().items()) == [("a", 2.0**24 + 1), ("b", 1.0), ("c", 1.0)]


def test_sums_of_many_small_numbers_keep_their_digits() -> None:
    metrics, value = Metrics(), torch.tensor(0.1)
    for _ in range(20_000):
        metrics.add({"a": value})
    assert metrics.flush()["a"] == pytest.approx(float(value), rel=1e-9)


def test_adding_inside_and_outside_inference_mode_mixes() -> None:
    metrics = Metrics()
    with torch.inference_mode():
        metrics.add({"a": torch.ones(())})
    metrics.add({"a": torch.zeros(())})
    assert metrics.flush() == {"a": 0.5}


def test_integers_bools_and_one_element_tensors_count_as_numbers() -> None:
    metrics = Metrics()
    metrics.add({"a": torch.tensor([2]), "b": torch.tensor(True), "c": True})
    assert metrics.flush() == {"a": 2.0, "b": 1.0, "c": 1.0}


def test_nan_is_kept() -> None:
    metrics = Metrics()
    metrics.add({"a": torch.tensor(math.nan), "b": 1.0})
    metrics.add({"a": 1.0})
    row = metrics.flush()
    assert math.isnan(row["a"])
    assert row["b"] == 1.0


def test_a_tensor_of_many_numbers_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"'loss' must be a single number, got shape \(2,\)"):
        Metrics().add({"loss": torch.zeros(2)})


def test_the_table_has_every_name_once_on_a_line_of_its_own() -> None:
    lines = metrics_table().splitlines()
    assert len(lines) == len(METRICS) + 2
    assert lines[2].startswith("| `env_steps` | ")
    assert all("|" not in meaning for meaning in METRICS.values())


def test_metrics_of_ranks_become_what_their_names_end_in() -> None:
    own = ({"algo/td_max": 1.0, "algo/td_min": -2.0, "algo/n_sum": 3.0, "algo/loss": 1.0},)
    others = ({"algo/td_max": 9.0, "algo/td_min": 0.0, "algo/n_sum": 4.0, "algo/loss": 2.0},)
    assert over_ranks(own + others) == {"algo/td_max": 9.0, "algo/td_min": -2.0, "algo/n_sum": 7.0, "algo/loss": 1.5}
    assert math.isnan(over_ranks([{"algo/td_max": 1.0}, {"algo/td_max": math.nan}])["algo/td_max"])
