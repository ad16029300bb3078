"""A repair of torch's compiler on a GPU: what a loop of a kernel has stored is there for the loops after it.

A kernel that stores numbers in one loop and reads them back in the next may read memory that another warp has yet to
write, where bfloat16 lets the loops divide their work differently (pytorch issue 190517, seen with torch 2.11 and in
the code of 2.13). In an update of XQC that was an index of a scatter: one of five compiled learners ended by it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

BARRIER = "tl.debug_barrier()"  # all threads of a block wait; memory is then the same for all


@contextmanager
def loops_in_order(kernel: Any = None) -> Iterator[None]:
    """Context in which kernels have a barrier after each loop that stores, and keys of their own in torch's cache.

    `kernel`: their class, if not torch's.
    """
    if kernel is None:
        from torch._inductor.codegen.triton import TritonKernel

        kernel = TritonKernel
    codegen_body = kernel.codegen_body

    def with_barrier(self: Any) -> None:
        stores = bool(self.stores) and any(tree.is_loop for tree in self.range_trees)
        codegen_body(self)
        if stores:
            self.body.writeline(BARRIER)

    config: Any = getattr(torch.compiler, "config", None)  # older versions of torch have no such setting
    own_keys = config.patch(cache_key_tag=BARRIER) if hasattr(config, "cache_key_tag") else nullcontext()
    kernel.codegen_body = with_barrier
    try:
        with own_keys:
            yield
    finally:
        kernel.codegen_body = codegen_body
