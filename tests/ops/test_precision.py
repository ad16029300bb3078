"""Precision: what is chosen where, and that it holds for learning alone."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rlframe.core.errors import ConfigError
from rlframe.ops.precision import choose_precision, has_bf16_units, in_bf16, learning_in

CPU = torch.device("cpu")


@pytest.mark.skipif(not Path("/proc/cpuinfo").exists(), reason="Linux says there what its CPU has")
def test_units_are_those_that_the_system_lists() -> None:
    flags = Path("/proc/cpuinfo").read_text().split()
    assert has_bf16_units() == ("avx512_bf16" in flags or "amx_bf16" in flags)


def test_auto_is_bf16_where_there_are_units_for_it() -> None:
    assert choose_precision("auto", CPU) == ("bf16" if has_bf16_units() else "fp32")
    assert choose_precision("auto", torch.device("cuda")) == choose_precision("fp32", CPU) == "fp32"


def test_bf16_is_refused_where_it_gains_nothing() -> None:
    with pytest.raises(ConfigError, match="precision=bf16 is not for device=cuda; use precision=auto or fp32"):
        choose_precision("bf16", torch.device("cuda"))


def test_precision_holds_inside_and_not_for_acting() -> None:
    with learning_in("bf16"):
        assert in_bf16()
        with torch.inference_mode():
            assert not in_bf16()
        with learning_in("fp32"):
            assert not in_bf16()
    assert not in_bf16()
