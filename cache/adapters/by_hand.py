"""States that are handed over without the model they belong to, kept apart by what they say about themselves.

A `LlamaState` names its architecture, and shows the shapes of its memory, of the vocabulary and of the context. It doesn't show
weights, adapters and rope settings: two models of one family, or a model and its fine-tune, look alike.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import llama_cpp
import numpy as np
import numpy.typing as npt
from llama_cpp import LlamaState

from kvkeep.cache.adapters.states import are_filled
from kvkeep.cache.allowance import Admission
from kvkeep.cache.batches import Saved
from kvkeep.cache.layout import Bytes, pack_all
from kvkeep.cache.match import Match
from kvkeep.cache.memory import Memory, MemoryKind
from kvkeep.cache.prefix_cache import Identity, PrefixCache
from kvkeep.cache.state import Form, State, architecture, parse
from kvkeep.store import namespaces
from kvkeep.store.errors import LayoutError, UnknownLayout, UsageError
from kvkeep.store.hashing import Fingerprint, digest_fields
from kvkeep.store.repository import Repository

# Written into every such namespace: another text here makes every state that was stored by hand unreachable.
PURPOSE = "kvkeep 2026-11 what a state says about itself"

# Memories that bytes alone can tell from others, and can be cut without knowing more. Two attention caches are cut only where
# both hold every position, and then it doesn't matter whether one of them has a window.
_KINDS = (MemoryKind.ATTENTION, MemoryKind.HYBRID, MemoryKind.RECURRENT)
_KIND, _ARCH, _N_VOCAB, _N_CTX = "kind", "architecture", "n_vocab", "input_ids"


@dataclass(frozen=True, slots=True)
class _Signature:
    """What a state says about itself.

    Attributes:
        fields: everything, by name; it becomes the namespace's ingredients.
    """

    fields: dict[str, str]

    @classmethod
    def of(cls, value: LlamaState, data: Bytes) -> "_Signature":
        """Raises LayoutError where the state has a memory that can't be told from others by its bytes."""
        kind, state = _parsed(data)
        layouts = pack_all([cells.layout for cells in state.caches])
        scores = np.asarray(value.scores)
        return cls(
            {
                "interface": "LlamaState",
                _KIND: kind.value,
                _ARCH: architecture(data),
                _N_VOCAB: str(scores.shape[-1] if scores.ndim else 0),
                # Llama takes over the array as it is, and fails later if it isn't as long as its own n_ctx.
                _N_CTX: str(np.asarray(value.input_ids).size),
                "layouts": layouts.hex(),
                "recurrent_bytes": str(0 if state.recurrent is None else state.recurrent.data.size),
                **_versions(),
            }
        )

    @property
    def fingerprint(self) -> Fingerprint:
        return Fingerprint(digest_fields(PURPOSE, sorted(self.fields.items())))

    @property
    def identity(self) -> Identity:
        """Whose states such are. Only for fields that were made here: others may have any values."""
        fingerprint = self.fingerprint
        label = f"{self.fields[_ARCH]}, stored by hand"
        return Identity(fingerprint, label, self.fields, Memory(MemoryKind(self.fields[_KIND])))


def _versions() -> dict[str, str]:
    return {"llama_cpp_python": llama_cpp.__version__, "session_version": str(llama_cpp.LLAMA_SESSION_VERSION)}


def _parsed(data: Bytes) -> tuple[MemoryKind, State]:
    for kind in _KINDS:
        try:
            return kind, parse(data, Form.WHOLE, Memory(kind))
        except LayoutError:
            continue
    raise UnknownLayout("a state of this kind can be kept only if the model is known")


def _first_difference(cache: PrefixCache, tokens: npt.NDArray[np.int32], data: Bytes) -> int | None:
    """The first position at which a state isn't what is stored of the same tokens; None if it is, or nothing is stored."""
    match = cache.match(tokens, form=Form.WHOLE)
    if match.length == 0:
        return None
    restored = cache.restore(match, tokens, form=Form.WHOLE, arch=cache.identity.ingredients[_ARCH])
    if restored.length == 0:
        return None
    memory, length = cache.identity.memory, restored.length
    stored, given = parse(restored.state, Form.WHOLE, memory), parse(data, Form.WHOLE, memory)
    differing = [length]
    for ours, theirs in zip(stored.caches, given.caches, strict=True):
        order = np.argsort(theirs.positions, kind="stable")[:length]
        for mine, yours in zip(ours.arrays, theirs.arrays, strict=True):
            differing += np.flatnonzero((mine != yours[:, order, :]).any(axis=(0, 2)))[:1].tolist()
    if stored.recurrent is not None and given.recurrent is not None and stored.recurrent.pos == given.recurrent.pos:
        differing += [] if np.array_equal(stored.recurrent.data, given.recurrent.data) else [length - 1]
    return min(differing) if min(differing) < length else None


@dataclass(frozen=True, slots=True)
class Found:
    """Where the longest beginning of a key is stored."""

    cache: PrefixCache
    match: Match


class StatesByHand:
    """States of any models in one repository, without their models.

    Args:
        repository: where they are kept.
    """

    def __init__(self, repository: Repository) -> None:
        self._repository = repository
        self._last: Fingerprint | None = None
        """Of the state that was last stored here: whoever asks next most likely asks for that model."""

    def save(self, value: LlamaState) -> None:
        """Store a state under the tokens that it says it holds.

        Raises:
            UsageError: it names fewer tokens than it has.
            LayoutError: its memory can't be told from others by its bytes, or it doesn't hold those tokens; or it has the
                logits of all of them, which aren't kept.
            DailyLimit: as much as may be was stored today.
            CapacityError, StoreError: it, or all but a first part of it, wasn't stored.
        """
        ids = np.asarray(value.input_ids)
        if not 0 < value.n_tokens <= ids.size:
            raise UsageError(f"a LlamaState of {value.n_tokens} tokens must name that many in input_ids, and names {ids.size}")
        if are_filled(np.asarray(value.scores), value.n_tokens):
            raise LayoutError("with logits_all the logits of all tokens belong to it, and those aren't kept on disk")
        data = np.frombuffer(value.llama_state, np.uint8)[: value.llama_state_size]
        identity = _Signature.of(value, data).identity
        cache, tokens = PrefixCache(self._repository, identity), ids[: value.n_tokens]

        def run() -> Saved:
            if (differing := _first_difference(cache, tokens, data)) is not None:
                # Of a model that looks alike. Mixed with its blocks this would be a state that no model ever had.
                cache.forget(tokens[: differing + 1])
            return cache.save(tokens, data, Form.WHOLE)

        Admission().save(self._repository, run)
        self._last = identity.fingerprint

    def find(self, key: Sequence[int]) -> Found | None:
        """The longest beginning of a key that can be restored, or None.

        That of the model whose state was last stored here comes first; states of several others make none, because nobody
        knows which of them is wanted.
        """
        found = [Found(cache, match) for cache in self._caches() if (match := cache.match(key, form=Form.WHOLE)).length]
        if mine := [one for one in found if one.cache.identity.fingerprint == self._last]:
            return mine[0]
        return found[0] if len(found) == 1 else None

    def _caches(self) -> list[PrefixCache]:
        with self._repository.rows() as connection:
            known = namespaces.ingredients(connection)
        # Nobody else makes fields that hash to their own fingerprint so; of ours, only what this version of llama.cpp wrote.
        signatures = [found for name, fields in known.items() if (found := _Signature(fields)).fingerprint == name]
        return [PrefixCache(self._repository, one.identity) for one in signatures if _versions().items() <= one.fields.items()]

    @staticmethod
    def state(found: Found, key: Sequence[int], seed: int) -> LlamaState:
        """What was found, as `Llama.load_state` takes it.

        `input_ids` is as long as it was, -1 behind the state's end; `scores` is zeros of shape (1, n_vocab).

        Raises:
            KeyError: it doesn't verify; what is damaged is removed.
        """
        fields = found.cache.identity.ingredients
        restored = found.cache.restore(found.match, key, form=Form.WHOLE, arch=fields[_ARCH])
        if restored.damaged:
            found.cache.quarantine(restored.damaged)
        if restored.length == 0:
            raise KeyError(f"the stored state is damaged: {restored.detail}")
        ids = np.full(int(fields[_N_CTX]), -1, np.int32)
        ids[: restored.length] = key[: restored.length]
        scores = np.zeros((1, int(fields[_N_VOCAB])), np.single)
        return LlamaState(ids, scores, restored.length, restored.state.tobytes(), restored.state.nbytes, seed)
