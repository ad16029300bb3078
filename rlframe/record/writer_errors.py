"""Errors of writers name the writer, as those of other parts of the user's own do. Used by `record.run`."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rlframe.core.errors import PartError, naming, qualified_name
from rlframe.core.objects import name_of
from rlframe.record.named_writers import MakeWriter
from rlframe.record.writers import Writer


def make_writer(make: MakeWriter, directory: Path, config: Mapping[str, Any], name: str) -> Writer:
    """A writer. Raises PartError if one of the user's own raises an exception."""
    known = name_of(make)
    if known.startswith("rlframe."):
        return make(directory, config, name)
    with naming(f"writer {known} cannot start"):
        return make(directory, config, name)


def is_own(cls: type[Writer]) -> bool:
    """Whether a writer is the user's own."""
    return not cls.__module__.startswith("rlframe.")


def close_writer(writer: Writer) -> None:
    """Close a writer. Raises as `naming_writer`."""
    with naming_writer(writer, "close"):
        writer.close()


@contextmanager
def naming_writer(writer: Writer, method: str) -> Iterator[None]:
    """Raise PartError for an exception of a writer; an OSError stays one, as the disk may be full."""
    try:
        with naming(f"writer {qualified_name(type(writer))} failed in {method}"):
            yield
    except PartError as error:
        if isinstance(error.__cause__, OSError):
            raise error.__cause__ from None
        raise
