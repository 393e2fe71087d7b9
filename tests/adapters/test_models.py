"""The tiny models themselves: each has the memory that it is there for, says so to llama.cpp, and makes use of it."""

import ctypes
from dataclasses import dataclass
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt
import pytest
from llamas import forget, generate, load, logits, random_tokens

WHOLE, PARTIAL_ONLY = 0, 1
# Multiples of 128, the most tokens for which any of the models waits before it makes a key of them.
SHORT, LONG = 128, 384
# What llama.cpp writes of a cell beside its keys and values.
CELL = 12


@dataclass(frozen=True)
class Memory:
    """What llama.cpp says of a model.

    Attributes:
        fixture: makes the model.
        a_token: bytes that each further token adds to a sequence's state once it is longer than any window.
        partial_grows: whether the same bytes are in the partial state, which otherwise has a fixed size.
        cuts_back: whether the last tokens can be removed.
        reach: how far back a token is that the test changes. It must lie inside a window if there is nothing else.
    """

    fixture: str
    a_token: float
    recurrent: bool = False
    hybrid: bool = False
    n_swa: int = 0
    partial_grows: bool = False
    cuts_back: bool = False
    reach: int = 300

    def __str__(self) -> str:
        return self.fixture


_KV = 2 * 64 * 2  # keys and values of two heads of 32, in f16

MEMORIES = (
    Memory("dense", 3 * _KV + CELL, partial_grows=True, cuts_back=True),
    # Each cell carries an extension: two more positions and the token.
    Memory("mrope", 3 * _KV + CELL + 12, partial_grows=True, cuts_back=True),
    # One layer of six sees everything.
    Memory("window", _KV + CELL, n_swa=64, cuts_back=True),
    Memory("hybrid", 2 * _KV + CELL, hybrid=True),
    # No layer sees everything, but llama.cpp keeps cells for such layers nevertheless.
    Memory("hybrid_window", CELL, hybrid=True, n_swa=64, reach=40),
    Memory("recurrent", 0, recurrent=True),
    Memory("falcon_h1", 3 * _KV + CELL, hybrid=True),
    # Keys of 32 + 32 numbers, and no values.
    Memory("mla", 3 * 64 * 2 + CELL, partial_grows=True, cuts_back=True),
    # The second cache has cells of its own, with one key of 64 numbers.
    Memory("two_caches", 3 * (64 + 64) * 2 + 2 * CELL, partial_grows=True, cuts_back=True),
    # A key of 32 numbers and one of 64 for 4 tokens, a key of 32 for 128, and cells as of the hybrid with a window.
    Memory("opaque", (32 + 64) * 2 / 4 + 32 * 2 / 128 + CELL, hybrid=True),
)


@pytest.fixture(params=MEMORIES, ids=str)
def memory(request: pytest.FixtureRequest) -> Memory:
    return request.param


@pytest.fixture
def llm(memory: Memory, request: pytest.FixtureRequest) -> Any:
    return load(request.getfixturevalue(memory.fixture))


def decode(llm: Any, tokens: list[int]) -> npt.NDArray[np.float32]:
    """The logits behind these tokens in an empty context."""
    forget(llm)
    llm.eval(tokens)
    return logits(llm)


def state_size(llm: Any, flags: int) -> int:
    """Bytes that llama.cpp really writes."""
    size = llama_cpp.llama_state_seq_get_size_ext(llm.ctx, 0, flags)
    state = (ctypes.c_uint8 * size)()
    written = llama_cpp.llama_state_seq_get_data_ext(llm.ctx, state, size, 0, flags)
    assert written == size
    return size


def test_a_model_is_of_the_kind_that_it_is_there_for(llm: Any, memory: Memory) -> None:
    model = llm._model.model
    assert llama_cpp.llama_model_is_recurrent(model) == memory.recurrent
    assert llama_cpp.llama_model_is_hybrid(model) == memory.hybrid
    assert llama_cpp.llama_model_n_swa(model) == memory.n_swa


def test_states_have_the_size_that_the_memory_explains(llm: Any, memory: Memory) -> None:
    tokens = random_tokens(LONG)
    sizes = {}
    for length in (SHORT, LONG):
        decode(llm, tokens[:length])
        sizes[length] = state_size(llm, WHOLE), state_size(llm, PARTIAL_ONLY)
    whole, partial = ((sizes[LONG][i] - sizes[SHORT][i]) / (LONG - SHORT) for i in (WHOLE, PARTIAL_ONLY))
    assert whole == memory.a_token
    assert partial == (memory.a_token if memory.partial_grows else 0)
    if memory.partial_grows or memory.recurrent:
        assert sizes[LONG][WHOLE] == sizes[LONG][PARTIAL_ONLY]
    else:
        assert 0 < sizes[LONG][PARTIAL_ONLY] < sizes[LONG][WHOLE]


def test_the_last_tokens_can_be_removed_where_the_memory_has_a_cell_for_each(llm: Any, memory: Memory) -> None:
    decode(llm, random_tokens(SHORT))
    cells = llama_cpp.llama_get_memory(llm.ctx)
    assert llama_cpp.llama_memory_seq_rm(cells, 0, SHORT - 1, -1) == memory.cuts_back
    assert llama_cpp.llama_memory_seq_pos_max(cells, 0) == SHORT - 1 - memory.cuts_back


@pytest.mark.parametrize("length", [50, 400])
def test_logits_depend_on_a_token_far_back(llm: Any, memory: Memory, length: int) -> None:
    tokens = random_tokens(length)
    changed = length - 1 - min(memory.reach, length - 1)
    others = list(tokens)
    others[changed] = (tokens[changed] + 100) % 500 + 3
    found, other = decode(llm, tokens), decode(llm, others)
    assert np.isfinite(found).all()
    assert np.abs(found - other).max() > 1e-3 * np.abs(found).max()


def test_a_window_ends_somewhere(hybrid_window: str) -> None:
    """Two layers of 64 tokens and two convolutions over 3 don't reach 300 tokens back."""
    tokens = random_tokens(400)
    llm = load(hybrid_window)
    found = decode(llm, tokens)
    tokens[99] = (tokens[99] + 100) % 500 + 3
    assert np.array_equal(found, decode(llm, tokens))


@pytest.mark.parametrize("fixture", ["hybrid", "hybrid_window", "recurrent", "falcon_h1", "mla", "two_caches", "opaque"])
def test_greedy_output_is_varied(fixture: str, request: pytest.FixtureRequest) -> None:
    assert len(set(generate(load(request.getfixturevalue(fixture)), random_tokens(60), 60))) > 20
