"""What an environment worker process does: makes its environments, says what they are, then runs a program on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rlframe.core.struct import Tree
from rlframe.envs.base import EnvConfig, Envs
from rlframe.envs.make import make_envs
from rlframe.system.worker_main import Handler, Parent

Program = Callable[["Site"], Handler]


@dataclass(frozen=True)
class Site:
    """What a program finds in its worker."""

    parent: Parent
    envs: Envs
    lo: int  # index of its first environment among all
    incarnation: int  # how many processes have had this place before
    takes_over: bool  # whether the environments of one of them had begun
    memory: tuple[Tree, ...]  # what the program was handed, mapped
    arguments: tuple[Any, ...]  # likewise, copied


def work(parent: Parent, config: EnvConfig, seeds: Sequence[int], lo: int, incarnation: int, takes_over: bool) -> None:
    """The worker's life. Torch is loaded only by programs that need it."""
    envs = make_envs(config, len(seeds), seeds, first=lo)
    try:
        parent.send((envs.observation_space, envs.action_space, envs.backend))
        program, n_memories, arguments = parent.receive()
        memory = tuple(parent.take().tree for _ in range(n_memories))
        handle = program(Site(parent, envs, lo, incarnation, takes_over, memory, arguments))
        parent.send(None)
        parent.serve(handle)
    finally:
        envs.close()
