"""Restored states against live ones: logits, bit for bit where the same context filled the store."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from llamas import DENSE_SETTINGS, Setting, first_logits, forget, load, logits, random_tokens, sequence_state, whole_state

from kvkeep.cache import attach

N = 200
BEHIND = [100, 200, 300, 400, 500]
POSITIONS = [1, 17, 63, 64, 65, 128, 150, N]


def tolerance(setting: Setting, scale: float) -> float:
    """How far logits of one prompt may lie apart when it was decoded in other batches, given the largest logit.

    llama.cpp itself, no cache: one batch against token by token is 0.6 % of the largest logit with flash attention and
    f16, and below 0.03 % in every other setting here.
    """
    return scale * (0.02 if setting.name == "fa-on-f16" else 0.001)


def live_cut_back(llm: Any, tokens: Sequence[int], length: int) -> npt.NDArray[np.float32]:
    """Logits behind `BEHIND` in a context that was cut back to `length`."""
    llm.n_tokens = length
    llm.eval(BEHIND)
    return logits(llm)


@pytest.mark.parametrize("setting", DENSE_SETTINGS, ids=str)
def test_restored_logits_equal_those_of_a_live_cut_back_bit_for_bit(dense: str, root: Path, setting: Setting) -> None:
    tokens = random_tokens(N)
    llm = load(dense, **setting.options)
    with attach(llm, root, break_even=False):
        first_logits(llm, tokens)
    live = {}
    for length in reversed(POSITIONS):
        live[length] = live_cut_back(llm, tokens, length)

    other = load(dense, **setting.options)
    with attach(other, root, break_even=False) as keep:
        for length in POSITIONS:
            forget(other)
            found = first_logits(other, tokens[:length] + BEHIND)
            assert keep.last is not None
            assert (keep.last.length, keep.last.source.value) == (length, "disk"), keep.last
            assert np.array_equal(found, live[length]), f"at {length}: {np.abs(found - live[length]).max()}"


@pytest.mark.parametrize("setting", DENSE_SETTINGS, ids=str)
def test_blocks_of_several_saves_are_within_tolerance_of_cold(dense: str, root: Path, setting: Setting) -> None:
    """Blocks that were prefilled, blocks that were generated token by token, and blocks decoded behind a restore."""
    tokens = random_tokens(N)
    writer = load(dense, n_batch=32, **setting.options)
    with attach(writer, root, break_even=False) as keep:
        first_logits(writer, tokens[:70])
        keep.flush()
        forget(writer)
        for token in tokens[:130]:
            writer.eval([token])
        keep.flush()
        forget(writer)
        first_logits(writer, tokens)
    llm = load(dense, **setting.options)
    cold = first_logits(llm, tokens + BEHIND)
    forget(llm)
    with attach(llm, root, break_even=False) as keep:
        warm = first_logits(llm, tokens + BEHIND)
        assert keep.last is not None
        assert keep.last.length == N
    assert np.abs(warm - cold).max() <= tolerance(setting, np.abs(cold).max())


@pytest.mark.parametrize("setting", DENSE_SETTINGS, ids=str)
def test_an_assembled_state_equals_the_one_that_was_really_saved_there(dense: str, root: Path, setting: Setting) -> None:
    """Byte for byte, in both forms, at every position of `POSITIONS`."""
    from kvkeep.cache.state import Form

    tokens = random_tokens(N)
    llm = load(dense, n_batch=1, **setting.options)
    with attach(llm, root, break_even=False) as keep:
        first_logits(llm, tokens)
        keep.flush()
        cache = keep._session.cache
        assert cache is not None
        for length in reversed(POSITIONS):
            llm._ctx.kv_cache_seq_rm(-1, length, -1)
            match = cache.match(tokens[:length])
            assert np.array_equal(cache.restore(match, tokens).state, sequence_state(llm))
            whole = cache.restore(match, tokens, form=Form.WHOLE, arch="llama").state
            assert np.array_equal(whole, whole_state(llm))


def test_five_restores_give_the_same_logits_five_times(dense: str, root: Path) -> None:
    tokens = random_tokens(N)
    llm = load(dense)
    with attach(llm, root, break_even=False) as keep:
        first_logits(llm, tokens)
        keep.flush()
        found = []
        for _ in range(5):
            forget(llm)
            match = keep._session.settle(llm, tokens[:150] + BEHIND)
            assert (match.length, match.source.value) == (150, "disk")
            # Past the wrapper, so that what is decoded isn't saved and found by the next round.
            type(llm).eval(llm, BEHIND)
            found.append(logits(llm))
    assert all(np.array_equal(found[0], other) for other in found[1:])
