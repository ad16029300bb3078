"""Copies between host and GPU: complete when they are read, and nothing at all where there is no GPU."""

from __future__ import annotations

import pytest
import torch

from rlframe.core.struct import fill
from rlframe.kernels.device import copy_to_host, to_device

CPU = torch.device("cpu")


def test_what_is_there_already_is_not_copied() -> None:
    tensor = torch.ones(3)
    assert to_device(tensor, CPU) is tensor


def test_what_was_fetched_stays_while_its_place_is_written_anew() -> None:
    place = torch.tensor([1.0, 2.0])
    wait = copy_to_host(place)
    place.fill_(0.0)
    assert wait().tolist() == [1.0, 2.0]


@pytest.mark.gpu
def test_copies_to_a_gpu_and_back_are_complete_when_they_are_read() -> None:
    device = torch.device("cuda")
    there = []
    for i in range(200):
        row = torch.full((1000,), float(i))
        there.append(to_device(row, device))
        row.fill_(-1.0)  # ordinary memory may be written again at once
    assert all(bool((x == i).all()) for i, x in enumerate(there))
    waits = []
    for i in range(200):
        there[0].fill_(i)
        waits.append(copy_to_host(there[0]))
    assert all(bool((wait() == i).all()) for i, wait in enumerate(waits))
    assert to_device(there[0], device) is there[0] or to_device(there[0], device).data_ptr() == there[0].data_ptr()


@pytest.mark.gpu
def test_numbers_are_filled_in_on_a_gpu_as_on_a_cpu() -> None:
    one, two = torch.zeros((), device="cuda"), torch.zeros(2, device="cuda")
    fill(one, 0.5)
    fill(two, (1.0, 2.0))
    assert one.item() == 0.5
    assert two.tolist() == [1.0, 2.0]
