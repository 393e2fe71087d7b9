"""What a look-up found: how many tokens, from where, and on a miss why."""

from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from kvkeep.store.checkpoints import Checkpoint
from kvkeep.store.entry import Entry
from kvkeep.store.frame import Kind
from kvkeep.store.nodes import Node
from kvkeep.store.windows import Window


class Source(str, Enum):
    """Where reused tokens came from."""

    NONE = "none"
    LIVE = "live"
    """They were still in the context."""
    DISK = "disk"


class Reason(str, Enum):
    """Why nothing, or nothing more, was taken from the store."""

    FOUND = "found"
    EMPTY = "empty"
    """The store holds nothing at all."""
    OTHER_NAMESPACE = "other namespace"
    """The store holds states, but none of this model with these settings."""
    NO_COMMON_PREFIX = "no common prefix"
    """The store holds states of this model, none that begins as this prompt does."""
    NO_CHECKPOINT = "no checkpoint"
    """Tokens that begin as this prompt does are stored, but the model's memory can't be rebuilt anywhere among them."""
    LIVE_IS_BETTER = "live is better"
    """The context itself still holds as much of the prompt."""
    BELOW_BREAK_EVEN = "below the break-even"
    """Decoding is quicker than restoring."""
    DAMAGED = "damaged"
    """What was stored didn't verify. It is removed, and saved anew by the next request."""
    REFUSED = "refused"
    """llama.cpp didn't take the state."""
    IDENTIFYING = "identifying"
    """The model file is still being hashed."""
    LOGITS_ALL = "logits of all tokens wanted"
    """With logits_all every token must be decoded, because its logits were never stored."""
    FOREIGN_POSITIONS = "foreign positions"
    """The context holds positions that didn't come from text tokens, such as images."""
    NO_RESET = "reset=False"
    """The caller continues the context as it is."""
    UNAVAILABLE = "unavailable"
    """The store couldn't be opened or read; the log says why."""


Step = tuple[Node, int]
"""A node and how many of its tokens, from the first one on, are wanted."""


class WindowStep(NamedTuple):
    """A part of the windowed cache: `take` tokens of a row, behind its first `skip`."""

    row: Window
    skip: int
    take: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """How much of a prompt is reused.

    Attributes:
        length: tokens that needn't be decoded; 0 is a miss.
        prompt_tokens: tokens of the prompt.
        source: where they come from.
        reason: why no more than that, or FOUND.
        detail: the reason with its figures, a sentence for people; may be empty.
        seconds: what restoring took, 0.0 unless something was restored.
        state_bytes: bytes handed to llama.cpp, likewise.
    """

    length: int
    prompt_tokens: int
    source: Source = Source.NONE
    reason: Reason = Reason.FOUND
    detail: str = ""
    seconds: float = 0.0
    state_bytes: int = 0
    plan: tuple[Step, ...] = field(default=(), repr=False, compare=False)
    windows: tuple[WindowStep, ...] = field(default=(), repr=False, compare=False)
    checkpoint: Checkpoint | None = field(default=None, repr=False, compare=False)

    @property
    def decoded(self) -> int:
        """Tokens of the prompt that had to be decoded."""
        return self.prompt_tokens - self.length

    @property
    def is_opaque(self) -> bool:
        """Whether it is a whole state of a memory that can't be parsed."""
        return self.checkpoint is not None and self.checkpoint.kind == Kind.OPAQUE

    @property
    def has_whole_window(self) -> bool:
        """Whether the windowed cache is there from position 0 on, and not only what is attended to."""
        return sum(step.take for step in self.windows) == self.length

    @property
    def plain_bytes(self) -> int:
        """Bytes to be read and verified to restore it."""
        return sum(entry.plain_bytes for entry in self.entries)

    @property
    def entries(self) -> list[Entry]:
        """Everything that restoring it reads."""
        points = [] if self.checkpoint is None else [self.checkpoint]
        return [*(node for node, _ in self.plan), *(step.row for step in self.windows), *points]

    def __str__(self) -> str:
        if self.length == 0:
            head = f"none of {self.prompt_tokens} tokens reused"
        else:
            head = f"{self.length} of {self.prompt_tokens} tokens from {self.source.value}"
        if self.reason is Reason.FOUND:
            return head
        return f"{head}: {self.reason.value}" + (f" ({self.detail})" if self.detail else "")
