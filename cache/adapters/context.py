"""The few verbs of llama.cpp that kvkeep needs, on the context of a `llama_cpp.Llama`. Sequence 0 throughout."""

import ctypes
import weakref
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt

from kvkeep.cache.layout import SEQ_ID, MemoryKind
from kvkeep.store.errors import StateRefused, StoreClosed

_BYTE_POINTER = ctypes.POINTER(ctypes.c_uint8)
Bytes = npt.NDArray[np.uint8]


class LiveContext:
    """The memory of a live context.

    Holds the `Llama` weakly, so that a cache never keeps a model's gigabytes alive.
    """

    def __init__(self, llm: Any) -> None:
        self._llm = weakref.ref(llm)
        model = llm._model.model
        self.kind = _kind(model, self._memory)
        self.n_swa = int(llama_cpp.llama_model_n_swa(model))
        mrope = (llama_cpp.LLAMA_ROPE_TYPE_MROPE, llama_cpp.LLAMA_ROPE_TYPE_IMROPE)
        self.ext = llama_cpp.llama_model_rope_type(model) in mrope
        self.v_trans = _v_trans(llm.context_params.flash_attn_type)

    @property
    def _ctx(self) -> Any:
        llm = self._llm()
        ctx = None if llm is None else llm._ctx.ctx
        if ctx is None:
            # A null pointer in a C call ends the process.
            raise StoreClosed("the model is closed")
        return ctx

    @property
    def _memory(self) -> Any:
        return llama_cpp.llama_get_memory(self._ctx)

    @property
    def has_memory(self) -> bool:
        """False for embedding and diffusion models, which remember nothing."""
        return self._memory is not None

    def state_bytes(self) -> int:
        """Bytes that a copy of the state has."""
        return int(llama_cpp.llama_state_seq_get_size(self._ctx, SEQ_ID))

    def copy_state(self) -> Bytes:
        """The state of the sequence.

        Raises:
            StateRefused: llama.cpp wrote another number of bytes than it announced.
        """
        size = self.state_bytes()
        state: Bytes = np.empty(size, np.uint8)
        written = int(llama_cpp.llama_state_seq_get_data(self._ctx, state.ctypes.data_as(_BYTE_POINTER), size, SEQ_ID))
        if written != size or size == 0:
            raise StateRefused(f"llama.cpp announced a state of {size} bytes and wrote {written}")
        return state

    def load(self, state: Bytes, length: int) -> None:
        """Replace everything in the memory by a state of `length` tokens, and look whether that worked.

        After an error the memory may hold anything: clear it.

        Raises:
            StateRefused: fewer bytes were taken than given, or the memory isn't at `length` now.
        """
        # Cells only: what is left in the buffers is masked. Clearing 65,536 tokens' buffers takes 143 ms.
        llama_cpp.llama_memory_clear(self._memory, False)
        pointer = state.ctypes.data_as(_BYTE_POINTER)
        taken = int(llama_cpp.llama_state_seq_set_data(self._ctx, pointer, state.nbytes, SEQ_ID))
        if taken != state.nbytes:
            raise StateRefused(f"llama.cpp took {taken} of {state.nbytes} bytes")
        if self.pos_max() != length - 1 or not self.can_go_on_from(length):
            raise StateRefused(
                f"a state of {length} tokens was taken, and the memory holds positions {self.pos_min()} to {self.pos_max()}"
            )

    def clear(self, *, buffers: bool) -> None:
        """Forget everything; with `buffers` also overwrite what masked cells point to."""
        if self.has_memory:
            llama_cpp.llama_memory_clear(self._memory, buffers)

    def cut(self, length: int) -> bool:
        """Remove the positions from `length` on. False if this memory can't."""
        return bool(llama_cpp.llama_memory_seq_rm(self._memory, SEQ_ID, length, -1))

    def can_cut_to(self, length: int) -> bool:
        """Whether the live memory can be cut back to `length` and go on from there.

        Recurrent parts hold for their own position only. A window must still be there below the cut: llama.cpp cuts a
        window model anywhere, says yes, and goes on from a hole (logit error 6.6).
        """
        if self.kind is MemoryKind.ATTENTION:
            return self.can_go_on_from(length)
        if length == self.pos_max() + 1:
            return True
        return self.kind is MemoryKind.WINDOW and self.can_go_on_from(length)

    def can_go_on_from(self, length: int) -> bool:
        """Whether everything that position `length` attends to is there."""
        if self.kind is MemoryKind.ATTENTION:
            return self.pos_min() == 0
        if self.kind is MemoryKind.WINDOW:
            # One less is too strict and refuses the same prompt again, one more is wrong.
            return self.pos_min() <= max(0, length - self.n_swa + 1)
        return self.pos_min() >= 0

    def pos_min(self) -> int:
        """The smallest position in the memory, -1 if it is empty."""
        if not self.has_memory:
            return -1
        return int(llama_cpp.llama_memory_seq_pos_min(self._memory, SEQ_ID))

    def pos_max(self) -> int:
        """The largest position in the memory, -1 if it is empty."""
        if not self.has_memory:
            return -1
        return int(llama_cpp.llama_memory_seq_pos_max(self._memory, SEQ_ID))

    def decoded_count(self) -> tuple[int, int, float, float]:
        """llama.cpp's own counts and times of decoding, which change with every decode, whoever calls it.

        The times too, because llama.cpp shows 1 where a count is still 0. With `no_perf=True` there are no times, and the
        very first decode of a single token can't be told from none.
        """
        llama_cpp.llama_synchronize(self._ctx)
        perf = llama_cpp.llama_perf_context(self._ctx)
        return int(perf.n_p_eval), int(perf.n_eval), float(perf.t_p_eval_ms), float(perf.t_eval_ms)


def _v_trans(flash_attn_type: int) -> bool | None:
    """Whether values are stored transposed: where flash attention is off. None if llama.cpp decides for itself."""
    if flash_attn_type == llama_cpp.LLAMA_FLASH_ATTN_TYPE_AUTO:
        return None
    return bool(flash_attn_type == llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED)


def _kind(model: Any, memory: Any) -> MemoryKind:
    if memory is None:
        return MemoryKind.UNKNOWN
    if llama_cpp.llama_model_is_hybrid(model):
        return MemoryKind.HYBRID
    if llama_cpp.llama_model_is_recurrent(model):
        return MemoryKind.RECURRENT
    if llama_cpp.llama_model_n_swa(model) > 0:
        return MemoryKind.WINDOW
    return MemoryKind.ATTENTION
