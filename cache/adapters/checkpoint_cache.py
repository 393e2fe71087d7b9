"""`HybridCheckpointCache`: checkpoints of a context by hand, for code that decodes by itself.

`attach` takes and restores the same checkpoints automatically; use it where you can.
"""

import logging
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn

import llama_cpp
import numpy as np

from kvkeep.cache.adapters.attach import session_options
from kvkeep.cache.adapters.backing import Backing, Wishes
from kvkeep.cache.adapters.base_cache import BaseLlamaCache
from kvkeep.cache.adapters.context import ON_DEVICE, PARTIAL_ONLY, Context, LiveContext, address, memory_of
from kvkeep.cache.adapters.ending import Ending
from kvkeep.cache.adapters.live import is_private, was_cut
from kvkeep.cache.layout import Bytes
from kvkeep.cache.memory import Memory, MemoryKind
from kvkeep.cache.points import Point
from kvkeep.cache.prefix_cache import PrefixCache, token_bytes
from kvkeep.cache.report import Reporter
from kvkeep.cache.state import Form, parse, partial_of
from kvkeep.store.errors import KvkeepError, StoreClosed, UsageError
from kvkeep.store.frame import TOKEN_BYTES
from kvkeep.store.hashing import digests_at
from kvkeep.store.space import DEFAULT_CAPACITY

_LOG = logging.getLogger("kvkeep")

# How long a look-up waits for what is about to be stored, where that is the only way back.
FLUSH_SECONDS = 10.0


@dataclass(frozen=True, slots=True, eq=False)
class HybridCheckpoint:
    """State of one sequence that holds for exactly one position.

    Attributes:
        pos: tokens before it.
        data: what llama.cpp wrote; in device mode only the part that the host can see.
        hash_val: hash (hexadecimal) of the tokens before it.
        size: bytes that llama.cpp wrote.
        seq_id: the sequence that it was taken from.
    """

    pos: int
    data: bytes
    hash_val: str
    size: int
    seq_id: int
    # Everything up to `pos`, for a context that doesn't hold it any more; only of a checkpoint from the store.
    _full: Bytes | None = field(default=None, repr=False)
    # The tokens before it, little-endian int32.
    _tokens: bytes = field(default=b"", repr=False)
    # The cache that it comes from; None for one that somebody else made.
    _origin: object = field(default=None, repr=False)
    _lease: "_Lease | None" = field(default=None, repr=False)


@dataclass(eq=False)
class _Lease:
    """The right to restore what lies in a context's own buffers, with the bytes that belong to it."""

    data: bytes = b""


# The newest device checkpoint of every context and sequence, whichever cache took it: llama.cpp keeps the tensors of one
# only, and ends the process, or restores the other's, when it is handed an older one.
_on_device: "weakref.WeakValueDictionary[tuple[int, int], _Lease]" = weakref.WeakValueDictionary()


class HybridCheckpointCache(BaseLlamaCache):
    """Checkpoints of the part of a context's memory that can't be cut: recurrent tensors, a masked window.

        cache = HybridCheckpointCache(llm.ctx)
        cache.save_checkpoint(len(tokens), tokens)          # the context stands behind these tokens
        ...
        best = cache.find_best_checkpoint(prompt)
        if best and cache.restore_checkpoint(best):
            ...                                             # decode prompt[best.pos:]

    A checkpoint in memory brings back only what can't be cut; keys and values below its position must still be in the
    context, from the same tokens. With `llm` it is also stored on disk, together with them, and one that comes from
    there brings everything: in a new process, or after the context was cleared.

    Args:
        ctx: a `llama_context_p`, borrowed.
        max_checkpoints: keep at most so many in memory, over all sequences; the oldest go first. 0 turns the cache off.
        on_device: leave the tensors in the context's own buffers: one checkpoint a sequence, nothing on disk. For memories
            whose only part of this kind is recurrent.
        verbose: log what is done.
        llm: the `Llama` whose context it is; with it checkpoints are stored on disk.
        path, capacity_bytes, identity: as for `attach`.

    Raises:
        ValueError: `ctx` is None.
        UsageError: another argument is wrong.
    """

    def __init__(
        self,
        ctx: Any,
        max_checkpoints: int = 16,
        on_device: bool = False,
        verbose: bool = False,
        *,
        llm: Any = None,
        path: Any = None,
        capacity_bytes: int = DEFAULT_CAPACITY,
        identity: str = "",
    ) -> None:
        super().__init__(capacity_bytes)
        self._ctx: Any = None
        self._backing: Backing | None = None
        if ctx is None:
            raise ValueError("HybridCheckpointCache needs a llama_context; ctx is None")
        if isinstance(max_checkpoints, bool) or not isinstance(max_checkpoints, int):
            raise UsageError(f"max_checkpoints is a whole number, not {max_checkpoints!r}")
        if type(ctx) in (str, bytes, float):  # not isinstance, which looks at the object: a cache that is off touches nothing
            raise UsageError(f"ctx is a llama_context_p, not {ctx!r}")
        if llm is None and path is not None:
            raise UsageError("path needs llm, too: without the model nobody knows whose states are stored there")
        self.max_checkpoints = max_checkpoints
        self.on_device = on_device
        self.verbose = verbose
        self.checkpoints: list[HybridCheckpoint] = []
        self.reporter = Reporter()
        self._ctx = ctx
        self._llm: weakref.ref[Any] | None = None
        self._context = Context(self._open_ctx)
        self._memory: Memory | None = None
        self._origin = object()
        # Checkpoints that the store doesn't have yet: by sequence, by the tokens before them.
        self._unsaved: dict[int, dict[bytes, Point]] = {}
        if llm is not None and max_checkpoints > 0 and not on_device:
            self._back(llm, path, capacity_bytes, identity)

    def _back(self, llm: Any, path: Any, capacity_bytes: int, identity: str) -> None:
        options = session_options(llm, path, Wishes(capacity_bytes), break_even=True, identity=identity)
        if address(llm._ctx.ctx) != address(self._ctx):
            raise UsageError("ctx isn't the context of llm: its states would be stored as another model's")
        self._llm = weakref.ref(llm)
        self._memory = LiveContext(llm).memory
        self._backing = Backing(self.reporter, self._memory)
        self._backing.open(llm, options["path"], options["wishes"], options["extra"])
        # What waits is stored at the interpreter's end, or when the cache goes.
        self._ending = Ending(self, partial(_close, self._backing))

    def _open_ctx(self) -> Any:
        if self._ctx is None:
            raise StoreClosed("the checkpoint cache is closed")
        if self._llm is not None:
            llm = self._llm()
            if llm is None or llm._ctx.ctx is None:
                raise StoreClosed("the model is closed")
        return self._ctx

    # -- save -----------------------------------------------------------------------------------------------------

    def save_checkpoint(self, current_pos: int, tokens: Sequence[int], seq_id: int = 0) -> bool:
        """Take a checkpoint where a sequence stands now.

        Args:
            current_pos: tokens that the sequence holds.
            tokens: these tokens; more may follow.
            seq_id: the sequence.

        Returns:
            False if none was taken: the cache is off or closed, the memory has no such part, or the sequence isn't at
            `current_pos`. A warning says which, once.
        """
        if self.max_checkpoints <= 0 or self._ctx is None:
            return False
        taken = False
        with self.reporter.border("taking a checkpoint"):
            taken = self._save(int(current_pos), tokens, seq_id)
        return taken

    def _save(self, pos: int, tokens: Sequence[int], seq_id: int) -> bool:
        if not self._is_worth_it() or not self._has_sequence(seq_id):
            return False
        prefix = token_bytes(tokens[:pos])
        if len(prefix) != pos * TOKEN_BYTES or pos < 1:
            return self._refuse("tokens", f"a checkpoint at position {pos} needs the {pos} tokens before it")
        if self._context.pos_max(seq_id) != pos - 1:
            ends = self._context.pos_max(seq_id) + 1
            return self._refuse("position", f"sequence {seq_id} holds {ends} tokens, no checkpoint is taken at {pos}")
        lease = None
        if self.on_device:
            # llama.cpp overwrites what an older one refers to.
            self.checkpoints = [old for old in self.checkpoints if old.seq_id != seq_id]
            lease = _on_device[(address(self._ctx), seq_id)] = _Lease()
        data = self._context.copy(seq_id, self._flags)
        (digest,) = digests_at(prefix, [len(prefix)])
        new = HybridCheckpoint(
            pos, data.tobytes(), digest.hex(), data.nbytes, seq_id, _tokens=prefix, _origin=self._origin, _lease=lease
        )
        if lease is not None:
            lease.data = new.data
        # The sequence holds these tokens now: below a checkpoint of others there are other keys and values.
        self._forget(seq_id, lambda old: not prefix.startswith(old._tokens))
        others = [old for old in self.checkpoints if (old.seq_id, old.hash_val) != (seq_id, new.hash_val)]
        self.checkpoints = [*others, new][-self.max_checkpoints :]
        self._store(prefix, Point(pos, data), seq_id)
        if self.verbose:
            _LOG.info("a checkpoint of sequence %d at position %d: %d bytes", seq_id, pos, new.size)
        return True

    def _forget(self, seq_id: int, gone: Callable[[HybridCheckpoint], bool]) -> None:
        """Drop checkpoints of a sequence that stand on something that isn't there any more."""
        if self._parts.kind is MemoryKind.RECURRENT:
            # They stand on nothing.
            return
        self.checkpoints = [old for old in self.checkpoints if old.seq_id != seq_id or not gone(old)]

    def _store(self, prefix: bytes, point: Point, seq_id: int) -> None:
        """Hand a checkpoint to the writer, together with everything below it, without which it is of no use."""
        backing, memory = self._backing, self._memory
        if backing is None or memory is None or backing.unavailable or is_private(address(self._ctx)):
            return
        tokens = np.frombuffer(prefix, "<i4")
        opaque = memory.kind is MemoryKind.UNKNOWN
        if opaque and not backing.fits(self._context.size(seq_id)):
            return
        whole = memory.window is not None and int(llama_cpp.llama_n_seq_max(self._context.ctx)) == 1
        state = self._context.copy_whole() if whole else self._context.copy(seq_id)
        form = Form.WHOLE if whole else Form.SEQUENCE
        # A newer job of the same tokens replaces one that waits, and takes its checkpoints over; not where each of them
        # would have to be a full state.
        cut = not opaque
        waiting = self._unsaved.setdefault(seq_id, {})
        points = [old for known, old in list(waiting.items()) if cut and old.pos < point.pos and prefix.startswith(known)]
        waiting[prefix] = point

        # Holds nothing of this object: one that goes is closed, and waited for, while its last job still waits.
        def stored(_: PrefixCache) -> None:
            for known, old in list(waiting.items()):
                if old in points or old is point:
                    waiting.pop(known, None)

        backing.keep(tokens, state, form, points, seq_id=seq_id, replaces=cut, done=stored)

    # -- find -----------------------------------------------------------------------------------------------------

    def find_best_checkpoint(self, tokens: Sequence[int], seq_id: int = 0) -> HybridCheckpoint | None:
        """The checkpoint of a sequence at the largest position whose tokens are the first ones of `tokens`.

        Of all that are in memory and, with a store, of all that were ever stored.
        """
        if self.max_checkpoints <= 0 or self._ctx is None:
            return None
        live: HybridCheckpoint | None = None
        stored: HybridCheckpoint | None = None
        with self.reporter.border("looking for a checkpoint"):
            live = self._in_memory(token_bytes(tokens), seq_id)
            if self._backing is not None and self._has_sequence(seq_id):
                if live is not None and not self._holds(live):
                    # It may wait to be stored still.
                    self._backing.flush(FLUSH_SECONDS)
                    live = None
                stored = self._in_store(tokens, seq_id, 0 if live is None else live.pos)
        return stored or live

    def _holds(self, checkpoint: HybridCheckpoint) -> bool:
        """Whether the keys and values below a checkpoint are still in the context, as far as can be seen."""
        if self._parts.kind is MemoryKind.RECURRENT:
            return True
        if self._backing is not None and checkpoint.seq_id != 0:
            # Llama shows the tokens of sequence 0 only, and what isn't known to be right must never be stored.
            return False
        llm = None if self._llm is None else self._llm()
        if llm is not None:
            shown = token_bytes(llm.input_ids[: min(llm.n_tokens, checkpoint.pos)])
            if checkpoint._tokens and shown != checkpoint._tokens:
                return False
        return self._context.pos_max(checkpoint.seq_id) >= checkpoint.pos - 1

    def _in_memory(self, data: bytes, seq_id: int) -> HybridCheckpoint | None:
        fitting = [point for point in self.checkpoints if point.seq_id == seq_id and point.pos * TOKEN_BYTES <= len(data)]
        fitting.sort(key=lambda point: point.pos)
        # The prompt is hashed once, however many checkpoints there are.
        digests = digests_at(data, [point.pos * TOKEN_BYTES for point in fitting])
        hits = (point for point, digest in zip(fitting[::-1], digests[::-1], strict=True) if point.hash_val == digest.hex())
        return next(hits, None)

    def _in_store(self, tokens: Sequence[int], seq_id: int, better_than: int) -> HybridCheckpoint | None:
        cache = None if self._backing is None else self._backing.cache
        if cache is None or self._memory is None:
            return None
        n_ctx = int(llama_cpp.llama_n_ctx_seq(self._context.ctx))
        match = cache.match(tokens, at_most=n_ctx, seq_id=seq_id)
        if match.length <= better_than:
            return None
        restored = cache.restore(match, tokens, seq_id=seq_id)
        if restored.damaged and self._backing is not None:
            self._backing.quarantine(cache, restored)
        if restored.length <= better_than:
            return None
        data = (restored.state if match.is_opaque else partial_of(restored.state, self._memory)).tobytes()
        prefix = token_bytes(tokens[: restored.length])
        (digest,) = digests_at(prefix, [len(prefix)])
        size = len(data)
        return HybridCheckpoint(
            restored.length, data, digest.hex(), size, seq_id, _full=restored.state, _tokens=prefix, _origin=self._origin
        )

    # -- restore --------------------------------------------------------------------------------------------------

    def restore_checkpoint(self, checkpoint: HybridCheckpoint, seq_id: int = 0) -> bool:
        """Take a sequence back to a checkpoint. It can be decoded on from there at once.

        Returns:
            False if it can't be, and a warning says why, once. What llama.cpp took only in part is cleared.
        """
        if self.max_checkpoints <= 0 or self._ctx is None:
            return False
        restored = False
        with self.reporter.border("restoring a checkpoint"):
            why = self._unfit(checkpoint, seq_id)
            restored = self._refuse(f"checkpoint: {why}", why) if why else self._restore(checkpoint, seq_id)
        return restored

    def _unfit(self, checkpoint: HybridCheckpoint, seq_id: int) -> str:
        """Why a checkpoint mustn't reach llama.cpp; empty if it may."""
        if checkpoint.seq_id != seq_id:
            return f"it is of sequence {checkpoint.seq_id}, not of {seq_id}"
        if not self._has_sequence(seq_id):
            return f"the context has no sequence {seq_id}"
        if checkpoint._origin not in (None, self._origin):
            return "it was taken by another cache, which may be another model's"
        if self.on_device:
            lease = checkpoint._lease
            newest = _on_device.get((address(self._ctx), seq_id))
            known = any(checkpoint is mine for mine in self.checkpoints)
            if lease is None or not known or newest is not lease or lease.data is not checkpoint.data:
                return "its tensors are gone: a newer one of the same sequence has taken their place"
            return ""
        if checkpoint.pos < 1:
            return f"there is nothing before position {checkpoint.pos}"
        if checkpoint.pos > int(llama_cpp.llama_n_ctx_seq(self._context.ctx)):
            return f"it is at position {checkpoint.pos}, the context ends at {llama_cpp.llama_n_ctx_seq(self._context.ctx)}"
        if checkpoint._full is not None:
            return ""
        if not self._holds(checkpoint):
            return f"what stands below position {checkpoint.pos} is gone, and it brings only what can't be cut"
        return self._malformed(checkpoint)

    def _malformed(self, checkpoint: HybridCheckpoint) -> str:
        if self._parts.kind is MemoryKind.UNKNOWN:
            # Not to be told here; llama.cpp checks what it can.
            return ""
        try:
            state = parse(checkpoint.data, Form.SEQUENCE, self._parts, partial=True, any_streams=True)
        except KvkeepError as error:
            return str(error)
        if state.recurrent is not None and state.recurrent.pos != checkpoint.pos - 1:
            return f"its tensors are those of position {state.recurrent.pos + 1}, not of {checkpoint.pos}"
        if state.window is not None and self._parts.window is not None:
            needed = np.arange(self._parts.window.first_needed(checkpoint.pos), checkpoint.pos)
            if not np.isin(needed, state.window.positions).all():
                return f"its window has a hole below position {checkpoint.pos}"
        return ""

    def _restore(self, checkpoint: HybridCheckpoint, seq_id: int) -> bool:
        try:
            if checkpoint._full is not None:
                llama_cpp.llama_memory_seq_rm(self._context.memory, seq_id, -1, -1)
                self._context.put(checkpoint._full, seq_id)
            else:
                data = np.frombuffer(checkpoint.data, np.uint8)
                self._context.roll_back(data, checkpoint.pos, seq_id, self._flags)
        except BaseException:
            llama_cpp.llama_memory_seq_rm(self._context.memory, seq_id, -1, -1)
            raise
        if self._context.pos_max(seq_id) != checkpoint.pos - 1:
            llama_cpp.llama_memory_seq_rm(self._context.memory, seq_id, -1, -1)
            return self._refuse("taken", "llama.cpp took the checkpoint and stands somewhere else")
        if seq_id == 0:
            was_cut(address(self._ctx), 0 if checkpoint._full is not None else checkpoint.pos)
        # What stood above it is cut away.
        self._forget(seq_id, lambda other: other.pos > checkpoint.pos or not checkpoint._tokens.startswith(other._tokens))
        return True

    def _has_sequence(self, seq_id: int) -> bool:
        """llama.cpp ends the process when it is asked for a sequence that a context can't have."""
        return 0 <= seq_id < int(llama_cpp.llama_n_seq_max(self._context.ctx))

    # -- the rest -------------------------------------------------------------------------------------------------

    @property
    def _flags(self) -> int:
        return PARTIAL_ONLY | (ON_DEVICE if self.on_device else 0)

    @property
    def _parts(self) -> Memory:
        """What the memory consists of. Looked at only when it is needed: a cache that is off doesn't touch the context."""
        if self._memory is None:
            self._memory = memory_of(self._context)
        return self._memory

    def _is_worth_it(self) -> bool:
        if self._context.memory is None:
            return self._refuse("no memory", "the model has no memory")
        if self._parts.kind is MemoryKind.ATTENTION:
            why = "this model's memory can be cut anywhere: a checkpoint would be a full copy, and none is needed"
            return self._refuse("dense", why)
        device_only_recurrent = self._parts.is_recurrent and self._parts.window is None
        if self.on_device and not device_only_recurrent:
            return self._refuse("device", "only recurrent tensors can be left on the device; use on_device=False")
        return True

    def _refuse(self, kind: str, why: str) -> bool:
        self.reporter.once(kind, "no checkpoint: %s", why)
        return False

    @property
    def cache_size(self) -> int:
        """Bytes of the checkpoints in memory, as far as the host can see them."""
        return sum(len(checkpoint.data) for checkpoint in self.checkpoints)

    def clear(self) -> None:
        """Forget all checkpoints in memory. What is on disk, or on its way there, stays."""
        self.checkpoints = []

    def flush(self, timeout: float | None = None) -> bool:
        """Return when everything is stored. False if `timeout` seconds weren't enough."""
        return self._backing is None or self._backing.flush(timeout)

    def close(self) -> None:
        """Store what waits, and let go of the context. Safe to call twice."""
        if self._ctx is None:
            return
        if self._backing is not None:
            _close(self._backing)
            self._ending.cancel()
        self.clear()
        self._ctx = None

    def _by_hand(self) -> NoReturn:
        raise NotImplementedError(
            "HybridCheckpointCache is no dictionary of states: use save_checkpoint, find_best_checkpoint and restore_checkpoint"
        )

    def _find_longest_prefix_key(self, key: tuple[int, ...]) -> NoReturn:
        self._by_hand()

    def __getitem__(self, key: Sequence[int]) -> NoReturn:
        self._by_hand()

    def __contains__(self, key: Sequence[int]) -> NoReturn:
        self._by_hand()

    def __setitem__(self, key: Sequence[int], value: Any) -> NoReturn:
        self._by_hand()


def _close(backing: Backing) -> None:
    backing.settle_identity()
    backing.flush()
    backing.close()
    backing.give_back()
