"""The end of a metric's name decides how its values become one number: in the log, and in infos of environments."""

import math

import numpy as np
import pytest
import torch

from rlframe.core.reduction import over_samplers
from rlframe.envs.base import InfoMeans, VectorInfoMeans
from rlframe.record.metrics import Metrics, collect_in, log

VALUES = {"gold": [1.0, 5.0, 3.0], "gold_sum": [1.0, 5.0, 3.0], "gold_last": [1.0, 5.0, 3.0]}
VALUES |= {"gold_min": [1.0, 5.0, 3.0], "gold_max": [1.0, 5.0, 3.0]}
EXPECTED = {"gold": 3.0, "gold_sum": 9.0, "gold_last": 3.0, "gold_min": 1.0, "gold_max": 5.0}


def test_metrics_of_an_interval() -> None:
    metrics = Metrics()
    for row in range(3):
        metrics.add({f"a/{name}": torch.tensor(values[row]) for name, values in VALUES.items()})
        metrics.load_state_dict(metrics.state_dict())
    assert metrics.flush() == {f"a/{name}": value for name, value in EXPECTED.items()}
    assert metrics.flush() == {}


def test_numbers_in_the_info_of_an_environment() -> None:
    means = InfoMeans()
    for row in range(3):
        means.add({name: values[row] for name, values in VALUES.items()})
        saved = means.state()
        means = InfoMeans()
        means.load(saved)
    assert means.pop() == EXPECTED
    assert means.pop() == {}


def test_numbers_in_the_infos_of_a_vector_environment() -> None:
    means = VectorInfoMeans(2)
    for row in range(3):
        infos = {name: np.array([values[row], -values[row]]) for name, values in VALUES.items()}
        means.add(infos, np.array([True, row < 2]))
    assert means.pop(0) == EXPECTED
    assert means.pop(1) == {"gold": -3.0, "gold_sum": -6.0, "gold_last": -5.0, "gold_min": -5.0, "gold_max": -1.0}


def test_a_key_that_is_no_text_is_named_by_its_text() -> None:
    means, vector = InfoMeans(), VectorInfoMeans(1)
    means.add({3: 2.0})
    vector.add({3: np.array([2.0])}, np.array([True]))
    assert means.pop() == vector.pop(0) == {"3": 2.0}


def test_a_number_whose_whole_name_is_that_of_a_reduction_is_averaged() -> None:
    means, vector = InfoMeans(), VectorInfoMeans(1)
    for value in (1.0, 2.0, 6.0):
        means.add({"max": value})
        vector.add({"max": np.array([value])}, np.array([True]))
    assert means.pop() == vector.pop(0) == {"max": 3.0}


def test_a_value_is_logged_from_anywhere_in_a_training_and_nowhere_else() -> None:
    metrics = Metrics()
    log("mine/x", 1.0)
    with collect_in(metrics):
        log("mine/x", 2.0)
        log("mine/x", torch.tensor([4.0]))
        with pytest.raises(ValueError, match="is logged by rlframe itself"):
            log("algo/loss", 1.0)
        with pytest.raises(ValueError, match="must be named group/name"):
            log("x", 1.0)
    assert metrics.flush() == {"mine/x": 3.0}


def test_nan_is_kept() -> None:
    metrics = Metrics()
    metrics.add({"a/x_last": math.nan})
    assert math.isnan(metrics.flush()["a/x_last"])


def test_counters_of_samplers_are_summed_fractions_averaged_and_the_slowest_worker_is_that_of_all() -> None:
    counters = [
        {"sampler/restarts": 1.0, "time/fraction_sampler_waiting": 0.2, "time/slowest_worker": 1.1},
        {"sampler/restarts": 2.0, "time/fraction_sampler_waiting": 0.4, "time/slowest_worker": 1.4},
    ]
    assert over_samplers(counters) == {
        "sampler/restarts": 3.0,
        "time/fraction_sampler_waiting": pytest.approx(0.3),
        "time/slowest_worker": 1.4,
    }


@pytest.mark.parametrize("values", [(1.0, math.nan, 2.0), (math.nan, 1.0, 2.0)])
def test_nan_is_kept_wherever_it_comes(values: tuple[float, ...]) -> None:
    metrics, means, vector = Metrics(), InfoMeans(), VectorInfoMeans(1)
    for value in values:
        row = {f"gold{end}": value for end in ("", "_sum", "_min", "_max")}
        metrics.add({f"a/{name}": x for name, x in row.items()})
        means.add(row)
        vector.add({name: np.array([x]) for name, x in row.items()}, np.array([True]))
    for found in (metrics.flush(), means.pop(), vector.pop(0)):
        assert len(found) == 4
        assert all(map(math.isnan, found.values()))
