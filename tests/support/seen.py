"""What llama.cpp itself says of a context: which positions are there, and which logits."""

from collections.abc import Sequence
from typing import Any

import llama_cpp
import llamas
import models
import numpy as np
import numpy.typing as npt


def first_position(llm: Any) -> int:
    """The smallest position in the memory, -1 if it is empty."""
    return int(llama_cpp.llama_memory_seq_pos_min(llama_cpp.llama_get_memory(llm.ctx), 0))


def last_position(llm: Any) -> int:
    """The largest position in the memory, -1 if it is empty."""
    return int(llama_cpp.llama_memory_seq_pos_max(llama_cpp.llama_get_memory(llm.ctx), 0))


def assert_no_hole(llm: Any, *, window: bool) -> None:
    """The memory ends where `n_tokens` says, and with a window everything is there that the next token looks at."""
    assert last_position(llm) == llm.n_tokens - 1
    if window:
        assert 0 <= first_position(llm) <= max(0, llm.n_tokens - models.N_WINDOW + 1)


def assert_same(found: Any, wanted: npt.NDArray[np.float32]) -> None:
    """Logits that differ by no more than those of two prefills in other batches, without flash attention."""
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-3 * float(np.abs(wanted).max()))


def assert_cold(found: Any, model: str, prompt: Sequence[int], **options: Any) -> None:
    """Logits behind a prompt are those of a model without any cache."""
    llm = llamas.load(model, **options)
    assert_same(found, llamas.first_logits(llm, prompt))
    llm.close()
