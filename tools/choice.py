"""Which prefixes and models a person means: ids as git abbreviates them, labels, beginnings of fingerprints."""

from collections.abc import Collection, Iterable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, TypeVar

from kvkeep.store.errors import UsageError
from kvkeep.tools.words import clean

if TYPE_CHECKING:
    from kvkeep.store.engine import Connection
    from kvkeep.store.namespaces import Namespace

# Digits of an id: shown unless more are needed to tell it from others, and asked for at least.
_SHOWN = 8
_FEWEST = 4
_DIGITS = frozenset("0123456789abcdef")

Key = TypeVar("Key", bound=bytes)


def short_ids(keys: Iterable[Key]) -> dict[Key, str]:
    """Each key's id: its first digits, as many as tell it from all others."""
    in_order = sorted(set(keys))
    digits = [key.hex() for key in in_order]
    needed = [0, *(_in_common(*pair) + 1 for pair in pairwise(digits)), 0]
    return {key: digits[i][: max(_SHOWN, needed[i], needed[i + 1])] for i, key in enumerate(in_order)}


def _in_common(one: str, other: str) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), len(one))


def named(given: Sequence[str], keys: Collection[Key], what: str = "prefix") -> list[Key]:
    """The keys that ids name.

    Raises:
        UsageError: one of them names none, or several.
    """
    return list(dict.fromkeys(_named(text, keys, what) for text in given))


def _named(text: str, keys: Collection[Key], what: str) -> Key:
    digits = text.lower()
    if len(digits) < _FEWEST or not set(digits) <= _DIGITS:
        raise UsageError(
            f"{clean(text)!r} is no id: ids are at least {_FEWEST} of the digits 0-9 and a-f, as kvkeep ls shows them"
        )
    found = [key for key in keys if key.hex().startswith(digits)]
    if not found:
        raise UsageError(f"no {what} has the id {digits}; kvkeep ls shows those that there are")
    if len(found) > 1:
        raise UsageError(f"{digits} is the beginning of several ids: {', '.join(sorted(short_ids(found).values()))}")
    return found[0]


def chosen_spaces(connection: "Connection", text: str | None) -> "list[Namespace]":
    """The models that a person means; all of them for None. One label may stand for several settings of a model.

    Raises:
        UsageError: there is no such model.
    """
    from kvkeep.store import namespaces

    every = namespaces.every(connection)
    found = every if text is None else namespaces.named(connection, text)
    if text is not None and not found:
        labels = ", ".join(sorted({clean(space.label) for space in every})) or "none"
        raise UsageError(f"no model is called {clean(text)!r}, and no fingerprint begins so; there are: {labels}")
    return found
