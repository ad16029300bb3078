"""Beside: a thread that computes with one of torch's threads, while the main one waits for environments."""

from __future__ import annotations

import contextvars
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import torch

Result = TypeVar("Result")


class Beside:
    """Runs what it is given, one thing after another, in the context of whoever gives it. Sleeps in between."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None

    def start(self, function: Callable[..., Result], *arguments: Any) -> Future[Result]:
        """The result will be that of `Future.result`, which raises what the function raises."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, "beside")
            n = torch.get_num_threads()
            self._pool.submit(_take_one).result()
            torch.set_num_threads(n)
        return self._pool.submit(contextvars.copy_context().run, function, *arguments)


def _take_one() -> None:
    """Of torch's threads, for this thread; what is set holds for threads to come, too."""
    torch.get_num_threads()  # a thread's first look would take over what another has set meanwhile
    torch.set_num_threads(1)
