"""Checkpoints of a live context, kept in memory: what can't be cut, at some positions of the present sequence.

Also the rule by which checkpoints are thinned, here and on disk: a spread over the whole length remains.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass

from kvkeep.cache.layout import Bytes

# Recurrent tensors have 0.1 MB (LFM2) to 75 MB (Qwen3-Next) a checkpoint.
MAX_POINTS = 32
MAX_BYTES = 256 << 20
# The last user's turn, the end of the prompt, the end of the answer: what the next prompt most often goes back to.
NEWEST = 3


@dataclass(frozen=True, slots=True, eq=False)
class Point:
    """A checkpoint.

    Attributes:
        pos: tokens before it; it holds for exactly this position.
        data: what llama.cpp writes with `LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY`, one sequence; for a memory that can't be
            parsed, the full state.
    """

    pos: int
    data: Bytes


class Points:
    """Checkpoints of one live sequence, ordered by position, bounded in number and bytes.

    A thread that stores them may say so (`saved`) beside the one that takes them.

    Args:
        max_points: keep at most so many.
        max_bytes: keep at most so many bytes.
    """

    def __init__(self, max_points: int = MAX_POINTS, max_bytes: int = MAX_BYTES) -> None:
        self._max_points = max_points
        self._max_bytes = max_bytes
        self._points: list[Point] = []
        self._lock = threading.Lock()
        # Those that the store doesn't have yet: nobody has them, or somebody is about to store them.
        self._new: set[Point] = set()
        self._waiting: set[Point] = set()

    def __len__(self) -> int:
        return len(self._points)

    @property
    def positions(self) -> list[int]:
        """Where they are, lowest first."""
        return [point.pos for point in self._points]

    def add(self, point: Point) -> None:
        """Keep one, instead of another at the same position; drop some if they are too many now."""
        points = sorted([*(old for old in self._points if old.pos != point.pos), point], key=lambda point: point.pos)
        sizes = [point.data.nbytes for point in points]
        drop = set(surplus([point.pos for point in points], sizes, self._max_points, self._max_bytes))
        with self._lock:
            self._new.add(point)
            self._keep([point for i, point in enumerate(points) if i not in drop])

    def cut(self, length: int) -> None:
        """What came behind the first `length` tokens is gone."""
        with self._lock:
            self._keep([point for point in self._points if point.pos <= length])

    def _keep(self, points: list[Point]) -> None:
        self._points = points
        self._new &= set(points)
        self._waiting &= set(points)

    def best(self, length: int) -> Point | None:
        """The deepest one at or below `length`."""
        return next((point for point in reversed(self._points) if point.pos <= length), None)

    @property
    def has_new(self) -> bool:
        """Whether there are some that nobody is about to store."""
        return bool(self._new)

    def unsaved(self) -> list[Point]:
        """Those that the store doesn't have yet, lowest first."""
        with self._lock:
            return [point for point in self._points if point in self._new or point in self._waiting]

    def handed_over(self, points: Sequence[Point]) -> None:
        """Somebody is about to store these. What becomes of that isn't known before `saved`."""
        with self._lock:
            self._waiting |= self._new.intersection(points)
            self._new.difference_update(points)

    def saved(self, points: Sequence[Point]) -> None:
        """The store has these."""
        with self._lock:
            self._new.difference_update(points)
            self._waiting.difference_update(points)


def schedule(start: int, end: int, turn: int | None, step: int) -> list[int]:
    """Where to take checkpoints while the positions `start` to `end - 1` of a prompt are decoded.

    One before its last token, because that is decoded again when the same prompt comes again; one at the last user's
    turn, to which an edited or regenerated message goes back, and a template that drops the thinking; and one every
    `step` tokens, so that no edit costs more than that.

    Args:
        start: tokens that needn't be decoded.
        end: tokens of the prompt.
        turn: where the last user's turn begins, if that is known.
        step: distance of the regular ones.

    Returns:
        Positions, ascending, all above `start` and below `end`.
    """
    fixed = {end - 1, turn if turn is not None else end - 1}
    # A regular one close to another is of little use, and every one costs a batch of its own.
    regular = {at for at in range(start + step, end, step) if all(abs(at - other) >= step // 4 for other in fixed)}
    return sorted(at for at in fixed | regular if start < at < end)


def surplus(positions: Sequence[int], sizes: Sequence[int], max_count: int, max_bytes: int) -> list[int]:
    """Which of some checkpoints to drop, so that they stay within bounds and spread over the whole length.

    That one goes whose neighbours are nearest to each other; the newest ones stay, and the very last one always.

    Args:
        positions: ascending.
        sizes: bytes of each.
        max_count: how many may stay.
        max_bytes: how many bytes they may have together.

    Returns:
        Indices into `positions`.
    """
    kept = list(range(len(positions)))
    while len(kept) > 1 and (len(kept) > max_count or sum(sizes[i] for i in kept) > max_bytes):
        movable = max(1, len(kept) - NEWEST)

        def gap(place: int, kept: list[int] = kept) -> int:
            below = positions[kept[place - 1]] if place else 0
            return positions[kept[place + 1]] - below

        del kept[min(range(movable), key=gap)]
    return sorted(set(range(len(positions))) - set(kept))
