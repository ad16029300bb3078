"""Which groups of a benchmark are measured, by `only=` or another key."""

from collections.abc import Iterable


def chosen(only: str, known: Iterable[str], key: str = "only") -> list[str]:
    """The names in `only`, separated by commas; all that are known, if it is empty.

    Raises:
        SystemExit: one of them is not known.
    """
    known = list(known)
    names = [name for name in only.split(",") if name] or known
    if unknown := set(names) - set(known):
        raise SystemExit(f"{key}={','.join(sorted(unknown))}: not one of {', '.join(known)}")
    return names
