"""The repair of torch's compiler on a GPU, on kernels that are not compiled."""

from types import SimpleNamespace

import pytest
import torch

from rlframe.kernels.barriers import BARRIER, loops_in_order


class Lines(list):
    def writeline(self, line: str) -> None:
        self.append(line)


class Kernel:
    """As torch's: `codegen_body` moves what was collected into the body, in a loop or not."""

    def __init__(self, loops: bool, stores: bool) -> None:
        self.range_trees = [SimpleNamespace(is_loop=False), SimpleNamespace(is_loop=loops)]
        self.stores, self.body = Lines(["store"] if stores else []), Lines()

    def codegen_body(self) -> None:
        self.body += ["loop", *self.stores]
        self.stores.clear()


@pytest.mark.parametrize(("loops", "stores"), [(True, True), (True, False), (False, True)])
def test_loops_that_store_are_followed_by_a_barrier_and_nothing_else_is(loops: bool, stores: bool) -> None:
    kernel = Kernel(loops, stores)
    with loops_in_order(Kernel):
        kernel.codegen_body()
        kernel.codegen_body()
    assert kernel.body == ["loop", *(["store"] if stores else []), *([BARRIER] if loops and stores else []), "loop"]


def test_kernels_of_torch_are_repaired_within_the_context_alone() -> None:
    kernel = pytest.importorskip("torch._inductor.codegen.triton").TritonKernel
    before = kernel.codegen_body
    with loops_in_order():
        assert kernel.codegen_body is not before
        assert torch.compiler.config.cache_key_tag == BARRIER, "so that no cache has them unrepaired"
    assert kernel.codegen_body is before
    assert not torch.compiler.config.cache_key_tag
