"""rlpyt's logger by its own names."""

import logging
import math

import pytest

from rlframe.record import logger
from rlframe.record.metrics import Metrics, collect_in


def test_values_are_logged_under_the_names_of_their_prefixes() -> None:
    metrics = Metrics()
    with collect_in(metrics):
        logger.record_tabular("loss", 1.0)
        logger.record_tabular("loss", 3.0)
        with logger.tabular_prefix("critic/"), logger.tabular_prefix("first_"):
            logger.record_tabular("loss", 5.0)
        logger.record_tabular_misc_stat("mine/q", [1.0, 2.0, 6.0])
        logger.dump_tabular()
    found = metrics.flush()
    assert (found["script/loss"], found["critic/first_loss"]) == (2.0, 5.0)
    q = [found[f"mine/q{name}"] for name in ("Average", "Std", "Median", "Min", "Max")]
    assert q == pytest.approx([3.0, math.sqrt(14 / 3), 2.0, 1.0, 6.0])


def test_no_values_are_nan() -> None:
    metrics = Metrics()
    with collect_in(metrics):
        logger.record_tabular_misc_stat("mine/q", [])
    assert math.isnan(metrics.flush()["mine/qAverage"])


def test_messages_have_their_prefixes(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "rlframe")
    with logger.prefix("itr 3 | "), logger.prefix("rank 0 | "):
        logger.log("saved")
    logger.log("done")
    assert [record.getMessage() for record in caplog.records] == ["itr 3 | rank 0 | saved", "done"]
