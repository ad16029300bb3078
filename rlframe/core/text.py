"""Words for messages."""


def counted(n: int, noun: str) -> str:
    """A number and what it counts: 1 worker, 2 workers."""
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"
