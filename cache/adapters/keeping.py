"""What of a context is to be stored: handed over to the writer once, as one copy."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from kvkeep.cache.adapters.backing import Backing
from kvkeep.cache.adapters.live import NO_TOKENS, LiveSequence, Tokens
from kvkeep.cache.adapters.requests import Requests
from kvkeep.cache.break_even import BreakEven
from kvkeep.cache.memory import MemoryKind
from kvkeep.cache.points import Point
from kvkeep.cache.prefix_cache import PrefixCache
from kvkeep.cache.report import Reporter
from kvkeep.store import left_out
from kvkeep.store.errors import DailyLimit, TooLarge
from kvkeep.store.left_out import Beginning

# How many tokens must be at stake before a prompt waits for the disk, and for how long it does.
WAIT_TOKENS = 64
WAIT_SECONDS = 10.0


class Keeping:
    """Remembers what was handed over. Used by a `Session`, which holds its lock around every call.

    Args:
        live: the context.
        backing: the store behind it.
        requests: the present request.
        rates: measured speeds, which are written down with what is stored.
        reporter: where errors and counts go.
    """

    def __init__(self, live: LiveSequence, backing: Backing, requests: Requests, rates: BreakEven, reporter: Reporter) -> None:
        self._live = live
        self._backing = backing
        self._requests = requests
        self._rates = rates
        self._reporter = reporter
        self._kept: Tokens = NO_TOKENS
        self._anyway = False
        self._was_cleared = False

    def keep(self, llm: Any) -> None:
        """Save the context's state, if it is known to be right and isn't stored yet. Costs the caller one copy."""
        if self._backing.unavailable:
            return
        tokens = self._live.keepable(llm)
        if len(tokens) == 0 or self._is_kept(tokens):
            return
        if self._is_one_shot(tokens):
            return
        context = self._live.context
        opaque = context.memory.kind is MemoryKind.UNKNOWN
        if opaque and not self._backing.fits(context.state_bytes()):
            self._kept = tokens
            # Not new any more, or the same state would be counted as dropped at every look.
            self._live.points.handed_over(self._live.points.unsaved())
            return
        self._live.take_point(llm)
        points = self._live.points.unsaved()
        state = context.copy_state()
        # A newer job takes over the checkpoints of the one that it replaces; not where each would have to be a full state.
        done = partial(self._saved, points)
        self._backing.keep(tokens, state, context.form, points, replaces=not opaque, done=done)
        self._kept = tokens
        self._live.points.handed_over(points)

    def wait_for(self, prompt: Sequence[int]) -> None:
        """Before a look-up for somebody who has emptied the context: what it held last may still wait for the disk.

        Chat handlers that see begin each turn so, and without this a turn right behind the other would be decoded anew.
        """
        if self._backing.unavailable or self._backing.cache is None:
            return
        n_tokens = min(len(prompt), len(self._kept), WAIT_TOKENS)
        if n_tokens == WAIT_TOKENS and np.array_equal(self._kept[:n_tokens], prompt[:n_tokens]):
            self._backing.flush(WAIT_SECONDS)

    def again(self) -> None:
        """What is stored is damaged, and about to be removed: the next state is saved whatever the index still shows."""
        self._kept, self._anyway = NO_TOKENS, True

    def forget(self) -> None:
        """What was saved is gone from the store: it may be saved again."""
        self._kept = NO_TOKENS

    def was_cleared(self) -> None:
        """What was saved is gone from the store, by somebody's wish: it comes back with the next request, not with the end."""
        self._was_cleared = True

    def prompt_came(self) -> None:
        """A request was settled."""
        if self._was_cleared:
            self._kept, self._was_cleared = NO_TOKENS, False

    def failed(self, error: BaseException | None) -> None:
        """A job of the writer failed, or was given up."""
        if not isinstance(error, TooLarge | DailyLimit):
            # It isn't stored, so the next state must not be skipped because of it. (Too large it stays, as does the day.)
            self._kept = NO_TOKENS

    def _is_kept(self, tokens: Tokens) -> bool:
        """Whether it was saved a moment ago, or the store has it already."""
        if self._live.points.has_new:
            return False
        cuttable = not self._live.context.memory.needs_checkpoints
        if np.array_equal(tokens, self._kept[: len(tokens)] if cuttable else self._kept):
            return True
        if self._anyway:
            # What the index still shows is about to be removed by the writer.
            self._anyway = False
            return False
        return self._backing.cache is not None and self._backing.cache.match(tokens).length == len(tokens)

    def _is_one_shot(self, tokens: Tokens) -> bool:
        """Whether nothing would ever be restored of it. Counted, and said once."""
        found = False
        with self._reporter.border("comparing a prompt"):
            found = self._requests.is_one_shot(tokens, self._backing.cache)
            if (beginning := self._requests.newly_left_out()) is not None:
                self._reporter.one_shot()
                self._backing.later(partial(self._remember, beginning))
        return found

    def _remember(self, beginning: Beginning) -> None:
        """Met again, in whatever process, it is stored."""
        cache = self._backing.cache
        if cache is not None and (space := cache.namespace) is not None:
            with cache.repository.writing() as writing, writing.index.write() as connection:
                left_out.add(connection, space.id, beginning)

    def _saved(self, points: Sequence[Point], cache: PrefixCache) -> None:
        """Runs in the writer's thread, or in that of whoever flushes."""
        self._live.points.saved(points)
        with self._reporter.border("noting what was measured and used"):
            cache.measured(self._rates.prefill_rate, self._rates.restore_rate)
            cache.repository.flush_touched()
