"""ThreadChoice beside simulated neighbours, and AdaptiveThreads, which follows it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch

from rlframe.experiment.build import build
from rlframe.experiment.hardware import affinity_of
from rlframe.experiment.settings import from_flat
from rlframe.runners import threads as module
from rlframe.runners.threads import AdaptiveThreads, ThreadChoice, measure_delay

LOOK_S = 2.03  # between looks of the simulation
FREE, SHARED = 1.05, 2.3  # delays measured on two cores: alone, and beside a busy loop of any priority
# Env steps a second, in those of one thread, of a run with n threads; measured by updates of PPO on Pong.
ALONE, BESIDE, BOTH = {1: 1.0, 2: 1.5}, {1: 0.95, 2: 0.5}, {1: 0.5, 2: 0.06}  # BOTH: others have several threads too


class Clock:
    """The time of a simulation."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def simulate(n_runs: int, busy: Callable[[float], bool], seconds: float) -> tuple[list[ThreadChoice], float, int]:
    """Runs of at most two threads on two CPUs; `busy`: whether another program keeps one CPU busy.

    Returns the choices, the rate of all over that of all with one thread, and the number of changes.
    """
    clock, choices = Clock(), list[ThreadChoice]()
    for _ in range(n_runs):
        delay = lambda n: SHARED if n_runs > 1 or busy(clock.now) else FREE  # noqa: E731
        choices.append(ThreadChoice(2, delay, clock))
    made = possible = 0.0
    changes = 0
    while clock.now < seconds:
        before = [choice.n for choice in choices]
        after = [choice.look() for choice in choices]
        changes += sum(a != b for a, b in zip(after, before, strict=True))
        for _ in range(100):
            clock.now += LOOK_S / 100
            shared = n_runs > 1 or busy(clock.now)
            several = sum(after) > n_runs + 1
            made += sum((BOTH if several else BESIDE if shared else ALONE)[n] for n in after)
            possible += n_runs * (BESIDE if shared else ALONE)[1]
    return choices, made / possible, changes


NEIGHBOURS: dict[str, tuple[int, Callable[[float], bool]]] = {
    "a busy loop of any priority": (1, lambda t: True),
    "another run": (2, lambda t: False),
    "another run and a busy loop": (2, lambda t: True),
    "three other runs": (4, lambda t: False),
    "bursts of 200 ms": (1, lambda t: t % 0.4 < 0.2),
    "bursts of 3 s": (1, lambda t: t % 6 < 3),
    "bursts of 40 s": (1, lambda t: t % 80 < 40),
}


@pytest.mark.parametrize("name", NEIGHBOURS)
def test_beside_neighbours_a_run_makes_nine_tenths_of_what_one_thread_makes(name: str) -> None:
    n_runs, busy = NEIGHBOURS[name]
    _, rate, changes = simulate(n_runs, busy, 600.0)
    assert rate >= 0.9
    assert changes <= 2 * 600 / 30, "at most twice in half a minute"


def test_alone_it_keeps_all_threads() -> None:
    assert simulate(1, lambda t: False, 600.0)[1:] == (pytest.approx(1.5), 0)


def test_one_delay_alone_changes_nothing() -> None:
    delays = iter([SHARED, FREE] * 50)
    choice = ThreadChoice(2, lambda n: next(delays), Clock())
    assert [choice.look() for _ in range(50)] == [2] * 50


def test_more_threads_return_within_half_a_minute_after_neighbours_left() -> None:
    gone_s = 300.0
    for busy in (lambda t: t < gone_s, lambda t: t < gone_s and t % 6 < 3):
        assert simulate(1, busy, gone_s)[0][0].n == 1
        assert simulate(1, busy, gone_s + 16 * LOOK_S + 4)[0][0].n == 2


def test_after_a_quiet_time_the_next_neighbour_counts_as_the_first() -> None:
    """Three bursts make the wait long; 60 s of rest at two threads, and one burst costs four looks again."""
    bursts: Sequence[tuple[float, float]] = ((0, 3), (10, 13), (30, 33), (150, 153))
    busy = lambda t: any(begin <= t < end for begin, end in bursts)  # noqa: E731
    assert simulate(1, busy, 165.0)[0][0].n == 2


def test_as_many_threads_as_run_at_once_on_eight_cpus() -> None:
    clock, others = Clock(), [3, 3, 3, 7, *[0] * 8]
    choice = ThreadChoice(8, lambda n: FREE if n + others[0] <= 8 else SHARED, clock)
    chosen = []
    while others:
        chosen.append(choice.look())
        others.pop(0)
        clock.now += LOOK_S
    assert chosen == [4, 4, 4, 1, 1, 1, 1, 2, 2, 2, 2, 4]


def test_it_sets_torch_threads_and_says_so(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    seen = {"delay": FREE}
    monkeypatch.setattr(module, "_LOOK_S", 0.0)
    monkeypatch.setattr(module, "measure_delay", lambda n: seen["delay"])
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    caplog.set_level(logging.INFO, "rlframe")
    try:
        threads, followed = AdaptiveThreads(2), []
        for seen["delay"] in (FREE, SHARED, SHARED, FREE, FREE, FREE):
            threads()
            followed.append(torch.get_num_threads())
        assert followed == [2, 1, 1, 1, 2, 2]
        assert [record.getMessage()[:15] for record in caplog.records] == ["1 torch thread ", "2 torch threads"]
    finally:
        torch.set_num_threads(before)


def test_measuring_leaves_threads_and_random_numbers_as_they_are() -> None:
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    assert 0.5 < measure_delay(2) < float("inf")
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(("threads", "n", "adapts"), [("auto", 2, True), ("auto", 1, False), ("2", 2, False)])
def test_only_several_threads_that_were_not_asked_for_by_number_adapt(threads: str, n: int, adapts: bool) -> None:
    experiment = from_flat({"env": "CartPole-v1", "sampler": "serial", "eval.n_episodes": "0", "threads": threads})
    affinity = replace(affinity_of(experiment, 0, 1), threads=n)
    before = torch.get_num_threads()
    try:
        with build(experiment, affinity) as built:
            looks = built.runner.adapt_threads
            assert isinstance(looks, AdaptiveThreads) is adapts
            assert built.runner.algo.progress.between_steps is looks
    finally:
        torch.set_num_threads(before)


def test_it_may_change_between_the_minibatches_of_an_update() -> None:
    """An update of PPO on images takes a second with one thread, and ten where two runs delay each other."""
    flat = {"env": "CartPole-v1", "sampler": "serial", "eval.n_episodes": "0", "algo.epochs": "3"}
    experiment = from_flat({**flat, "algo.minibatches": "2", "sampler.batch_T": "8", "sampler.batch_B": "2"})
    looks: list[int] = []
    with build(experiment, affinity_of(experiment, 0, 1)) as built:
        progress = built.runner.algo.progress
        progress.between_steps = lambda: looks.append(progress.updates)
        built.runner.iterate()
    assert len(looks) == 6
