"""Checkpoints of a live context, kept in memory: what can't be cut, at some positions of the present sequence.

Also the rule by which checkpoints are thinned, here and on disk: a spread over the whole length remains.
"""

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

    Args:
        max_points: keep at most so many.
        max_bytes: keep at most so many bytes.
    """

    def __init__(self, max_points: int = MAX_POINTS, max_bytes: int = MAX_BYTES) -> None:
        self._max_points = max_points
        self._max_bytes = max_bytes
        self._points: list[Point] = []
        # Positions of those that the store doesn't have yet.
        self._new: set[int] = set()

    def __len__(self) -> int:
        return len(self._points)

    @property
    def positions(self) -> list[int]:
        """Where they are, lowest first."""
        return [point.pos for point in self._points]

    def add(self, point: Point) -> None:
        """Keep one, instead of another at the same position; drop some if they are too many now."""
        self._points = sorted([*(old for old in self._points if old.pos != point.pos), point], key=lambda point: point.pos)
        self._new.add(point.pos)
        sizes = [point.data.nbytes for point in self._points]
        drop = set(surplus(self.positions, sizes, self._max_points, self._max_bytes))
        self._points = [point for i, point in enumerate(self._points) if i not in drop]

    def cut(self, length: int) -> None:
        """What came behind the first `length` tokens is gone."""
        self._points = [point for point in self._points if point.pos <= length]
        self._new = {pos for pos in self._new if pos <= length}

    def best(self, length: int) -> Point | None:
        """The deepest one at or below `length`."""
        return next((point for point in reversed(self._points) if point.pos <= length), None)

    def unsaved(self) -> list[Point]:
        """Those that the store doesn't have yet, lowest first."""
        return [point for point in self._points if point.pos in self._new]

    def saved(self, points: Sequence[Point]) -> None:
        """The store has these now, or is about to."""
        self._new -= {point.pos for point in points}


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
