"""Streams that share one context: whose it is, and whether one that was suspended still finds it as it left it.

A stream may be suspended for good, or be gone on with after another prompt has taken the context. Stock `generate` goes on
then, as if the other prompt's tokens were its own: its answer is made of them, the other chat gets its tokens, and where
logits are missing llama.cpp ends the process.
"""

import weakref
from typing import Any

import numpy as np

from kvkeep.cache.adapters.live import Tokens


class Streams:
    """The streams of one `Llama`."""

    def __init__(self) -> None:
        self._count = 0
        # The newest one that hasn't ended, as long as nobody else has moved the context; 0 is none.
        self._at_work = 0
        # What the others have left in the context, by their numbers.
        self._left: dict[int, Tokens] = {}

    def begin(self, llm: Any) -> int:
        """A prompt takes the context. Returns the number of its stream."""
        self.leave(llm)
        self._count += 1
        self._at_work = self._count
        return self._count

    def is_newest(self, number: int) -> bool:
        """Whether no other prompt has come since."""
        return number == self._count

    def leave(self, llm: Any) -> None:
        """Somebody else is about to move the context: remember how the suspended stream has left it."""
        if self._at_work:
            self._left[self._at_work] = llm.input_ids[: llm.n_tokens].copy()
            self._at_work = 0

    def may_go_on(self, llm: Any, number: int) -> bool:
        """Whether the context is as this stream has left it, be it that somebody has loaded that again."""
        left = self._left.pop(number, None)
        if left is None:
            return True
        if llm.n_tokens != len(left) or not np.array_equal(llm.input_ids[: len(left)], left):
            return False
        # Two streams of one prompt may be at the same point: the other one will find it moved.
        self.leave(llm)
        self._at_work = number
        return True

    def end(self, number: int) -> None:
        """A stream has ended, however it did."""
        self._left.pop(number, None)
        if self._at_work == number:
            self._at_work = 0


_of: "weakref.WeakKeyDictionary[Any, Streams]" = weakref.WeakKeyDictionary()


def streams_of(llm: Any) -> Streams:
    """Those of a model, through whichever caches they came: a closed one's streams live on."""
    return _of.setdefault(llm, Streams())
