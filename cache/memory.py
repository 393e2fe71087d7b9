"""What a model's memory consists of: what can be cut, what is a window, what holds for one position only.

ATTENTION    one or two attention caches that keep every position         cut anywhere
WINDOW       such a cache, and one that needs only the last positions     cut where the window below is there
RECURRENT    tensors that hold for one position                           never cut
HYBRID       an attention cache, recurrent tensors, sometimes a window    cut at a checkpoint of the tensors
UNKNOWN      anything else                                                kept whole
"""

from dataclasses import dataclass
from enum import Enum


class MemoryKind(Enum):
    """What kind of memory a model has. The model says so; bytes alone can't tell every kind apart."""

    ATTENTION = "attention"
    """Every layer attends to every position: can be cut at any position."""
    WINDOW = "sliding window"
    """Some layers attend to the last positions only."""
    RECURRENT = "recurrent"
    HYBRID = "hybrid"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Window:
    """A sliding window, as llama.cpp masks it (`llama_hparams::is_masked_swa`).

    Attributes:
        size: positions that a token attends to, itself included (`llama_model_n_swa`).
        chunked: tokens attend back to the beginning of their chunk of `size` positions instead (Llama 4).
        full: llama.cpp keeps every position all the same (`swa_full`), so a live cache can be cut anywhere.
    """

    size: int
    chunked: bool = False
    full: bool = False

    def first_needed(self, length: int) -> int:
        """The lowest position that must be there to go on behind `length` tokens.

        Always one at least, though a chunk may begin right here: llama.cpp writes no cache without cells, and an empty
        one no longer says where it stands.
        """
        first = length // self.size * self.size if self.chunked else length - self.size + 1
        return max(0, min(first, length - 1))

    def first_written(self, length: int) -> int:
        """The lowest position that llama.cpp writes into the one-sequence state of `length` tokens.

        One lower than needed: what it masks is seen from the last token, not from the next one.
        """
        if self.chunked:
            return max(0, length - 1) // self.size * self.size
        return max(0, length - self.size)


@dataclass(frozen=True, slots=True)
class Memory:
    """The memory of a model in a context, as far as its states depend on it.

    Attributes:
        kind: what kind it is.
        window: the window of WINDOW, and of a HYBRID that has one.
        v_trans: values are stored transposed; None if only the state can tell.
        ext: cells carry 12 more bytes (x, y, token), as with M-RoPE; None if only the state can tell.
    """

    kind: MemoryKind
    window: Window | None = None
    v_trans: bool | None = None
    ext: bool | None = None

    @property
    def is_recurrent(self) -> bool:
        """Whether a part of it holds for one position only."""
        return self.kind in (MemoryKind.RECURRENT, MemoryKind.HYBRID)

    @property
    def has_attention(self) -> bool:
        """Whether a part of it is cut into blocks of tokens."""
        return self.kind in (MemoryKind.ATTENTION, MemoryKind.WINDOW, MemoryKind.HYBRID)

    @property
    def needs_checkpoints(self) -> bool:
        """Whether a live context can't be cut back to just any position."""
        if self.kind is MemoryKind.WINDOW:
            return self.window is None or not self.window.full
        return self.kind is not MemoryKind.ATTENTION
