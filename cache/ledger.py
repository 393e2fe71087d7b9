"""What is known about the positions of a live context: which token each was decoded from.

`Llama.input_ids` doesn't tell: it shows stale numbers where an image was decoded, and whatever a caller put there.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


class Ledger:
    """Tokens of the positions 0, 1, ... that came through `eval` as text."""

    def __init__(self, n_ctx: int) -> None:
        self._tokens: npt.NDArray[np.int32] = np.empty(n_ctx, np.int32)
        self._length = 0
        self.proven = True
        """False if the positions came from somebody else's saved state: fit to go on from, not to be saved."""
        self.private = 0
        """How many reasons there are that what is decoded from now on must never be saved."""
        self._private_from: int | None = None

    def __len__(self) -> int:
        return self._length

    @property
    def tokens(self) -> npt.NDArray[np.int32]:
        """The known tokens. A view: copy it to keep it."""
        return self._tokens[: self._length]

    @property
    def is_private(self) -> bool:
        """Whether any position holds something that must never be saved."""
        return self._private_from is not None

    @property
    def public_tokens(self) -> npt.NDArray[np.int32]:
        """The known tokens before the first one that must never be saved. A view."""
        return self.tokens[: self._private_from]

    def set(self, tokens: npt.NDArray[np.int32] | Sequence[int], *, proven: bool) -> None:
        """The context holds exactly these tokens now."""
        self._length = len(tokens)
        self._tokens[: self._length] = tokens
        self.proven = proven
        self._private_from = None

    def cut(self, length: int) -> None:
        """Positions from `length` on are gone. An empty ledger is proven again: nothing is left to doubt."""
        self._length = min(self._length, length)
        if self._length == 0:
            self.proven = True
        if self._private_from is not None and self._length <= self._private_from:
            self._private_from = None

    def differs(self, shown: npt.NDArray[np.int32]) -> int | None:
        """The first position at which what somebody shows isn't what is known; None if there is none."""
        length = min(self._length, len(shown))
        found = self.common(shown, length)
        return found if found < length else None

    def extend(self, at: int, tokens: npt.NDArray[np.int32] | Sequence[int]) -> None:
        """`tokens` were decoded at position `at`. Behind a gap they stay unknown, as the gap is."""
        self.cut(at)
        if at != self._length or not len(tokens):
            return
        if at + len(tokens) > self._tokens.size:
            # A recurrent model goes on beyond n_ctx, which bounds cells only.
            self._tokens = np.resize(self._tokens, 2 * (at + len(tokens)))
        self._tokens[at : at + len(tokens)] = tokens
        self._length = at + len(tokens)
        if self.private and self._private_from is None:
            self._private_from = at

    def common(self, tokens: npt.NDArray[np.int32], at_most: int) -> int:
        """How many of the first `at_most` positions hold the first of `tokens`."""
        length = min(self._length, len(tokens), at_most)
        differs = self._tokens[:length] != tokens[:length]
        return int(differs.argmax()) if differs.any() else length
