"""SharedRanks: exchanges through memory are exact, in any order of arrival, and end if a rank does not come."""

import random
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from rlframe.core.ranks import RankLost
from rlframe.system import shared_ranks
from rlframe.system.shared_ranks import RankMemory, SharedRanks


def nothing() -> None:
    """Nothing is wrong with the other ranks."""


def on_each(world_size: int, work: Callable[[SharedRanks], Any], timeout_s: float = 60.0) -> list[Any]:
    """The results of `work` on ranks that are threads here."""
    memory = RankMemory.make(world_size)
    ranks = [SharedRanks(i, world_size, memory, timeout_s, nothing, (), world_size) for i in range(world_size)]
    with ThreadPoolExecutor(world_size) as threads:
        found = list(threads.map(work, ranks))
    memory.close()
    return found


@pytest.mark.parametrize("world_size", [2, 3])
def test_exchanges_of_all_kinds_and_sizes_are_exact_however_late_a_rank_comes(world_size: int) -> None:
    def work(ranks: SharedRanks) -> None:
        late = random.Random(ranks.rank)
        chosen = random.Random(0)  # equal on all ranks
        for turn in range(150):
            if late.random() < 0.1:
                time.sleep(late.random() / 200)
            n = chosen.choice([1, 3, 1000, 20_000])
            everyone = range(1, world_size + 1)
            match chosen.randrange(5):
                case 0:
                    assert ranks.sum(turn * (ranks.rank + 1)) == turn * sum(everyone)
                case 1:
                    assert ranks.max(turn - ranks.rank) == turn
                case 2:
                    expected = [{"n": [turn] * (n // world * 7 % 500)} for world in everyone]
                    assert ranks.gather(expected[ranks.rank]) == expected
                case 3:
                    kind = chosen.choice([torch.float32, torch.float64, torch.int64, torch.bfloat16])
                    own = torch.full((n, 2), ranks.rank + 1).to(kind)
                    assert torch.equal(ranks.sum_tensor(own), torch.full((n, 2), sum(everyone)).to(kind))
                    assert float(own.flatten()[0]) == ranks.rank + 1
                case _:
                    large = torch.full((2, 2), 1e9 + turn + 10.0 * ranks.rank, dtype=torch.float64)
                    parts = [torch.full((n,), float(ranks.rank)), large]
                    ranks.average(parts, weight=float(ranks.rank + 1))
                    mean = sum(i * (i + 1) for i in range(world_size)) / sum(everyone)
                    torch.testing.assert_close(parts[0], torch.full((n,), mean))
                    expected_large = torch.full_like(large, 1e9 + turn + 10 * mean)
                    torch.testing.assert_close(large, expected_large, rtol=1e-14, atol=0.0)

    on_each(world_size, work)


def test_a_sum_is_equal_to_the_last_bit_on_all_ranks() -> None:
    parts = [torch.randn(1001, generator=torch.Generator().manual_seed(rank)) * 1e3 for rank in range(3)]
    found = on_each(3, lambda ranks: ranks.sum_tensor(parts[ranks.rank]))
    for each in found:
        assert torch.equal(each, parts[0] + parts[1] + parts[2])


def test_values_are_json() -> None:
    value = {"a": [1.5, float("inf"), None, "x"], "b": {"c": True}}
    assert on_each(2, lambda ranks: ranks.broadcast(value if ranks.rank == 0 else None)) == [value] * 2
    with pytest.raises(TypeError, match="not JSON serializable"):
        on_each(2, lambda ranks: ranks.gather(object()))


def test_a_rank_that_does_not_come_is_named_after_the_time_limit() -> None:
    with pytest.raises(RankLost, match=r"rank 1 did not come within 0\.2 s \(runner\.timeout_s\); rank 0 cannot"):
        on_each(2, lambda ranks: ranks.sum(1) if ranks.rank == 0 else 0, timeout_s=0.2)


def test_a_failure_of_another_rank_ends_the_wait_within_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []

    def check() -> None:
        asked.append(time.monotonic())
        if len(asked) == 2:
            raise RankLost("rank 1 was killed")

    assert shared_ranks._CHECK_S < 1
    monkeypatch.setattr(shared_ranks, "_CHECK_S", 0.05)
    memory = RankMemory.make(2)
    with pytest.raises(RankLost, match="rank 1 was killed"):
        SharedRanks(0, 2, memory, 60.0, check, (), 2).sum(1)
    memory.close()
