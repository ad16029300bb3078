"""Ranks that are forked by the server of forks, which has imported torch; a new interpreter takes 2 s for each."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from rlframe.system import distributed
from rlframe.system.process import ChildProcess


@contextmanager
def forking_ranks() -> Iterator[None]:
    """Within the block, this process forks ranks instead of spawning them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distributed, "ChildProcess", lambda name, work, args, method: ChildProcess(name, work, args))
        yield
