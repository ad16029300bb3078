"""A board of parameters in shared memory: one writer, many readers, and a version that tells of each new posting."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from rlframe.core.struct import Tree, as_numpy, map_tree, write
from rlframe.system.shared import Shared, share

_Board = dict[str, Any]  # {"version": [1] int64, "values": the tree}


def make_board(values: Tree) -> Shared:
    """A board for trees of the shapes and dtypes of `values`, with these posted on it."""
    shared = share({"version": np.zeros(1, np.int64), "values": map_tree(as_numpy, values)}, "board")
    post(shared.tree, values)
    return shared


def post(board: _Board, values: Tree) -> int:
    """Replace what the board says; its new version. Values may be tensors of any device."""
    version = board["version"]
    version[0] |= 1  # odd: being written, perhaps since a posting that was interrupted
    write(board["values"], values)
    version[0] += 1
    return int(version[0])


def read(board: _Board, values: Tree, known: int) -> int:
    """Copy the board into `values` if its version is another than `known`; the version that `values` now have.

    A reader that a posting overtakes reads again, so it never keeps half of one and half of another.
    """
    version = board["version"]
    while int(version[0]) != known:
        before = int(version[0])
        if before % 2:
            time.sleep(1e-5)
            continue
        write(values, board["values"])
        if int(version[0]) == before:
            known = before
    return known
