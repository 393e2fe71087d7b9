"""Rows as they were read: are their values of the types that they were written with?

SQLite keeps the type with each value, and has no page checksums: a flipped bit turns a blob into a text or a NULL.
Whatever is of the right type is verified later, with the blob.
"""

from collections.abc import Sequence
from typing import Any

from kvkeep.store.errors import DamagedFile


def typed(row: Sequence[Any], types: tuple[type, ...], what: str) -> Sequence[Any]:
    """The same row.

    Args:
        row: as it was read.
        types: what each of its values must be.
        what: what it is, for the message.

    Raises:
        DamagedFile: a value is of another type.
    """
    # Compared as a whole: a match reads a row for each block of a prompt.
    if (found := (*map(type, row),)) != types:
        for got, wanted in zip(found, types, strict=True):
            if got is not wanted:
                raise DamagedFile(f"a row of {what} has {got.__name__} where {wanted.__name__} belongs")
    return row
