"""A progress bar for commands, on a terminal only."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rlframe.record.console import on_terminal


@contextmanager
def progress_bar(title: str, total: int) -> Iterator[Callable[[int], None]]:
    """Gives a function that adds to what is done of `total`. The bar disappears at the end of the `with` block."""
    if not on_terminal():
        yield lambda _: None
        return
    from rich.progress import Progress  # loaded for terminals only

    with Progress(transient=True) as bar:
        task = bar.add_task(title, total=total)
        yield lambda n: bar.advance(task, n)
