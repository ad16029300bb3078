"""The C allocator: keeping freed blocks, so that large tensors do not fault their pages in anew at every use."""

import ctypes
import sys

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h of glibc
_BYTES = 1 << 30


def keep_freed_memory() -> bool:
    """Tell glibc to reuse blocks up to 1 GiB instead of returning them; False where the C library is another.

    A Nature-CNN training step of 256 rows on two threads takes about a third less time with it.
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # absent from musl
    if mallopt is None:
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, _BYTES)) and bool(mallopt(_M_TRIM_THRESHOLD, _BYTES))
