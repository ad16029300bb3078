"""The dict of CPUs and torch threads that scripts hand to runners, as those of rlpyt do."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import rlframe
from rlframe.core.errors import ConfigError
from rlframe.runners import AsyncRl, EvolutionRl, MinibatchRl, SyncRl
from rlframe.runners.threads import apply_affinity
from rlframe.system.affinity import Affinity

RUNNERS: dict[type, dict[str, Any]] = {
    MinibatchRl: {},
    SyncRl: {},
    EvolutionRl: {"algo": "es", "runner": "evolution"},
    AsyncRl: {"runner": "async_rl"},
}


@pytest.fixture
def cpus() -> Iterator[set[int]]:
    """Those of this process, which are given back with its threads."""
    if sys.platform != "linux":
        pytest.skip("only Linux pins processes")
    before, n_threads = os.sched_getaffinity(0), torch.get_num_threads()
    yield before
    os.sched_setaffinity(0, before)
    torch.set_num_threads(n_threads)


@pytest.mark.parametrize(
    "runner",
    [pytest.param(each, marks=pytest.mark.slow) if each is AsyncRl else each for each in RUNNERS],
    ids=lambda each: each.__name__,
)
def test_every_runner_goes_to_its_cpus_with_its_threads(runner: Any, cpus: set[int]) -> None:
    settings = {"algo": "ppo", "sampler": "serial", "sampler.batch_B": 4, "eval.n_workers": 0, **RUNNERS[runner]}
    with rlframe.build(settings.pop("algo"), "CartPole-v1", n_steps=1_000, **settings) as run:
        last = max(cpus)
        affinity = {"master_cpus": [last], "torch_threads": torch.get_num_threads() + 1, "workers_cpus": [0]}
        runner(run.sampler, run.runner.learner, run.runner.options, run.runner.evaluator, affinity=affinity)
        assert os.sched_getaffinity(0) == {last}
        assert torch.get_num_threads() == affinity["torch_threads"]


def test_only_what_is_given_changes(cpus: set[int]) -> None:
    one, n_threads = [min(cpus)], torch.get_num_threads()
    apply_affinity({})
    apply_affinity({"master_cpus": one, "set_affinity": False})
    assert (os.sched_getaffinity(0), torch.get_num_threads()) == (cpus, n_threads)
    apply_affinity({"master_torch_threads": n_threads + 1})
    assert (os.sched_getaffinity(0), torch.get_num_threads()) == (cpus, n_threads + 1)
    apply_affinity(Affinity(tuple(one), (), n_threads, (), 0, 1))
    assert (os.sched_getaffinity(0), torch.get_num_threads()) == (set(one), n_threads)


REFUSED: dict[str, dict[str, Any]] = {
    "affinity has no 'master_cpu': a runner reads master_cpus, torch_threads, .*; did you mean master_cpus": {
        "master_cpu": [0]
    },
    r"master_cpus=0 must be a list of CPU numbers, such as \[0, 1\]": {"master_cpus": 0},
    "master_cpus='0-3' must be a list": {"master_cpus": "0-3"},
    r"master_cpus=\[-1\] must be a list": {"master_cpus": [-1]},
    r"master_cpus=\[\[0\], \[1\]\] must be a list": {"master_cpus": [[0], [1]]},
    "torch_threads=0 must be a whole number, at least 1": {"torch_threads": 0},
    "torch_threads=1.5 must be a whole number": {"master_torch_threads": 1.5},
    "set_affinity='no' must be True or False": {"set_affinity": "no"},
    "mean the same; leave one out": {"torch_threads": 1, "master_torch_threads": 2},
}


@pytest.mark.parametrize("message", REFUSED)
def test_a_wrong_affinity_is_refused_and_changes_nothing(message: str, cpus: set[int]) -> None:
    wrong, n_threads = REFUSED[message], torch.get_num_threads()
    with pytest.raises(ConfigError, match=message):
        apply_affinity({"master_cpus": [min(cpus)], **wrong})
    assert (os.sched_getaffinity(0), torch.get_num_threads()) == (cpus, n_threads)
