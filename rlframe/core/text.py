"""Words for messages."""


def counted(n: int, noun: str) -> str:
    """A number and what it counts: 1 worker, 2 workers."""
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def printable(text: str) -> str:
    """The text with every character that a terminal would obey instead of showing written as its escape.

    Line ends stay. What comes from files of somebody else is printed through this.
    """
    return "".join(c if c == "\n" or c.isprintable() else c.encode("unicode_escape").decode() for c in text)
