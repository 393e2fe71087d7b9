"""The prefixes of a store as people name them: by the ids that `kvkeep ls` and `kvkeep pin --list` show."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvkeep.store.errors import UsageError
from kvkeep.tools.choice import named

if TYPE_CHECKING:
    from kvkeep.cache.listing import Run
    from kvkeep.store.engine import Connection
    from kvkeep.store.hashing import PrefixHash
    from kvkeep.store.namespaces import Namespace
    from kvkeep.store.pins import Pin
    from kvkeep.store.repository import Repository


@dataclass(frozen=True, slots=True)
class Chosen:
    """A prefix that something is to be done with.

    Attributes:
        key: its id.
        space: whose tokens they are.
        tokens: all of them, little-endian int32.
    """

    key: "PrefixHash"
    space: "Namespace"
    tokens: bytes

    @property
    def n_tokens(self) -> int:
        from kvkeep.store.frame import TOKEN_BYTES

        return len(self.tokens) // TOKEN_BYTES


@dataclass(frozen=True, slots=True)
class Pinned:
    """A pin, as it is shown.

    Attributes:
        key: that of the prefix, if just this one is stored as a prefix, else the prefix hash of its tokens.
        space: whose tokens they are.
        pin: its row.
        stored_bytes: what is stored of it, shared or not.
        kept: keys of that.
    """

    key: "PrefixHash"
    space: "Namespace"
    pin: "Pin"
    stored_bytes: int
    kept: "frozenset[PrefixHash]"


def named_prefixes(repository: "Repository", ids: Sequence[str], n_tokens: int | None, what: str) -> list[Chosen]:
    """The prefixes that ids name, whether they are stored as such or only pinned.

    Args:
        repository: where they are stored.
        ids: as people type them.
        n_tokens: only so many of their first tokens; None for all.
        what: what is to be done with them, such as `pinned`.

    Raises:
        UsageError: there is no such prefix, or it has fewer tokens, or they aren't all known.
    """
    runs = stored_prefixes(repository)
    pins = {found.key: found for found in pinned_prefixes(repository)}
    chosen = []
    for key in named(ids, {*runs, *pins}):
        if key in runs:
            found = Chosen(key, runs[key].space, all_tokens(repository, runs[key], what))
        else:
            found = Chosen(key, pins[key].space, pins[key].pin.tokens)
        chosen.append(found if n_tokens is None else _first(found, n_tokens))
    return chosen


def _first(found: Chosen, n_tokens: int) -> Chosen:
    from kvkeep.store.frame import TOKEN_BYTES

    if not 0 < n_tokens <= found.n_tokens:
        raise UsageError(
            f"{found.key.hex()[:8]} has {found.n_tokens:,} tokens; --tokens names how many of the first ones, not {n_tokens}"
        )
    tokens = found.tokens[: n_tokens * TOKEN_BYTES]
    return Chosen(key_of_tokens(found.space, tokens), found.space, tokens)


def stored_prefixes(repository: "Repository") -> "dict[PrefixHash, Run]":
    """The prefixes that `kvkeep ls` shows, by their keys."""
    from kvkeep.cache.listing import listing

    with repository.rows() as connection:
        return {run.key: run for run in listing(connection).prefixes()}


def all_tokens(repository: "Repository", run: "Run", what: str) -> bytes:
    """The tokens of a prefix from position 0 on.

    Args:
        repository: where it is stored.
        run: the prefix.
        what: what is to be done with it, such as `pinned`.

    Raises:
        UsageError: they aren't all known.
    """
    from kvkeep.store.frame import Kind
    from kvkeep.store.verify import verified

    if run.first_known == 0:
        return run.all_tokens()
    whole = [entry for entry in run.entries if getattr(entry, "kind", None) == Kind.OPAQUE]
    if not whole:
        hint = "pin it in the program that has them all" + ("" if what == "pinned" else ", and name it by --pinned")
        raise UsageError(
            f"{run.key.hex()[:8]} can't be {what} from here: of its {run.end:,} tokens only the last {run.end - run.start} are "
            f"stored; {hint}"
        )
    # A whole state is stored with all of its tokens, though its row has only the last ones.
    with repository.snapshot() as snapshot:
        return verified(snapshot.blobs.get(whole[0].blob), whole[0])[0].tokens


def pinned_prefixes(repository: "Repository") -> list[Pinned]:
    """All pins, the oldest first."""
    from kvkeep.cache.listing import listing
    from kvkeep.store import namespaces, pins

    with repository.rows() as connection:
        spaces = {space.id: space for space in namespaces.every(connection)}
        keys = {(run.space.id, run.all_tokens()): run.key for run in listing(connection).prefixes() if run.first_known == 0}
        return [
            _pinned(connection, spaces[found.namespace_id], found, keys.get((found.namespace_id, found.tokens)))
            for found in pins.every(connection)
            if found.namespace_id in spaces
        ]


def _pinned(connection: "Connection", space: "Namespace", found: "Pin", key: "PrefixHash | None") -> Pinned:
    from kvkeep.cache.eviction import key_of
    from kvkeep.cache.pinned import stored_of

    stored = list(stored_of(connection, space, found.tokens))
    n_bytes = sum(entry.stored_bytes for entry in stored)
    return Pinned(key or key_of_tokens(space, found.tokens), space, found, n_bytes, frozenset(map(key_of, stored)))


def key_of_tokens(space: "Namespace", tokens: bytes) -> "PrefixHash":
    """The prefix hash of some tokens, by which they are named where they aren't stored as a prefix of their own."""
    from kvkeep.cache.restore_point import Prompt

    return Prompt.of(space.fingerprint, tokens, space.block_tokens).prefix
