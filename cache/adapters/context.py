"""The few verbs of llama.cpp that kvkeep needs: on any context, and on that of a `llama_cpp.Llama`."""

import ctypes
import weakref
from collections.abc import Callable
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt

from kvkeep.cache.memory import Memory, MemoryKind, Window
from kvkeep.cache.state import SEQ_ID, Form
from kvkeep.store.errors import StateRefused, StoreClosed

_BYTE_POINTER = ctypes.POINTER(ctypes.c_uint8)
Bytes = npt.NDArray[np.uint8]

PARTIAL_ONLY: int = llama_cpp.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY
ON_DEVICE: int = llama_cpp.LLAMA_STATE_SEQ_FLAGS_ON_DEVICE

# Architectures with a memory of their own kind (llama_model::create_memory): deepseek4 compresses its keys, the others
# keep an indexer behind the recurrent part.
_OWN_MEMORY = {"deepseek4", "glm5-next", "qwen4exp"}
# Architectures whose window begins anew every n_swa positions (LLAMA_SWA_TYPE_CHUNKED).
_CHUNKED = {"llama4"}


class Context:
    """One sequence after the other of a llama.cpp context.

    Args:
        pointer: gives the `llama_context_p`; raises if there is none any more, because a null pointer in a C call ends
            the process.
    """

    def __init__(self, pointer: Callable[[], Any]) -> None:
        self._pointer = pointer

    @property
    def ctx(self) -> Any:
        """The `llama_context_p`."""
        return self._pointer()

    @property
    def memory(self) -> Any:
        """The `llama_memory_t`, None for embedding and diffusion models, which remember nothing."""
        return llama_cpp.llama_get_memory(self.ctx)

    def size(self, seq_id: int, flags: int = 0) -> int:
        """Bytes that a copy of the sequence's state has."""
        return int(llama_cpp.llama_state_seq_get_size_ext(self.ctx, seq_id, flags))

    def copy(self, seq_id: int, flags: int = 0) -> Bytes:
        """The state of a sequence.

        Raises:
            StateRefused: llama.cpp wrote another number of bytes than it announced.
        """
        size = self.size(seq_id, flags)
        state: Bytes = np.empty(size, np.uint8)
        pointer = state.ctypes.data_as(_BYTE_POINTER)
        written = int(llama_cpp.llama_state_seq_get_data_ext(self.ctx, pointer, size, seq_id, flags))
        return _complete(state, written)

    def copy_whole(self) -> Bytes:
        """The state of all sequences.

        Raises:
            StateRefused: llama.cpp wrote another number of bytes than it announced.
        """
        size = int(llama_cpp.llama_state_get_size(self.ctx))
        state: Bytes = np.empty(size, np.uint8)
        written = int(llama_cpp.llama_state_get_data(self.ctx, state.ctypes.data_as(_BYTE_POINTER), size))
        return _complete(state, written)

    def put_whole(self, state: Bytes) -> None:
        """Hand over the state of all sequences. After an error the memory may hold anything: clear it.

        Raises:
            StateRefused: fewer bytes were taken than given.
        """
        self._took(state, lambda pointer: llama_cpp.llama_state_set_data(self.ctx, pointer, state.nbytes))

    def put(self, state: Bytes, seq_id: int, flags: int = 0) -> None:
        """Hand a state to a sequence. After an error the memory may hold anything: clear it.

        Raises:
            StateRefused: fewer bytes were taken than given.
        """
        self._took(
            state,
            lambda pointer: llama_cpp.llama_state_seq_set_data_ext(self.ctx, pointer, state.nbytes, seq_id, flags),
        )

    @staticmethod
    def _took(state: Bytes, hand_over: Callable[[Any], Any]) -> None:
        if state.nbytes == 0:
            raise StateRefused("a state has more than no bytes")
        taken = int(hand_over(state.ctypes.data_as(_BYTE_POINTER)))
        if taken != state.nbytes:
            raise StateRefused(f"llama.cpp took {taken} of {state.nbytes} bytes")

    def roll_back(self, partial: Bytes, length: int, seq_id: int, flags: int = PARTIAL_ONLY) -> None:
        """Take a sequence back to `length` tokens with a checkpoint that was taken there.

        The checkpoint brings only what can't be cut. What can is cut here: without that llama.cpp goes on from the old
        end, says nothing, and the logits are wrong (error 0.9 to 1.2). After an error the memory may hold anything.

        Raises:
            StateRefused: the checkpoint wasn't taken, or the sequence isn't at `length` now.
        """
        self.put(partial, seq_id, flags)
        if not self.cut(length, seq_id) or self.pos_max(seq_id) != length - 1:
            raise StateRefused(f"a checkpoint of {length} tokens was taken, and the sequence ends at {self.pos_max(seq_id)}")

    def cut(self, length: int, seq_id: int) -> bool:
        """Remove the positions of a sequence from `length` on. False if this memory can't."""
        return bool(llama_cpp.llama_memory_seq_rm(self.memory, seq_id, length, -1))

    def pos_min(self, seq_id: int) -> int:
        """The smallest position of a sequence, -1 if it is empty."""
        return int(llama_cpp.llama_memory_seq_pos_min(self.memory, seq_id))

    def pos_max(self, seq_id: int) -> int:
        """The largest position of a sequence, -1 if it is empty."""
        return int(llama_cpp.llama_memory_seq_pos_max(self.memory, seq_id))


def _complete(state: Bytes, written: int) -> Bytes:
    if written != state.nbytes or written == 0:
        raise StateRefused(f"llama.cpp announced a state of {state.nbytes} bytes and wrote {written}")
    return state


class LiveContext:
    """The memory of the context of a `Llama`, sequence 0.

    Holds the `Llama` weakly, so that a cache never keeps a model's gigabytes alive.
    """

    def __init__(self, llm: Any) -> None:
        self._llm = weakref.ref(llm)
        self._context = Context(self._ctx)
        params = llm.context_params
        self.memory = memory_of(self._context, v_trans=_v_trans(params.flash_attn_type), swa_full=bool(params.swa_full))

    def _ctx(self) -> Any:
        llm = self._llm()
        ctx = None if llm is None else llm._ctx.ctx
        if ctx is None:
            raise StoreClosed("the model is closed")
        return ctx

    @property
    def has_memory(self) -> bool:
        """False for embedding and diffusion models, which remember nothing."""
        return self._context.memory is not None

    @property
    def form(self) -> Form:
        """The form in which its state is copied: one sequence leaves out what a window has left, though it is there."""
        return Form.SEQUENCE if self.memory.window is None else Form.WHOLE

    def state_bytes(self) -> int:
        """Bytes that a copy of the state has."""
        return self._context.size(SEQ_ID)

    def copy_state(self) -> Bytes:
        """The state, in the form that `form` says.

        Raises:
            StateRefused: llama.cpp wrote another number of bytes than it announced.
        """
        return self._context.copy_whole() if self.form is Form.WHOLE else self._context.copy(SEQ_ID)

    @property
    def _point_flags(self) -> int:
        """A memory that can't be parsed is kept whole, also as a checkpoint."""
        return 0 if self.memory.kind is MemoryKind.UNKNOWN else PARTIAL_ONLY

    def point_bytes(self) -> int:
        """Bytes that a checkpoint taken now has."""
        return self._context.size(SEQ_ID, self._point_flags)

    def copy_point(self) -> Bytes:
        """What of the state can't be cut.

        Raises:
            StateRefused: llama.cpp wrote another number of bytes than it announced.
        """
        return self._context.copy(SEQ_ID, self._point_flags)

    def roll_back(self, point: Bytes, length: int) -> None:
        """Go back to a checkpoint that was taken behind `length` tokens. After an error the memory may hold anything.

        Raises:
            StateRefused: llama.cpp didn't take it, or the memory isn't at `length` now.
        """
        if self.memory.kind is MemoryKind.UNKNOWN:
            self.load(point, length)
            return
        self._context.roll_back(point, length, SEQ_ID)
        self._check(length)

    def load(self, state: Bytes, length: int) -> None:
        """Replace everything in the memory by a state of `length` tokens, and look whether that worked.

        After an error the memory may hold anything: clear it.

        Raises:
            StateRefused: fewer bytes were taken than given, or the memory isn't at `length` now.
        """
        # Cells only: what is left in the buffers is masked. Clearing 65,536 tokens' buffers takes 143 ms.
        llama_cpp.llama_memory_clear(self._context.memory, False)
        self._context.put(state, SEQ_ID)
        self._check(length)

    def _check(self, length: int) -> None:
        if self.pos_max() != length - 1 or not self.can_go_on_from(length):
            raise StateRefused(
                f"a state of {length} tokens was taken, and the memory holds positions {self.pos_min()} to {self.pos_max()}"
            )

    def clear(self, *, buffers: bool) -> None:
        """Forget everything; with `buffers` also overwrite what masked cells point to."""
        if self.has_memory:
            llama_cpp.llama_memory_clear(self._context.memory, buffers)

    def cut(self, length: int) -> bool:
        """Remove the positions from `length` on. False if this memory can't."""
        return self._context.cut(length, SEQ_ID)

    def can_cut_to(self, length: int) -> bool:
        """Whether the live memory can be cut back to `length` and go on from there.

        Recurrent parts hold for their own position only. A window must still be there below the cut: llama.cpp cuts a
        window model anywhere, says yes, and goes on from a hole (logit error 6.6).
        """
        if self.memory.kind is MemoryKind.ATTENTION:
            return self.can_go_on_from(length)
        if length == self.pos_max() + 1:
            return True
        return self.memory.kind is MemoryKind.WINDOW and self.can_go_on_from(length)

    def lacks_positions(self) -> bool:
        """Whether a window that llama.cpp keeps whole isn't there as a whole."""
        window = self.memory.window
        return window is not None and window.full and self.pos_min() > 0

    def can_go_on_from(self, length: int) -> bool:
        """Whether everything that position `length` attends to is there."""
        if self.memory.kind is MemoryKind.ATTENTION:
            return self.pos_min() == 0
        if self.memory.kind is MemoryKind.WINDOW and self.memory.window is not None:
            return 0 <= self.pos_min() <= self.memory.window.first_needed(length)
        return self.pos_min() >= 0

    def pos_min(self) -> int:
        """The smallest position in the memory, -1 if it is empty."""
        return self._context.pos_min(SEQ_ID) if self.has_memory else -1

    def pos_max(self) -> int:
        """The largest position in the memory, -1 if it is empty."""
        return self._context.pos_max(SEQ_ID) if self.has_memory else -1

    def decoded_count(self) -> tuple[int, int, float, float]:
        """llama.cpp's own counts and times of decoding, which change with every decode, whoever calls it.

        The times too, because llama.cpp shows 1 where a count is still 0. With `no_perf=True` there are no times, and the
        very first decode of a single token can't be told from none.
        """
        llama_cpp.llama_synchronize(self._ctx())
        perf = llama_cpp.llama_perf_context(self._ctx())
        return int(perf.n_p_eval), int(perf.n_eval), float(perf.t_p_eval_ms), float(perf.t_eval_ms)


def _v_trans(flash_attn_type: int) -> bool | None:
    """Whether values are stored transposed: where flash attention is off. None if llama.cpp decides for itself."""
    if flash_attn_type == llama_cpp.LLAMA_FLASH_ATTN_TYPE_AUTO:
        return None
    return bool(flash_attn_type == llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED)


def memory_of(context: Context, *, v_trans: bool | None = None, swa_full: bool = False) -> Memory:
    """What the memory of a context consists of.

    Args:
        context: the context.
        v_trans: whether values are stored transposed; None if it isn't known.
        swa_full: whether a windowed cache keeps every position.
    """
    model = llama_cpp.llama_get_model(context.ctx)
    arch = _architecture(model)
    kind = _kind(model, arch, context)
    n_swa = int(llama_cpp.llama_model_n_swa(model))
    window = None
    if kind in (MemoryKind.WINDOW, MemoryKind.HYBRID) and n_swa > 0:
        window = Window(n_swa, chunked=arch in _CHUNKED, full=swa_full)
    mrope = (llama_cpp.LLAMA_ROPE_TYPE_MROPE, llama_cpp.LLAMA_ROPE_TYPE_IMROPE)
    # A few models without M-RoPE have extensions too; llama.cpp doesn't say which.
    ext = True if llama_cpp.llama_model_rope_type(model) in mrope else None
    return Memory(kind, window, v_trans, ext)


def _architecture(model: Any) -> str:
    buffer = ctypes.create_string_buffer(128)
    length = llama_cpp.llama_model_meta_val_str(model, b"general.architecture", buffer, len(buffer))
    return buffer.value.decode() if length > 0 else ""


def _kind(model: Any, arch: str, context: Context) -> MemoryKind:
    if context.memory is None or arch in _OWN_MEMORY:
        return MemoryKind.UNKNOWN
    if llama_cpp.llama_model_is_hybrid(model):
        return MemoryKind.HYBRID
    if llama_cpp.llama_model_is_recurrent(model):
        return MemoryKind.RECURRENT
    # Some models name a window and don't use it (small EXAONE 4). A memory without a windowed cache ignores the flag.
    if llama_cpp.llama_model_n_swa(model) > 0 and context.size(SEQ_ID) != context.size(SEQ_ID, PARTIAL_ONLY):
        return MemoryKind.WINDOW
    return MemoryKind.ATTENTION


def address(pointer: Any) -> int:
    """Where a C pointer points to; 0 for none."""
    return int(ctypes.cast(pointer, ctypes.c_void_p).value or 0)
