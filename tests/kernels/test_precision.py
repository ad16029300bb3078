"""Precision: what is chosen where, and that it holds for learning alone."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch

from rlframe.core.errors import ConfigError
from rlframe.kernels import device
from rlframe.kernels.device import (
    bf16_is_faster,
    choose_precision,
    gpu_has_bf16_units,
    has_bf16_units,
    in_bf16,
    learning_in,
)

CPU = torch.device("cpu")


@pytest.mark.skipif(not Path("/proc/cpuinfo").exists(), reason="Linux says there what its CPU has")
def test_units_are_those_that_the_system_lists() -> None:
    flags = Path("/proc/cpuinfo").read_text().split()
    may_use = os.getenv("ONEDNN_MAX_CPU_ISA", "").upper() not in ("SSE41", "AVX", "AVX2")
    assert has_bf16_units() == (may_use and ("avx512_bf16" in flags or "amx_bf16" in flags))


@pytest.mark.parametrize(("is_faster", "chosen"), [(True, "bf16"), (False, "fp32")])
def test_auto_is_bf16_where_the_cpu_is_faster_in_it(
    is_faster: bool, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "bf16_is_faster", lambda: is_faster)
    assert choose_precision("auto", CPU) == chosen
    assert choose_precision("fp32", CPU) == "fp32"


def test_a_cpu_without_units_is_not_faster_in_bf16_and_refuses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "has_bf16_units", lambda: False)
    assert not bf16_is_faster.__wrapped__()
    with pytest.raises(ConfigError, match=r"precision=bf16 is not supported on this CPU, .*; use precision=auto or"):
        choose_precision("bf16", CPU)


def test_waiting_for_other_processes_does_not_decide_for_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    def convolve(x: torch.Tensor, weight: torch.Tensor, stride: int) -> None:
        end = time.thread_time() + 5e-4
        while time.thread_time() < end:
            pass
        time.sleep(5e-3 if x.dtype == torch.float32 else 0)

    monkeypatch.setattr(device, "has_bf16_units", lambda: True)
    monkeypatch.setattr(device.F, "conv2d", convolve)
    assert not bf16_is_faster.__wrapped__()


def test_bf16_is_refused_on_a_gpu_without_units_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlframe.kernels.device.gpu_has_bf16_units", lambda device: False)
    with pytest.raises(ConfigError, match="precision=bf16 is not supported on device=cuda; use precision=auto or fp32"):
        choose_precision("bf16", torch.device("cuda"))


def test_bf16_is_for_gpus_with_units_for_it_and_auto_chooses_it_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlframe.kernels.device.gpu_has_bf16_units", lambda device: device.type == "cuda")
    assert choose_precision("bf16", torch.device("cuda")) == "bf16"
    assert choose_precision("auto", torch.device("cuda")) == "bf16"


@pytest.mark.gpu
def test_a_gpu_says_whether_it_has_units() -> None:
    assert gpu_has_bf16_units(torch.device("cuda")) == (torch.cuda.get_device_capability() >= (8, 0))


def test_sums_are_float32_inside_and_as_they_were_outside() -> None:
    products = torch.backends.cuda.matmul
    before = products.allow_bf16_reduced_precision_reduction
    with learning_in("bf16"):
        assert not products.allow_bf16_reduced_precision_reduction
    assert products.allow_bf16_reduced_precision_reduction == before


def test_precision_holds_inside_and_not_for_acting() -> None:
    with learning_in("bf16"):
        assert in_bf16()
        with torch.inference_mode():
            assert not in_bf16()
        with learning_in("fp32"):
            assert not in_bf16()
    assert not in_bf16()
