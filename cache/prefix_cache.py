"""The prefix cache of one model: match, save, restore. Knows tokens and states, not where they come from."""

import threading
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from kvkeep.cache import budget, pinned, restore_point, upkeep
from kvkeep.cache.batches import Saved
from kvkeep.cache.eviction import branch, key_of
from kvkeep.cache.layout import Bytes
from kvkeep.cache.match import Match, Reason, Source
from kvkeep.cache.memory import Memory
from kvkeep.cache.points import Point
from kvkeep.cache.restore import Restored, assemble
from kvkeep.cache.restore_point import Prompt
from kvkeep.cache.save import Saver
from kvkeep.cache.state import Form
from kvkeep.store import left_out, namespaces, pins, rows
from kvkeep.store.engine import Connection
from kvkeep.store.entry import Entry
from kvkeep.store.errors import CapacityError, StoreLocked, UsageError
from kvkeep.store.hashing import BlobId, Fingerprint, PrefixHash
from kvkeep.store.namespaces import Namespace
from kvkeep.store.nodes import Node
from kvkeep.store.repository import Repository
from kvkeep.store.writing import Writing

# Tokens of a block. With whole tails rewritten, turns of 40 tokens wrote 1.8 times the stored bytes at 64, 2.6 at 128
# and 4.0 at 256; below 64, rows and LMDB's pages begin to show.
BLOCK_TOKENS = 64

# A restore looks again where entries are damaged, or were replaced since the match. Each time there is less to look for,
# or somebody else has just saved; nobody waits for more than this.
_TRIES = 16

Tokens = Sequence[int] | npt.NDArray[np.integer]


@dataclass(frozen=True, slots=True)
class Identity:
    """Whose states these are.

    Attributes:
        fingerprint: everything that decides which states may stand in for each other.
        label: the model's own name, for people.
        ingredients: what went into the fingerprint, for people.
        memory: what the model's memory consists of.
    """

    fingerprint: Fingerprint
    label: str
    ingredients: dict[str, str]
    memory: Memory


class PrefixCache:
    """States of one identity in one repository. Safe to use from several threads.

    Args:
        repository: where they are kept.
        identity: whose they are.
        block_tokens: tokens of a block, for a namespace that doesn't exist yet.
    """

    def __init__(self, repository: Repository, identity: Identity, *, block_tokens: int = BLOCK_TOKENS) -> None:
        if block_tokens < 1:
            raise UsageError(f"block_tokens is {block_tokens}; at least 1 is needed")
        self.repository = repository
        self.identity = identity
        self._block_tokens = block_tokens
        self._namespace: Namespace | None = None
        self._namespace_lock = threading.Lock()

    @property
    def namespace(self) -> Namespace | None:
        """The namespace's row, or None as long as nothing was ever saved in it."""
        with self._namespace_lock:
            if self._namespace is None:
                with self.repository.rows() as connection:
                    self._namespace = namespaces.find(connection, self.identity.fingerprint)
            return self._namespace

    @property
    def block_tokens(self) -> int:
        """Tokens of a block, fixed for the namespace's life."""
        space = self.namespace
        return self._block_tokens if space is None else space.block_tokens

    def match(
        self,
        tokens: Tokens,
        *,
        at_most: int | None = None,
        seq_id: int = 0,
        form: Form = Form.SEQUENCE,
        without: Collection[BlobId] = (),
    ) -> Match:
        """How many of the first tokens can be restored.

        Args:
            tokens: the prompt.
            at_most: use no more than these; a prompt's last token must always be decoded again.
            seq_id: the sequence for which checkpoints are looked up.
            form: the form that it will be restored in; the whole form takes as much of a window's cache as is stored.
            without: blobs that are known to be damaged.

        Returns:
            A match with the plan to restore it, or one of length 0 with its reason.
        """
        n_tokens = len(tokens)
        wanted = n_tokens if at_most is None else max(0, min(at_most, n_tokens))
        data = token_bytes(tokens[:wanted])
        with self.repository.rows() as connection:
            space = namespaces.find(connection, self.identity.fingerprint)
            if space is None:
                return Match(length=0, prompt_tokens=n_tokens, reason=self._without_any(connection))
            found = restore_point.find(
                connection,
                self._prompt(data, space.block_tokens),
                self.identity.memory,
                seq_id=seq_id,
                whole_window=form is Form.WHOLE,
                without=without,
            )
            if found.length == 0 and not rows.holds_any(connection, space.id):
                return Match(length=0, prompt_tokens=n_tokens, reason=self._without_any(connection))
        if found.length == 0:
            return _nothing(n_tokens, found.in_common)
        return Match(
            length=found.length,
            prompt_tokens=n_tokens,
            source=Source.DISK,
            plan=found.steps,
            windows=found.windows,
            checkpoint=found.checkpoint,
        )

    def _without_any(self, connection: Connection) -> Reason:
        """Why nothing is found where nothing of this model is stored."""
        others = namespaces.any_other(connection, self.identity.fingerprint)
        return Reason.OTHER_NAMESPACE if others else Reason.EMPTY

    def _prompt(self, data: bytes, block_tokens: int) -> Prompt:
        return Prompt.of(self.identity.fingerprint, data, block_tokens)

    def restore(self, match: Match, tokens: Tokens, *, form: Form = Form.SEQUENCE, arch: str = "", seq_id: int = 0) -> Restored:
        """Read, verify and assemble what `match` found.

        Args:
            match: from `match` with the same tokens.
            tokens: the prompt.
            form: which of llama.cpp's forms to write; opaque checkpoints come back in the form they were saved in.
            arch: the architecture's name, for the whole form.
            seq_id: as in the match.

        Returns:
            The state. Shorter than the match, down to nothing, where stored data turned out to be damaged.
        """
        damaged: list[Entry] = []
        detail = ""
        longest = match.length
        for _ in range(_TRIES):
            held = [key_of(entry) for entry in match.entries]
            with self.repository.holding(held), self.repository.values() as blobs:
                restored = assemble(blobs, match, token_bytes(tokens[: match.length]), form, arch)
            if restored.length or not restored.damaged:
                break
            met = self._still_there(restored.damaged)
            if met:
                damaged += met
                detail = detail or restored.detail
                # What stands before a damaged node is still good, and so are other checkpoints.
                longest = min([longest, *(entry.start for entry in met if isinstance(entry, Node))])
            # The others were replaced or evicted since the match, and what replaces them is as good.
            names = {entry.blob for entry in damaged}
            match = self.match(tokens, at_most=longest, seq_id=seq_id, form=form, without=names)
            if match.length == 0:
                break
        self.repository.touch(entry for entry in match.entries if entry not in damaged)
        return replace(restored, damaged=tuple(damaged), detail=detail, used=tuple(match.entries))

    def _still_there(self, entries: Sequence[Entry]) -> list[Entry]:
        with self.repository.rows() as connection:
            return [entry for entry in entries if rows.is_there(connection, entry)]

    def save(
        self,
        tokens: Tokens,
        state: Bytes,
        form: Form = Form.SEQUENCE,
        *,
        points: Sequence[Point] = (),
        seq_id: int = 0,
        pause: Callable[[], None] = lambda: None,
    ) -> Saved:
        """Store what of a state isn't stored yet.

        Args:
            tokens: what the state was decoded from: position i holds token i.
            state: llama.cpp's bytes, uint8; its cells are exactly the positions 0 to len(tokens) - 1.
            form: the form of the bytes.
            points: checkpoints that were taken while these tokens were decoded.
            seq_id: the sequence by which checkpoints are filed.
            pause: called now and then; may raise to stop, which leaves a sound first part stored.

        Returns:
            What was written.

        Raises:
            LayoutError: the state doesn't hold exactly these positions.
            CapacityError, StoreLocked, StoreError: not, or only a first part, was stored. The store is sound.
        """
        # Written down before anybody is evicted for this state.
        self.repository.flush_touched()
        with self.repository.writing() as writing:
            budget.expire(writing)
            space = self._space(writing)
            data = token_bytes(tokens)
            prompt = self._prompt(data, space.block_tokens)
            saver = Saver(writing, space, self.identity, prompt, seq_id, pause, state.nbytes)
            try:
                saved = saver.save(state, form, points)
            finally:
                self.repository.touch(saver.passed, hit=False)
        if upkeep.needs_care(self.repository):
            # A smaller budget was asked for meanwhile, or a compaction was killed. Whoever holds a lock may see to it, too.
            # And where the disk has no room for that, this state is stored all the same.
            with suppress(StoreLocked, CapacityError):
                upkeep.settle(self.repository)
        return saved

    @property
    def largest_bytes(self) -> int:
        """The most that one entry may have: a state that is kept whole and has more needn't be copied."""
        return budget.largest(self.repository.blobs)

    def quarantine(self, entries: Sequence[Entry]) -> int:
        """Remove entries that didn't verify, so that the next save writes them anew. Returns how many were removed.

        Looks again under the lock: another process may have removed and rewritten them meanwhile.
        """
        with self.repository.writing() as writing:
            return writing.remove_damaged(entries)

    def remove(self, entries: Sequence[Entry]) -> int:
        """Remove entries that llama.cpp refused although they verify. Returns how many."""
        with self.repository.writing() as writing:
            writing.remove(entries)
        return len(entries)

    def key_of(self, tokens: Tokens) -> PrefixHash:
        """The prefix hash of some tokens, from the first one on."""
        return self._prompt(token_bytes(tokens), self.block_tokens).prefix

    def forget(self, tokens: Tokens) -> int:
        """Remove what holds the last one of these tokens behind the others, and all that stands on it. Returns how many."""
        data = token_bytes(tokens)
        with self.repository.writing() as writing:
            space = self._space(writing)
            prompt = self._prompt(data, space.block_tokens)
            slot = (prompt.n_tokens - 1) // space.block_tokens
            with writing.index.read() as connection:
                found = branch(rows.of(connection, space.id), prompt.borders[slot], prompt.rest(slot))
            writing.remove(found)
        return len(found)

    def pin(self, tokens: Tokens) -> bool:
        """Keep what is stored of a prefix, now and later; see `kvkeep.cache.pinned.pin`. False if it is pinned already."""
        with self.repository.writing() as writing:
            return pinned.pin(writing, self._space(writing), token_bytes(tokens))

    def unpin(self, tokens: Tokens) -> bool:
        """End a pin. False if this prefix isn't pinned."""
        with self.repository.writing() as writing:
            return pinned.unpin(writing, self._space(writing), token_bytes(tokens))

    def clear(self, model: str | None = None) -> int:
        """Remove everything that is stored of this model, pins included. Returns how many entries were removed.

        Args:
            model: the label of another one, or the beginning of its fingerprint.

        Raises:
            UsageError: there is no such model.
        """
        with self.repository.writing() as writing:
            return clear(writing, self.identity.fingerprint.hex() if model is None else model, missing_ok=model is None)

    def _space(self, writing: Writing) -> Namespace:
        """The namespace, created if missing."""
        who = self.identity
        with writing.index.read() as connection:
            found = namespaces.find(connection, who.fingerprint)
        if found is not None:
            return found
        with writing.index.write() as connection:
            return namespaces.add(connection, who.fingerprint, who.label, who.ingredients, self._block_tokens)

    def measured(self, prefill_rate: float | None, restore_rate: float | None) -> None:
        """Remember measured speeds for the next process; see `kvkeep.cache.break_even`."""
        space = self.namespace
        if space is None or (prefill_rate is None and restore_rate is None):
            return
        with self.repository.writing() as writing, writing.index.write() as connection:
            namespaces.measured(connection, space, prefill_rate, restore_rate)


def clear(writing: Writing, model: str, *, missing_ok: bool = False) -> int:
    """Remove everything that is stored of a model, pins included. Returns how many entries were removed.

    Args:
        writing: the right to write.
        model: its label, or the beginning of its fingerprint.
        missing_ok: nothing stored of it is no error.

    Raises:
        UsageError: there is no such model.
    """
    with writing.index.read() as connection:
        spaces = namespaces.named(connection, model)
        found = [entry for space in spaces for entry in rows.of(connection, space.id)]
        kept = [pin for space in spaces for pin in pins.of(connection, space.id)]
    if not spaces and not missing_ok:
        raise UsageError(f"no model is called {model!r}, and no fingerprint begins so; kvkeep stats lists them")
    with writing.index.write() as connection:
        pins.remove(connection, kept)
        for space in spaces:
            left_out.clear(connection, space.id)
    writing.remove(found)
    return len(found)


def _nothing(n_tokens: int, in_common: int) -> Match:
    """A miss although the namespace holds something."""
    if in_common == 0:
        return Match(length=0, prompt_tokens=n_tokens, reason=Reason.NO_COMMON_PREFIX)
    detail = f"{in_common} tokens are stored, but no checkpoint or window at or below the last of them"
    return Match(length=0, prompt_tokens=n_tokens, reason=Reason.NO_CHECKPOINT, detail=detail)


def token_bytes(tokens: Tokens) -> bytes:
    """Tokens as little-endian int32.

    Raises:
        UsageError: they aren't whole numbers of 32 bits in a row.
    """
    try:
        given = np.asarray(tokens)
        converted = given.astype("<i4")
    except (OverflowError, ValueError, TypeError) as error:
        raise UsageError(f"tokens are whole numbers of 32 bits: {error}") from error
    # numpy cuts what doesn't fit without a word, and the states of other tokens would match.
    if given.ndim != 1 or not np.array_equal(given, converted):
        raise UsageError(f"tokens are whole numbers of 32 bits in a row, not {given.dtype} of shape {given.shape}")
    return converted.tobytes()
