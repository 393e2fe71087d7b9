"""The present request of a model: what it reused, what that took, and where its prompt parts from what is known."""

from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Any

from kvkeep.cache.adapters.live import NO_TOKENS, Tokens
from kvkeep.cache.difference import Difference, Stored, common, first
from kvkeep.cache.match import Match
from kvkeep.cache.prefix_cache import PrefixCache
from kvkeep.cache.report import Parting, Report
from kvkeep.store import left_out
from kvkeep.store.hashing import digests_at
from kvkeep.store.left_out import Beginning

# So many states are kept whose prompts differ in their beginning and are alike in the rest: several assistants with the same
# tools take turns so. What else comes that way was never met again.
MAX_ALTERNATIVES = 8
# What is shown of a text, and how far behind the parting two prompts must be alike to be called the same.
_SHOWN_TOKENS = 8


@dataclass(slots=True)
class _Request:
    prompt: Tokens
    live: Tokens
    match: Match | None = None
    settle_seconds: float = 0.0
    read_bytes: int = 0
    decoded: int = 0
    decode_seconds: float = 0.0
    is_compared: bool = False
    difference: Difference | None = None
    alternatives: int = 0
    is_one_shot: bool | None = None
    left_out: Beginning | None = None


class Requests:
    """The requests of one model, of which the present one is known in full."""

    def __init__(self) -> None:
        self._now = _Request(NO_TOKENS, NO_TOKENS)
        self._next = self._now
        self._in_a_row = 0
        self._left_out: dict[Beginning, None] = {}

    def begin(self, prompt: Tokens, live: Tokens) -> None:
        """A prompt comes, and the context holds these known tokens. Both are kept: copy what may change."""
        self._next = _Request(prompt, live)

    def read(self, n_bytes: int) -> None:
        """So many bytes were read from the disk for it."""
        self._next.read_bytes += n_bytes

    def settled(self, match: Match, seconds: float) -> None:
        """It was settled like this, after so many seconds."""
        # Without a beginning something has failed, and nothing is known of it.
        self._now = _Request(NO_TOKENS, NO_TOKENS) if self._next is self._now else self._next
        self._now.match, self._now.settle_seconds = match, seconds

    def decoded(self, n_tokens: int, seconds: float) -> None:
        """Tokens were decoded: of the prompt, as long as any of it is left."""
        now = self._now
        if now.match is not None and now.decoded < now.match.decoded:
            now.decoded += n_tokens
            now.decode_seconds += seconds

    def want(self) -> None:
        """Somebody asked for the present one to be kept."""
        self._now.is_one_shot = False

    def report(self, match: Match, llm: Any, cache: PrefixCache | None) -> Report:
        """All that is known of a match: much more if it is that of the present request.

        Args:
            match: what was reused.
            llm: the model, for the texts of tokens; without it there are none.
            cache: the store, if it can be asked.
        """
        now = self._now
        if match is not now.match:
            return Report(match=match)
        self._compare(cache)
        return Report(
            match=match,
            settle_seconds=now.settle_seconds,
            read_bytes=now.read_bytes,
            decode_seconds=now.decode_seconds,
            parting=None if now.difference is None else _worded(now.difference, now.prompt, llm),
        )

    def is_one_shot(self, tokens: Tokens, cache: PrefixCache | None) -> bool:
        """Whether a state of the present request is of no use to any later one.

        So it is where the prompt parts from what is known in its first half, is known in most of the rest, many others
        that do the same are kept already, and none that was left out began so. A time in front of a long text makes one of
        these each second.

        Args:
            tokens: what the state was decoded from.
            cache: the store, if it can be asked.
        """
        now = self._now
        if now.match is None or common(tokens, now.prompt) < len(now.prompt):
            return False
        if now.is_one_shot is None:
            now.is_one_shot = self._is_one_shot(cache)
        return now.is_one_shot

    def newly_left_out(self) -> Beginning | None:
        """Once for each request whose state isn't stored: by what it is to be remembered."""
        found, self._now.left_out = self._now.left_out, None
        return found

    def _is_one_shot(self, cache: PrefixCache | None) -> bool:
        self._compare(cache)
        prompt, found = self._now.prompt, self._now.difference
        if found is None or not found.is_inserted or 2 * found.index > len(prompt):
            self._in_a_row = 0
            return False
        self._in_a_row += 1
        if max(self._in_a_row - 1, self._now.alternatives) < MAX_ALTERNATIVES:
            return False
        if _is_among(prompt, {*self._left_out, *_left_out_before(cache)}):
            return False
        (beginning,) = _beginnings(prompt, [min(found.index + _SHOWN_TOKENS, len(prompt))])
        self._now.left_out = beginning
        self._left_out[beginning] = None
        if len(self._left_out) > left_out.MAX_REMEMBERED:
            del self._left_out[next(iter(self._left_out))]
        return True

    def _compare(self, cache: PrefixCache | None) -> None:
        """Once a request, and before its state is stored: then the store knows the prompt itself."""
        now = self._now
        if now.is_compared or now.match is None:
            return
        now.is_compared = True
        if now.match.decoded > 1 and not _goes_on(now.prompt, now.live, now.match):
            now.difference, now.alternatives = _difference(now.prompt, now.live, cache)


def _goes_on(prompt: Tokens, live: Tokens, match: Match) -> bool:
    """Whether the prompt continues what the context held, and nothing better was found."""
    return 0 < len(live) <= len(prompt) and match.length <= len(live) == common(prompt, live)


def _difference(prompt: Tokens, live: Tokens, cache: PrefixCache | None) -> tuple[Difference | None, int]:
    """Where a prompt parts from what is known; and where something was inserted, how many alternatives are stored."""
    if cache is None or cache.namespace is None:
        return first(prompt, live, None), 0
    with cache.repository.rows() as connection:
        stored = Stored(connection, cache.identity.fingerprint, cache.block_tokens, prompt)
        found = first(prompt, live, stored)
        return found, stored.alternatives(MAX_ALTERNATIVES) if found is not None and found.is_inserted else 0


def _left_out_before(cache: PrefixCache | None) -> list[Beginning]:
    """What any process has left out of this model."""
    if cache is None or (space := cache.namespace) is None:
        return []
    with cache.repository.rows() as connection:
        return left_out.of(connection, space.id)


def _is_among(prompt: Tokens, known: Set[Beginning]) -> bool:
    """Whether a prompt begins as one of these did. By their lengths: where it parts from what is stored moves with that."""
    lengths = sorted({one.length for one in known if one.length <= len(prompt)})
    return not known.isdisjoint(_beginnings(prompt, lengths))


def _beginnings(prompt: Tokens, lengths: Sequence[int]) -> list[Beginning]:
    digests = digests_at(prompt.tobytes(), [length * prompt.itemsize for length in lengths])
    return [Beginning(length, digest[:8]) for length, digest in zip(lengths, digests, strict=True)]


def _worded(found: Difference, prompt: Tokens, llm: Any) -> Parting:
    return Parting(
        index=found.index,
        text=_text(llm, found.tokens[:1]),
        known_text=_text(llm, found.known[:1]),
        before=_text(llm, prompt[max(0, found.index - _SHOWN_TOKENS) : found.index]).lstrip("\ufffd"),
        behind=_text(llm, found.tokens[:_SHOWN_TOKENS]),
        known_behind=_text(llm, found.known[:_SHOWN_TOKENS]),
        source=found.source,
        is_inserted=found.is_inserted,
    )


def _text(llm: Any, tokens: Tokens) -> str:
    """Of a few tokens. Numbers that are no tokens, as embeddings leave them, have none."""
    valid = [] if llm is None else [int(token) for token in tokens if 0 <= token < llm.n_vocab()]
    text: bytes = llm.detokenize(valid, special=True) if valid else b""
    return text.decode("utf-8", "replace")
