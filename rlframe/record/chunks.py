"""Large arrays in pieces, each a file of its own in snapshots, and which of them stand in one already."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import psutil

PIECE_BYTES = 2**22  # of a piece, about: few files where all is new, little to write again where not


@dataclass(frozen=True, eq=False)
class Chunked:
    """An array [n, *row] that is read piece by piece: nobody needs memory for all of it.

    Owned by whoever fills it in, valid until that is written to. Its `digests` are theirs too: who computes that of a
    piece notes it there, and does not read the piece again for as long as it stays.
    """

    dtype: np.dtype
    row: tuple[int, ...]
    counts: list[int]  # rows of each piece
    read: Callable[[int], np.ndarray]  # [counts[i], *row], contiguous
    digests: list[str]  # SHA-256 of what each piece holds; empty where nobody knows. May be longer than counts

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole."""
        return (sum(self.counts), *self.row)

    @property
    def row_bytes(self) -> int:
        """Of one row."""
        return int(np.prod(self.row, dtype=np.int64)) * self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Of the whole."""
        return sum(self.counts) * self.row_bytes

    def pieces(self) -> Iterator[np.ndarray]:
        """One after another."""
        return map(self.read, range(len(self.counts)))

    def whole(self) -> np.ndarray:
        """A copy, all at once.

        Raises:
            MemoryError: it does not fit.
        """
        check_memory(self.nbytes)
        array = np.empty(self.shape, self.dtype)
        for rows, piece in by_rows(self):
            array[rows] = piece
        return array


def check_memory(n_bytes: int) -> None:
    """Raises:
    MemoryError: fewer than `n_bytes` are free; before they are taken.
    """
    free = int(psutil.virtual_memory().available)
    if n_bytes > free:
        raise MemoryError(f"it needs {n_bytes:,} bytes of memory, {free:,} are free")


class Digests:
    """Which pieces of an array [L, ...], written to by rows, are as they were when their digests were noted."""

    def __init__(self, L: int, row_bytes: int) -> None:
        self.n_rows = max(1, PIECE_BYTES // max(1, row_bytes))  # of a piece
        self._known = [""] * -(-L // self.n_rows)
        self._counts: list[int] = []

    def forget(self, rows: slice) -> None:
        """These rows, at least one, were written to."""
        for i in range(rows.start // self.n_rows, (rows.stop - 1) // self.n_rows + 1):
            self._known[i] = ""

    def chunked(
        self, dtype: np.dtype, row: tuple[int, ...], n_used: int, read: Callable[[slice], np.ndarray]
    ) -> Chunked:
        """The first n_used rows, which `read` gives: contiguous, of this type and shape."""
        n, counts = self.n_rows, self._counts_of(n_used)
        self._agree(counts)
        return Chunked(dtype, row, counts, lambda i: read(slice(i * n, i * n + counts[i])), self._known)

    def take_over(self, saved: np.ndarray | Chunked) -> None:
        """All rows were set to what was saved."""
        self._known[:] = [""] * len(self._known)
        if isinstance(saved, Chunked) and saved.counts == self._counts_of(sum(saved.counts)):
            self._counts = saved.counts
            self._known[: len(saved.counts)] = saved.digests[: len(saved.counts)]

    def _counts_of(self, n_used: int) -> list[int]:
        return [min(self.n_rows, n_used - start) for start in range(0, n_used, self.n_rows)]

    def _agree(self, counts: list[int]) -> None:
        """What was noted of a piece that was shorter says nothing of the piece that is there now."""
        for i, count in enumerate(counts):
            if i >= len(self._counts) or self._counts[i] != count:
                self._known[i] = ""
        self._counts = counts


def in_pieces(array: np.ndarray) -> Chunked:
    """A contiguous array, flat; nothing is known of its pieces."""
    flat = array.reshape(-1)
    n = max(1, PIECE_BYTES // max(1, array.itemsize))
    counts = [min(n, len(flat) - start) for start in range(0, len(flat), n)]
    return Chunked(array.dtype, (), counts, lambda i: flat[i * n : i * n + counts[i]], [""] * len(counts))


def by_rows(saved: np.ndarray | Chunked) -> Iterator[tuple[slice, np.ndarray]]:
    """What was saved, piece by piece, and which rows that are; an array is one piece."""
    start = 0
    for piece in saved.pieces() if isinstance(saved, Chunked) else [saved]:
        yield slice(start, start + len(piece)), piece
        start += len(piece)
