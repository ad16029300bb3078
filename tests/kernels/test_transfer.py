"""Copies between host and GPU: complete when they are read, and nothing at all where there is no GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from rlframe.core.struct import fill, leaves
from rlframe.kernels import transfer
from rlframe.kernels.transfer import Fetched, Gathered, Packed, to_device

CPU = torch.device("cpu")


def test_what_is_there_already_is_not_copied() -> None:
    tensor = torch.ones(3)
    assert to_device(tensor, CPU) is tensor


def test_what_was_fetched_stays_while_its_place_is_written_anew() -> None:
    place = torch.tensor([1.0, 2.0])
    fetched = Fetched(place)
    fetched.start()
    place.fill_(0.0)
    assert fetched.wait().tolist() == [1.0, 2.0]


def check_gathered(device: torch.device) -> None:
    """Rows of arrays that are taken again and again, more of them each time, and overwritten after each delivery."""
    rng = np.random.default_rng(0)
    arrays = [rng.integers(0, 200, (50, *shape)).astype(t) for shape, t in (((3,), "f4"), ((), "?"), ((2, 5), "u1"))]
    gathered, kept = Gathered(device), torch.ones(2, device=device)
    found: list[Any] = []
    for n in (4, 4, 40_000, 7, 40_000):
        at = rng.integers(0, 50, (n, 2))
        taken = [gathered.take(array, at) for array in arrays]
        batch = gathered.delivered({"all": tuple(taken), "part": taken[2][1:, :, :, :-2], "kept": kept})
        assert {x.device.type for x in leaves(batch)} == {device.type}
        assert batch["kept"] is kept
        found.append((batch, [array[at] for array in arrays]))
        for array in arrays:
            array[...] = array[::-1].copy()
    for batch, expected in found:
        assert all(np.array_equal(x.cpu().numpy(), y) for x, y in zip(batch["all"], expected, strict=True))
        assert np.array_equal(batch["part"].cpu().numpy(), expected[2][1:, :, :, :-2])


def check_packed(device: torch.device) -> None:
    packed = Packed({"a": np.zeros((3, 2), np.float32), "b": (torch.zeros(5, dtype=torch.bool), np.zeros(()))}, device)
    packed.host["a"].fill_(2.0)
    packed.host["b"][0].fill_(False)
    packed.host["b"][0][3] = True
    packed.host["b"][1].fill_(0.1)
    packed.send()
    packed.there["a"] += 1
    packed.fetch()
    if device.type == "cuda":
        torch.cuda.synchronize()
    assert packed.host["a"].tolist() == [[3.0, 3.0]] * 3
    assert packed.host["b"][0].tolist() == [False, False, False, True, False]
    assert packed.host["b"][1].item() == 0.1


def test_what_is_gathered_is_delivered_in_one_copy_views_of_it_too(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Any] = []
    send = transfer._Block.send
    monkeypatch.setattr(transfer._Block, "send", lambda block: sent.append(block) or send(block))
    check_gathered(CPU)
    assert len(sent) == 6, "of five deliveries: in two copies where they are more than ever before"


def test_a_tree_in_one_piece_of_memory_goes_there_and_back() -> None:
    check_packed(CPU)


@pytest.mark.gpu
def test_copies_to_a_gpu_and_back_are_complete_when_they_are_read() -> None:
    device = torch.device("cuda")
    there = []
    for i in range(200):
        row = torch.full((1000,), float(i))
        there.append(to_device(row, device))
        row.fill_(-1.0)  # ordinary memory may be written again at once
    assert all(bool((x == i).all()) for i, x in enumerate(there))
    fetched = Fetched(there[0])
    for i in range(200):
        there[0].fill_(i)
        fetched.start()
        there[0].fill_(-1.0)
        assert bool((fetched.wait() == i).all())
    assert to_device(there[0], device) is there[0] or to_device(there[0], device).data_ptr() == there[0].data_ptr()


@pytest.mark.gpu
def test_what_is_gathered_or_packed_on_a_gpu_is_what_it_is_on_a_cpu() -> None:
    check_gathered(torch.device("cuda"))
    check_packed(torch.device("cuda"))


@pytest.mark.gpu
def test_numbers_are_filled_in_on_a_gpu_as_on_a_cpu() -> None:
    one, two = torch.zeros((), device="cuda"), torch.zeros(2, device="cuda")
    fill(one, 0.5)
    fill(two, (1.0, 2.0))
    assert one.item() == 0.5
    assert two.tolist() == [1.0, 2.0]
