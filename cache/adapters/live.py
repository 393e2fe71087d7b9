"""The live sequence: what a `Llama`'s context holds, which tokens that came from, and how it is changed.

Everything that moves `n_tokens`, `input_ids`, llama.cpp's memory and the ledger does so here, so that the four always
agree: after any of these calls `n_tokens` positions are in the memory, and `input_ids` shows their tokens.
"""

import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from kvkeep.cache.adapters.context import LiveContext, address
from kvkeep.cache.layout import Bytes
from kvkeep.cache.ledger import Ledger
from kvkeep.cache.memory import MemoryKind
from kvkeep.cache.points import MAX_BYTES, Point, Points
from kvkeep.store.errors import StateRefused

Tokens = npt.NDArray[np.int32]

NO_TOKENS: Tokens = np.empty(0, np.int32)


# By the address of the context, so that whoever else saves of it can ask.
_watched: "weakref.WeakValueDictionary[int, LiveSequence]" = weakref.WeakValueDictionary()


def is_private(context: int) -> bool:
    """Whether what the context at this address holds must never be saved."""
    live = _watched.get(context)
    return live is not None and live.is_private


def was_cut(context: int, length: int) -> None:
    """Sequence 0 of the context at this address was cut back to `length` by somebody who does that by hand."""
    if (live := _watched.get(context)) is not None:
        live.was_cut(length)


class LiveSequence:
    """Sequence 0 of one `Llama`. The object itself is passed to each call, so that it isn't kept alive from here."""

    def __init__(self, llm: Any) -> None:
        self.context = LiveContext(llm)
        self._ledger = Ledger(llm.n_ctx())
        self.points = Points()
        # What was decoded before anybody looked stays unknown: input_ids may show stale numbers where an image is.
        self._count = self.context.decoded_count()
        _watched[address(llm._ctx.ctx)] = self

    def is_known(self, llm: Any) -> bool:
        """Whether every position of the context came from a text token that was seen."""
        return bool(len(self._ledger) >= llm.n_tokens)

    def refresh(self, llm: Any) -> None:
        """Look at what happened behind our back, and forget what no longer holds."""
        self._notice_foreign_decodes()
        if llm.input_ids.size < llm.n_ctx():
            # A state of a smaller context was loaded by hand; a longer prompt would then end in a ValueError.
            llm.input_ids = np.concatenate([llm.input_ids, np.full(llm.n_ctx() - llm.input_ids.size, -1, np.intc)])
        if self.is_known(llm) and self.context.pos_max() < llm.n_tokens - 1:
            # n_tokens promises more than the memory holds, as a refused load_state leaves it. (Positions of images are
            # another matter: with M-RoPE many share one, so only text is held to this.)
            self.empty(llm)
        self._notice_moves(llm)
        self._forget(llm.n_tokens)

    def _notice_moves(self, llm: Any) -> None:
        """Forget what was known where the memory was shifted or cut through the C API.

        Each cut that is ours, or goes through `Llama`, has shortened the ledger as well; if the memory is shorter than that,
        its middle may be what is gone. And whoever shifts and tells `input_ids` shows there where that begins.
        """
        if self.context.pos_max() < len(self._ledger) - 1:
            self._forget(0)
        if (at := self._ledger.differs(llm.input_ids[: llm.n_tokens])) is not None:
            self._forget(at)

    def was_cut(self, length: int) -> None:
        """Positions from `length` on were removed or moved, by somebody else."""
        self._forget(length)

    def _forget(self, length: int) -> None:
        """Positions from `length` on are gone, or nobody knows what they hold."""
        self._ledger.cut(length)
        self.points.cut(length)

    def _notice_foreign_decodes(self) -> None:
        """Forget what was known if anybody but `eval` has decoded since: an image, an embedding, the C API."""
        count = self.context.decoded_count()
        if count != self._count:
            self._count = count
            self._forget(0)

    @contextmanager
    def resetting_timings(self) -> Iterator[None]:
        """Around a reset of llama.cpp's counters, by which foreign decodes are noticed."""
        self._notice_foreign_decodes()
        yield
        self._count = self.context.decoded_count()

    def usable_prefix(self, llm: Any, prompt: Tokens) -> int:
        """How many tokens of the prompt the context can give: known, shared, and possible to go back to.

        At most all but the last one, which must be decoded for its logits.
        """
        shared = self._ledger.common(prompt, min(llm.n_tokens, len(prompt) - 1))
        if shared > 0 and self.context.can_cut_to(shared):
            return shared
        point = self.points.best(shared)
        return 0 if point is None else point.pos

    def cut(self, llm: Any, length: int) -> None:
        """Go back to `length`, as `usable_prefix` said. The context is empty if that fails.

        Done here and not by the stock `generate`, which doesn't check what it cuts into.

        Raises:
            StateRefused: llama.cpp didn't take the checkpoint; the context is empty now.
        """
        if length == 0:
            self.empty(llm)
            return
        try:
            self._go_back(length)
        except BaseException:
            self.empty(llm, buffers=True)
            raise
        if length < llm.n_tokens:
            llm._requires_eval = True
        llm.n_tokens = length
        self._forget(length)

    def _go_back(self, length: int) -> None:
        if self.context.can_cut_to(length) and self.context.cut(length):
            return
        point = self.points.best(length)
        if point is None or point.pos != length:
            raise StateRefused(f"the context can't be cut back to {length} tokens, and no checkpoint was taken there")
        self.context.roll_back(point.data, length)

    def can_take_points(self, llm: Any) -> bool:
        """Whether checkpoints can be taken in what follows."""
        self._notice_foreign_decodes()
        return self._agrees(llm)

    def _agrees(self, llm: Any) -> bool:
        """Whether the context is known, and stands behind the last of its tokens. (pos_max is -1 where there are none.)"""
        return self._ledger.proven and self.is_known(llm) and self.context.pos_max() == llm.n_tokens - 1

    def take_point(self, llm: Any, *, saved: bool = False) -> None:
        """Take a checkpoint of what can't be cut, where the context stands now.

        Args:
            llm: the model.
            saved: the store has it, or is about to.
        """
        pos = llm.n_tokens
        if not self.context.memory.needs_checkpoints or pos == 0 or pos in self.points.positions:
            return
        if not self._agrees(llm) or self.context.point_bytes() > MAX_BYTES:
            return
        point = Point(pos, self.context.copy_point())
        self.points.add(point)
        if saved:
            self.points.saved([point])

    def empty(self, llm: Any, *, buffers: bool = False) -> None:
        """Hold nothing.

        Args:
            llm: the model.
            buffers: clear what masked cells point to as well. Needed after a state that was taken only in part, and not
                otherwise: it takes as long as writing all of n_ctx.
        """
        llm.n_tokens = 0
        llm._requires_eval = True
        self._forget(0)
        # Recurrent states aren't masked but read, so there the buffers always go.
        recurrent = self.context.memory.kind not in (MemoryKind.ATTENTION, MemoryKind.WINDOW)
        self.context.clear(buffers=buffers or recurrent)

    def load(self, llm: Any, state: Bytes, tokens: Tokens) -> None:
        """Hold a stored state instead.

        Raises:
            StateRefused: llama.cpp didn't take it; the context is empty now.
        """
        try:
            self.context.load(state, len(tokens))
            llm.input_ids[: len(tokens)] = tokens
            llm.n_tokens = len(tokens)
            llm._requires_eval = True
            # Checkpoints below hold for the same tokens, whoever decoded what can be cut.
            self.points.cut(self._ledger.common(tokens, len(tokens)))
            self._ledger.set(tokens, proven=True)
        except BaseException:
            # Interrupts too: nothing half loaded may stay.
            self.empty(llm, buffers=True)
            raise

    @contextmanager
    def observed(self, llm: Any, tokens: Sequence[int]) -> Iterator[list[float]]:
        """Around the stock `eval`: note what it decoded, also if it fails half-way.

        Yields:
            A list that holds, afterwards, the number of tokens decoded and the seconds that took.
        """
        self._notice_foreign_decodes()
        self._notice_moves(llm)
        at = llm.n_tokens
        # Now, and not when it is over: a second interrupt may come then.
        self._forget(at)
        outcome: list[float] = []
        began = time.perf_counter()
        try:
            yield outcome
        except BaseException:
            # The decode may have happened all the same, and the logits are then those of another position.
            llm._requires_eval = True
            raise
        finally:
            # Waits for the device, so the seconds are those of the work and not of its submission.
            self._count = self.context.decoded_count()
            done = max(0, llm.n_tokens - at)
            self._ledger.extend(at, tokens[:done])
            outcome += [done, time.perf_counter() - began]

    def was_reset(self) -> None:
        """`Llama.reset` was called."""
        self._forget(0)

    def was_loaded(self, llm: Any, *, proven: bool) -> None:
        """`Llama.load_state` was called. Whose state that was, nobody knows, unless it was one of ours."""
        complete = self.context.pos_max() == llm.n_tokens - 1
        self.points.cut(0)
        self._ledger.set(llm.input_ids[: llm.n_tokens], proven=proven and complete)

    @contextmanager
    def private(self) -> Iterator[None]:
        """What is decoded meanwhile must never be saved. Blocks may stand in each other, and overlap."""
        self._ledger.private += 1
        try:
            yield
        finally:
            self._ledger.private -= 1

    @property
    def is_private(self) -> bool:
        """Whether what it holds, or is about to, must never be saved."""
        return self._ledger.is_private or self._ledger.private > 0

    def public_tokens(self) -> Tokens:
        """The tokens of the context before the first one that must never be saved. A view."""
        return self._ledger.public_tokens

    def known_tokens(self) -> Tokens:
        """The tokens of the context as far as they are known. A view."""
        return self._ledger.tokens

    def keepable(self, llm: Any) -> Tokens:
        """The context's tokens, if all are known, may be saved, and the memory ends exactly behind them; else none.

        A copy.
        """
        self._notice_foreign_decodes()
        n_tokens = llm.n_tokens
        known = self._ledger.proven and n_tokens > 0 and len(self._ledger) == n_tokens and not self._ledger.is_private
        # (input_ids ends at n_ctx, a recurrent model may not.)
        if not known or self._ledger.differs(llm.input_ids[:n_tokens]) is not None:
            return NO_TOKENS
        if self.context.pos_max() >= n_tokens and self.context.can_cut_to(n_tokens):
            # An interrupt leaves the memory ahead of n_tokens, and logits that aren't those of its last token.
            self.context.cut(n_tokens)
            llm._requires_eval = True
        if self.context.pos_max() != n_tokens - 1 or not self.context.can_go_on_from(n_tokens):
            return NO_TOKENS
        return self._ledger.tokens.copy()
