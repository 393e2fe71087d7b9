"""`HybridCheckpointCache` in device mode, with several sequences, and whatever could end or hang the process."""

import logging
import struct
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt
import pytest
from llamas import load, logits, random_tokens
from restart import run_child

from kvkeep.cache import HybridCheckpointCache
from kvkeep.cache.adapters.checkpoint_cache import HybridCheckpoint

TOKENS = random_tokens(330)
OTHER = random_tokens(330, seed=5)
AT, END = 150, 200

RECURRENT = ["hybrid", "falcon_h1", "recurrent"]
WINDOWS = ["hybrid_window", "window"]

Logits = npt.NDArray[np.float32]


def go_on(llm: Any, start: int, tokens: list[int]) -> Logits:
    """Logits behind `tokens` in a context that stands at `start`."""
    llm.n_tokens = start
    llm.eval(tokens[start:])
    return logits(llm)


# -- on the device ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fixture", RECURRENT)
def test_on_the_device_five_restores_give_the_live_logits(fixture: str, request: pytest.FixtureRequest) -> None:
    llm = load(request.getfixturevalue(fixture))
    cache = HybridCheckpointCache(llm.ctx, 16, True)
    llm.eval(TOKENS[:AT])
    assert cache.save_checkpoint(AT, TOKENS)
    live = go_on(llm, AT, TOKENS[:END])
    for _ in range(5):
        best = cache.find_best_checkpoint(TOKENS[:END])
        assert best is not None
        assert cache.restore_checkpoint(best)
        assert np.array_equal(go_on(llm, AT, TOKENS[:END]), live)


@pytest.mark.parametrize("fixture", RECURRENT)
def test_on_the_device_one_a_sequence_and_nothing_on_disk(fixture: str, root: Path, request: pytest.FixtureRequest) -> None:
    llm = load(request.getfixturevalue(fixture))
    cache = HybridCheckpointCache(llm.ctx, 16, True, llm=llm, path=root)
    old = None
    for end in (50, 100, AT):
        llm.eval(TOKENS[llm.n_tokens : end])
        assert cache.save_checkpoint(end, TOKENS)
        assert [point.pos for point in cache.checkpoints] == [end]
        assert old is None or cache.restore_checkpoint(old) is False
        old = cache.checkpoints[0]
    assert cache.find_best_checkpoint(TOKENS[:120]) is None
    flags = llama_cpp.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY
    assert cache.cache_size == len(cache.checkpoints[0].data)
    assert cache.cache_size < llama_cpp.llama_state_seq_get_size_ext(llm.ctx, 0, flags), "the tensors aren't in it"
    assert cache.flush()
    cache.close()
    assert not root.exists()


@pytest.mark.parametrize("fixture", [*WINDOWS, "opaque", "dense", "two_caches"])
def test_on_the_device_other_memories_get_none_and_one_warning(
    fixture: str, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> None:
    llm = load(request.getfixturevalue(fixture))
    cache = HybridCheckpointCache(llm.ctx, 16, True)
    for end in (50, 100, AT):
        llm.eval(TOKENS[llm.n_tokens : end])
        assert cache.save_checkpoint(end, TOKENS) is False
    assert cache.checkpoints == []
    assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) == 1


BEGIN = """
import gc, sys, llama_cpp, llamas
from dataclasses import replace
from kvkeep.cache import HybridCheckpointCache
from kvkeep.cache.adapters.checkpoint_cache import HybridCheckpoint
llm = llamas.load(sys.argv[1])
tokens, other = llamas.random_tokens(330), llamas.random_tokens(330, seed=5)
memory = llama_cpp.llama_get_memory(llm.ctx)

def device(llm=llm):
    return HybridCheckpointCache(llm.ctx, 16, True)

def host(llm=llm):
    return HybridCheckpointCache(llm.ctx)

def take(cache, end=150, llm=llm):
    llamas.forget(llm)
    llm.eval(tokens[:end])
    assert cache.save_checkpoint(end, tokens)
    return cache.checkpoints[-1]

def say(*answers):
    print("answers", *answers)

cache = device()
"""

# What is done, what must be answered, and what a memory without keys and values answers if that differs.
ORDERS = {
    "restore twice": ("p = take(cache); say(cache.restore_checkpoint(p), cache.restore_checkpoint(p))", "True True", ""),
    "save after close": ("take(cache); cache.close(); say(cache.save_checkpoint(150, tokens))", "False", ""),
    "restore after close": ("p = take(cache); cache.close(); say(cache.restore_checkpoint(p))", "False", ""),
    "restore after the cache's clear": ("p = take(cache); cache.clear(); say(cache.restore_checkpoint(p))", "False", ""),
    "memory cleared": (
        "p = take(cache); llama_cpp.llama_memory_clear(memory, True); say(cache.restore_checkpoint(p))",
        "False",
        "True",
    ),
    "memory cleared, saved, restored": (
        "p = take(cache); llama_cpp.llama_memory_clear(memory, True); q = take(cache, 20)\n"
        "say(cache.restore_checkpoint(p), cache.restore_checkpoint(q))",
        "False True",
        "",
    ),
    "sequence removed": (
        "p = take(cache); llama_cpp.llama_memory_seq_rm(memory, 0, -1, -1); llm.n_tokens = 0; llm.eval(other[:20])\n"
        "say(cache.restore_checkpoint(p))",
        "False",
        "True",
    ),
    "stale": (
        "p, q = take(cache, 100), take(cache)\nsay(cache.restore_checkpoint(p), cache.restore_checkpoint(q))",
        "False True",
        "",
    ),
    "two caches": (
        "second = device(); p, q = take(cache), take(second, 100)\n"
        "say(cache.restore_checkpoint(p), second.restore_checkpoint(q), second.restore_checkpoint(p))",
        "False True False",
        "",
    ),
    "two caches, the newer one closed": (
        "second = device(); p, q = take(cache), take(second, 100); second.close(); say(cache.restore_checkpoint(p))",
        "False",
        "",
    ),
    "two caches, the newer one gone": (
        "second = device(); p, q = take(cache), take(second, 100); del second; gc.collect()\nsay(cache.restore_checkpoint(p))",
        "False",
        "",
    ),
    "two caches, the newer one cleared": (
        "second = device(); p, q = take(cache), take(second, 100); second.clear(); say(cache.restore_checkpoint(p))",
        "False",
        "",
    ),
    "a host checkpoint": ("p = take(host()); take(cache); say(cache.restore_checkpoint(p))", "False", ""),
    "a host checkpoint, nothing taken": ("p = take(host()); say(cache.restore_checkpoint(p))", "False", ""),
    "a device checkpoint in host mode": ("p = take(cache); say(host().restore_checkpoint(p))", "False", ""),
    "another context's": (
        "llm2 = llamas.load(sys.argv[1]); second = device(llm2); p = take(cache); q = take(second, llm=llm2)\n"
        "say(cache.restore_checkpoint(q), second.restore_checkpoint(p), cache.restore_checkpoint(p))",
        "False False True",
        "",
    ),
    "garbage": (
        "p = take(cache)\nfor data in (b'', b'x', b'x' * 100, p.data[:-1]):\n"
        "    assert not cache.restore_checkpoint(replace(p, data=data))\nsay(cache.restore_checkpoint(p))",
        "True",
        "",
    ),
    "made by hand, in the list": (
        "cache.checkpoints.append(p := HybridCheckpoint(150, take(host()).data, '', 1, 0)); say(cache.restore_checkpoint(p))",
        "False",
        "",
    ),
    "made by hand, in the list, after one was taken": (
        "p = replace(take(cache), data=b'x' * 100); cache.checkpoints.append(p); say(cache.restore_checkpoint(p))",
        "False",
        "",
    ),
    "another sequence": (
        "p = take(cache); say(cache.restore_checkpoint(p, 1), cache.save_checkpoint(150, tokens, 1))",
        "False False",
        "",
    ),
    "the list emptied": ("p = take(cache); cache.checkpoints.clear(); say(cache.restore_checkpoint(p))", "False", ""),
}


def answers(script: str, model: str, *arguments: str) -> list[str]:
    """What a child process says before it ends normally."""
    child = run_child(["-c", script, model, *arguments])
    assert child.returncode == 0, (child.returncode, child.stderr[-1500:])
    return child.stdout.split()[1:]


@pytest.mark.parametrize("fixture", ["hybrid", "recurrent"])
@pytest.mark.parametrize("order", ORDERS)
def test_no_order_of_calls_ends_the_process(order: str, fixture: str, request: pytest.FixtureRequest) -> None:
    script, expected, without_keys = ORDERS[order]
    if fixture == "recurrent":
        expected = without_keys or expected
    assert answers(BEGIN + script, request.getfixturevalue(fixture)) == expected.split()


SEQUENCE_IDS = """
for cache in (host(), cache):
    p = take(cache)
    for seq_id in map(int, sys.argv[2:]):
        assert cache.save_checkpoint(150, tokens, seq_id) is False
        assert cache.find_best_checkpoint(tokens, seq_id) is None
        assert cache.restore_checkpoint(replace(p, seq_id=seq_id), seq_id) is False
say(True)
"""


@pytest.mark.parametrize("seq_id", [1, 255, 256, -1, -2])
@pytest.mark.parametrize("fixture", ["hybrid", "recurrent"])
def test_a_sequence_that_a_context_cannot_have_ends_no_process(
    fixture: str, seq_id: int, request: pytest.FixtureRequest
) -> None:
    assert answers(BEGIN + SEQUENCE_IDS, request.getfixturevalue(fixture), str(seq_id)) == ["True"]


# -- several sequences --------------------------------------------------------------------------------------------


class Sequences:
    """A context with two sequences, of the model of a `Llama`."""

    def __init__(self, llm: Any, unified: bool) -> None:
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = 1024, 128, 128, 2
        params.n_threads = params.n_threads_batch = 1
        params.kv_unified, params.swa_full = unified, False
        self._llm = llm
        self.ctx = llama_cpp.llama_init_from_model(llm._model.model, params)
        assert self.ctx
        self.memory = llama_cpp.llama_get_memory(self.ctx)

    def decode(self, seq_id: int, start: int, tokens: list[int]) -> Logits:
        """Logits behind `tokens`, of which a sequence holds the first `start`."""
        batch = llama_cpp.llama_batch_init(128, 0, 1)
        for at in range(start, len(tokens), 128):
            piece = tokens[at : at + 128]
            batch.n_tokens = len(piece)
            for i, token in enumerate(piece):
                batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0] = token, at + i, 1, seq_id
                batch.logits[i] = i == len(piece) - 1
            assert llama_cpp.llama_decode(self.ctx, batch) == 0
        llama_cpp.llama_batch_free(batch)
        return np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(self.ctx, -1), shape=(self._llm.n_vocab(),)).copy()

    def clear(self, seq_id: int) -> None:
        llama_cpp.llama_memory_seq_rm(self.memory, seq_id, -1, -1)

    def pos_max(self, seq_id: int) -> int:
        return llama_cpp.llama_memory_seq_pos_max(self.memory, seq_id)


@pytest.fixture(params=[True, False], ids=["unified", "a stream each"])
def unified(request: pytest.FixtureRequest) -> bool:
    return request.param


@pytest.fixture
def two(fixture: str, unified: bool, request: pytest.FixtureRequest) -> Iterator[Sequences]:
    llm = load(request.getfixturevalue(fixture), n_ctx=64)
    sequences = Sequences(llm, unified)
    yield sequences
    llama_cpp.llama_free(sequences.ctx)


def assert_close(found: Logits, live: Logits, *, exact: bool) -> None:
    """The cells of a shared window come back in another order."""
    assert np.abs(found - live).max() <= (0.0 if exact else 0.001 * np.abs(live).max())


MODES = [(fixture, on_device) for fixture in RECURRENT for on_device in (False, True)]
MODES += [(fixture, False) for fixture in [*WINDOWS, "opaque"]]


@pytest.mark.parametrize(("fixture", "on_device"), MODES, ids=lambda value: {True: "device", False: "host"}.get(value, value))
def test_each_sequence_has_checkpoints_of_its_own(two: Sequences, fixture: str, on_device: bool) -> None:
    exact = fixture not in WINDOWS
    cache = HybridCheckpointCache(two.ctx, 16, on_device)
    two.decode(1, 0, TOKENS[:AT])
    two.decode(0, 0, OTHER[:AT])
    assert cache.save_checkpoint(AT, TOKENS, 1)
    assert cache.save_checkpoint(AT, OTHER, 0)
    assert cache.save_checkpoint(AT, TOKENS, 0), "nobody can see that these are other tokens"
    assert cache.save_checkpoint(AT, OTHER, 0)
    live = [two.decode(0, AT, OTHER[:END]), two.decode(1, AT, TOKENS[:END])]
    two.decode(1, END, TOKENS[:260])
    for _ in range(3):
        for seq_id, tokens in ((1, TOKENS), (0, OTHER)):
            best = cache.find_best_checkpoint(tokens, seq_id)
            assert best is not None
            assert (best.pos, best.seq_id) == (AT, seq_id)
            assert cache.restore_checkpoint(best, 1 - seq_id) is False
            assert cache.restore_checkpoint(best, seq_id)
            assert two.pos_max(seq_id) == AT - 1
            assert_close(two.decode(seq_id, AT, tokens[:END]), live[seq_id], exact=exact)
    assert cache.find_best_checkpoint(OTHER, 1) is None


def in_cells(point: HybridCheckpoint, at: int, value: int) -> HybridCheckpoint:
    data = bytearray(point.data)
    struct.pack_into("<i", data, at, value)
    return replace(point, data=bytes(data))


@pytest.mark.parametrize("bad", ["empty", "random", "half", "a byte short", "no cells", "negative cell", "one further"])
@pytest.mark.parametrize("fixture", [*RECURRENT, *WINDOWS, "opaque"])
def test_a_refused_checkpoint_leaves_its_sequence_clean_and_the_other_alone(two: Sequences, fixture: str, bad: str) -> None:
    exact = fixture not in WINDOWS
    cold = two.decode(0, 0, TOKENS[:40])
    two.clear(0)
    two.decode(1, 0, OTHER[:AT])
    cache = HybridCheckpointCache(two.ctx)
    two.decode(0, 0, TOKENS[:AT])
    assert cache.save_checkpoint(AT, TOKENS)
    (point,) = cache.checkpoints
    first_cell = 12 if fixture in RECURRENT else 16
    refused = {
        "empty": replace(point, data=b""),
        "random": replace(point, data=np.random.default_rng(2).bytes(point.size)),
        "half": replace(point, data=point.data[: point.size // 2]),
        "a byte short": replace(point, data=point.data[:-1]),
        "no cells": in_cells(point, first_cell - 4, 0),
        "negative cell": in_cells(point, first_cell, -5),
        "one further": replace(point, pos=AT + 1),
    }[bad]
    two.decode(0, AT, TOKENS[:END])
    assert cache.restore_checkpoint(refused) is False
    assert two.pos_max(0) in (-1, END - 1)
    two.clear(0)
    assert_close(two.decode(0, 0, TOKENS[:40]), cold, exact=exact)
    assert two.pos_max(1) == AT - 1


@pytest.mark.parametrize("fixture", WINDOWS)
def test_a_window_with_a_hole_is_refused_among_several_sequences(two: Sequences, fixture: str) -> None:
    cache = HybridCheckpointCache(two.ctx)
    two.decode(0, 0, TOKENS[:AT])
    assert cache.save_checkpoint(AT, TOKENS)
    (point,) = cache.checkpoints
    two.decode(0, AT, TOKENS[:END])
    at = 16 + 12 * 30  # the 31st of 64 cells
    (position,) = struct.unpack_from("<i", point.data, at)
    assert cache.restore_checkpoint(in_cells(point, at, position - 1)) is False
    if two.pos_max(0) == END - 1:
        assert cache.restore_checkpoint(point)


# -- the end of things --------------------------------------------------------------------------------------------

ENDING = """
import faulthandler, gc, sys, llamas
faulthandler.dump_traceback_later(40, exit=True)
import kvkeep.store.registry as registry
from kvkeep.cache import HybridCheckpointCache
from kvkeep.cache.writer import Writer
gc.disable()
model, root, other_root, moment = sys.argv[1:]
tokens = llamas.random_tokens(330)

def fill(root):
    llm = llamas.load(model)
    cache = HybridCheckpointCache(llm.ctx, llm=llm, path=root)
    llm.eval(tokens[:150])
    assert cache.save_checkpoint(150, tokens)
    return llm, cache

llm, cache = fill(root)
llm.cycle, cache.cycle = cache, llm

def collecting(function):
    def inner(*arguments, **options):
        gc.collect()
        return function(*arguments, **options)
    return inner

if moment == "opening":
    registry.Repository = collecting(registry.Repository)
if moment == "opening itself":
    registry.Repository, other_root = collecting(registry.Repository), root
if moment == "queueing":
    Writer._make_room = collecting(Writer._make_room)
if moment == "model first":
    del llm.cycle, cache.cycle
    del llm
    gc.collect()
    cache.close()
if moment == "cache first":
    del llm.cycle, cache.cycle
    del cache
llm = cache = None
if moment == "at the end":
    sys.exit(0)
llm, cache = fill(other_root)
assert cache.flush()
assert cache.find_best_checkpoint(tokens).pos == 150
if moment == "opening again":
    cache.close()
    second = HybridCheckpointCache(llm.ctx, llm=llm, path=root)
    second.flush()
    gc.collect()
"""


@pytest.mark.parametrize(
    "moment",
    ["opening", "opening itself", "opening again", "queueing", "model first", "cache first", "at the end", "never"],
)
@pytest.mark.parametrize("fixture", ["hybrid"])
def test_whenever_the_collector_runs_nothing_hangs_and_nothing_is_lost(
    fixture: str, moment: str, root: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    model = request.getfixturevalue(fixture)
    child = run_child(["-c", ENDING, model, str(root), str(tmp_path / "other"), moment])
    assert child.returncode == 0, child.stderr[-3000:]
    llm = load(model)
    cache = HybridCheckpointCache(llm.ctx, llm=llm, path=root)
    cache.flush()
    best = cache.find_best_checkpoint(TOKENS)
    assert best is not None
    assert best.pos == AT
    cache.close()


MODEL_GONE = """
import faulthandler, gc, sys, llamas
from kvkeep.cache import HybridCheckpointCache
llm = llamas.load(sys.argv[1])
tokens = llamas.random_tokens(330)
cache = HybridCheckpointCache(llm.ctx, llm=llm, path=sys.argv[2])
llm.eval(tokens[:150])
assert cache.save_checkpoint(150, tokens)
point = cache.checkpoints[0]
assert cache.flush()
if sys.argv[3] == "closed":
    llm.close()
else:
    del llm
    gc.collect()
for _ in range(3):
    assert cache.save_checkpoint(150, tokens) is False
    cache.find_best_checkpoint(tokens)
    assert cache.restore_checkpoint(point) is False
cache.close()
print("answers", True)
"""


@pytest.mark.parametrize("end", ["closed", "gone"])
@pytest.mark.parametrize("fixture", ["hybrid", "recurrent"])
def test_with_its_model_closed_a_cache_says_no(fixture: str, end: str, root: Path, request: pytest.FixtureRequest) -> None:
    assert answers(MODEL_GONE, request.getfixturevalue(fixture), str(root), end) == ["True"]
