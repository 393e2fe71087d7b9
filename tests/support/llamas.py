"""Real llama.cpp contexts for tests: settings, logits, and states read straight from the C API."""

import ctypes
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt
from llama_cpp import Llama

F32, F16, Q4_0, Q8_0 = 0, 1, 2, 8
_BYTES = ctypes.POINTER(ctypes.c_uint8)


@dataclass(frozen=True)
class Setting:
    """A way to make a context."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name


# Quantised V exists only with flash attention.
DENSE_SETTINGS = (
    Setting("fa-off-f16"),
    Setting("fa-off-f32", {"type_k": F32, "type_v": F32}),
    Setting("fa-off-q8_0-k", {"type_k": Q8_0}),
    Setting("fa-off-q4_0-k", {"type_k": Q4_0}),
    Setting("fa-on-f16", {"flash_attn": True}),
    Setting("fa-on-q8_0", {"flash_attn": True, "type_k": Q8_0, "type_v": Q8_0}),
    Setting("fa-on-q4_0", {"flash_attn": True, "type_k": Q4_0, "type_v": Q4_0}),
)


# One thread: tiny models gain nothing from two, and beside another busy process ggml's barriers cost a hundredfold.
_DEFAULTS = {"n_ctx": 1024, "n_batch": 128, "n_threads": 1, "n_threads_batch": 1, "verbose": False, "seed": 1}


def load(path: str, **options: Any) -> Llama:
    """A quiet `Llama` with a small context."""
    llm = Llama(path, **(_DEFAULTS | options))
    if not options.get("logits_all"):
        # `Llama` never fills them then, and leaves what this memory held before: logits of another test's model now and then.
        llm.scores[...] = 0.0
    _count_decodes(llm)
    return llm


def random_tokens(count: int, seed: int = 0, n_vocab: int = 512) -> list[int]:
    """Tokens that are no control tokens."""
    return [int(token) for token in np.random.default_rng(seed).integers(3, n_vocab, count)]


def logits(llm: Llama) -> npt.NDArray[np.float32]:
    """Of the last decoded token, shape (n_vocab,). A copy."""
    context: Any = llm._ctx
    return np.ctypeslib.as_array(context.get_logits(), shape=(llm.n_vocab(),)).copy()


def sequence_state(llm: Llama) -> npt.NDArray[np.uint8]:
    """`llama_state_seq_get_data` of sequence 0."""
    size = llama_cpp.llama_state_seq_get_size(llm.ctx, 0)
    state = np.empty(size, np.uint8)
    assert llama_cpp.llama_state_seq_get_data(llm.ctx, state.ctypes.data_as(_BYTES), size, 0) == size
    return state


def put_sequence_state(llm: Llama, state: npt.NDArray[np.uint8]) -> None:
    """`llama_state_seq_set_data` of sequence 0, all of it."""
    taken = llama_cpp.llama_state_seq_set_data(llm.ctx, state.ctypes.data_as(_BYTES), state.size, 0)
    assert taken == state.size


def whole_state(llm: Llama) -> npt.NDArray[np.uint8]:
    """`llama_state_get_data`."""
    size = llama_cpp.llama_state_get_size(llm.ctx)
    state = np.empty(size, np.uint8)
    assert llama_cpp.llama_state_get_data(llm.ctx, state.ctypes.data_as(_BYTES), size) == size
    return state


def forget(llm: Llama) -> None:
    """An empty context."""
    llm.reset()  # type: ignore[no-untyped-call]
    llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(llm.ctx), True)


def load_with_usual_threads(path: str, **options: Any) -> Llama:
    """The same with as many threads as `Llama` takes by itself: for models of a real size."""
    return load(path, n_threads=None, n_threads_batch=None, **options)


def first_token_seconds(llm: Llama, prompt: Sequence[int]) -> float:
    """What somebody waits who asks for a greedy answer to this prompt."""
    began = time.perf_counter()
    stream = llm.generate(prompt, temp=0.0)
    next(stream)
    seconds = time.perf_counter() - began
    stream.close()
    return seconds


def n_decoded(llm: Llama) -> int:
    """Tokens handed to `llama_decode` since `load`.

    Counted at the call, because llama.cpp's own counters show 1 where they are 0.
    """
    context: Any = llm._ctx
    return int(context.n_decoded)


def _count_decodes(llm: Llama) -> None:
    context: Any = llm._ctx
    decode = type(context).decode
    context.n_decoded = 0

    def counting(batch: Any) -> None:
        context.n_decoded += batch.batch.n_tokens
        decode(context, batch)

    context.decode = counting


def generate(llm: Llama, prompt: Sequence[int], count: int) -> list[int]:
    """`count` greedy tokens behind a prompt."""
    stream = llm.generate(list(prompt), temp=0.0)
    tokens = [next(stream) for _ in range(count)]
    stream.close()
    return tokens


def first_logits(llm: Llama, prompt: Sequence[int]) -> npt.NDArray[np.float32]:
    """The logits behind a prompt, through `generate` as a person's request would have them."""
    stream = llm.generate(list(prompt), temp=0.0)
    next(stream)
    found = logits(llm)
    stream.close()
    return found
