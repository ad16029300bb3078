"""Threads of torch that tests only claim: two real ones in each of several test processes wait for one another."""

import pytest
import torch


def claim_two_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch compute with the thread it has and say it has two, so that DQN prefetches."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    monkeypatch.setattr(torch, "set_num_threads", lambda n: None)
