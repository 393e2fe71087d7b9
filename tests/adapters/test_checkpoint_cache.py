"""`HybridCheckpointCache` in host mode: a fork's interface, right logits or a refusal, and what comes back from the disk."""

import gc
import inspect
import json
import logging
import signal
import sqlite3
import struct
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import llama_cpp
import lmdb
import models
import numpy as np
import numpy.typing as npt
import pytest
from llama_cpp.llama_cache import BaseLlamaCache
from llamas import forget, load, logits, random_tokens
from restart import run_child

from kvkeep.cache import HybridCheckpointCache
from kvkeep.cache.adapters.checkpoint_cache import HybridCheckpoint
from kvkeep.store import hashing
from kvkeep.store.errors import UsageError

TOKENS = random_tokens(330)
OTHER = random_tokens(330, seed=5)
# A checkpoint is taken here; then comes what is decoded behind it.
AT, END = 150, 200


class Kind(NamedTuple):
    """A memory with a part that can't be cut.

    Attributes:
        fixture: makes the model.
        options: of the context.
        exact: whether llama.cpp itself is bit-equal after a restore; a window's cells come back in another order.
    """

    fixture: str
    options: dict[str, Any]
    exact: bool

    def __str__(self) -> str:
        return self.fixture + ("-masked" if self.options else "")


MASKED = {"swa_full": False}
KINDS = [
    Kind("hybrid", {}, exact=True),
    Kind("falcon_h1", {}, exact=True),
    Kind("recurrent", {}, exact=True),
    Kind("hybrid_window", {}, exact=False),
    Kind("hybrid_window", MASKED, exact=False),
    Kind("window", {}, exact=False),
    Kind("window", MASKED, exact=False),
    Kind("opaque", {}, exact=False),
]


@pytest.fixture(params=KINDS, ids=str)
def kind(request: pytest.FixtureRequest) -> Kind:
    return request.param


@pytest.fixture
def model(kind: Kind, request: pytest.FixtureRequest) -> str:
    return request.getfixturevalue(kind.fixture)


@pytest.fixture
def llm(kind: Kind, model: str) -> Any:
    return load(model, **kind.options)


Logits = npt.NDArray[np.float32]


def go_on(llm: Any, start: int, tokens: list[int]) -> Logits:
    """Logits behind `tokens` in a context that stands at `start`."""
    llm.n_tokens = start
    llm.eval(tokens[start:])
    return logits(llm)


def really_there(llm: Any, tokens: list[int], *stops: int) -> Logits:
    """Logits of a context that has decoded all of it, in batches that end at `stops`."""
    forget(llm)
    for stop in (*stops, len(tokens)):
        llm.eval(tokens[llm.n_tokens : stop])
    return logits(llm)


def assert_equal(kind: Kind, found: Logits, live: Logits) -> None:
    """Bit for bit, or within what llama.cpp itself differs for the same tokens in cells of another order."""
    bound = 0.0 if kind.exact else 0.001 * np.abs(live).max()
    assert np.abs(found - live).max() <= bound


def taken(llm: Any, cache: HybridCheckpointCache, *positions: int, tokens: list[int] = TOKENS) -> list[HybridCheckpoint]:
    """An empty context is filled, with a checkpoint at each of some positions. The new checkpoints."""
    forget(llm)
    for position in positions:
        llm.eval(tokens[llm.n_tokens : position])
        assert cache.save_checkpoint(position, tokens[:position])
    return cache.checkpoints[-len(positions) :]


def pos_max(llm: Any) -> int:
    return llama_cpp.llama_memory_seq_pos_max(llama_cpp.llama_get_memory(llm.ctx), 0)


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


# -- the interface ------------------------------------------------------------------------------------------------


class Untouchable:
    def __getattribute__(self, name: str) -> Any:
        raise AssertionError(f"{name} was touched")


def test_the_constructor_takes_a_forks_arguments_by_position(recurrent: str) -> None:
    parameters = list(inspect.signature(HybridCheckpointCache).parameters.values())
    assert [(p.name, p.default) for p in parameters[1:4]] == [
        ("max_checkpoints", 16),
        ("on_device", False),
        ("verbose", False),
    ]
    assert all(p.kind is p.KEYWORD_ONLY for p in parameters[4:])
    cache = HybridCheckpointCache(load(recurrent).ctx, 3, True, True)
    assert (cache.max_checkpoints, cache.on_device, cache.verbose, cache.checkpoints) == (3, True, True, [])


def test_without_a_context_it_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="ctx is None"):
        HybridCheckpointCache(None)


def test_wrong_arguments_of_its_own_are_named(recurrent: str, root: Path) -> None:
    llm = load(recurrent)
    with pytest.raises(UsageError, match="path needs llm"):
        HybridCheckpointCache(llm.ctx, path=root)
    with pytest.raises(UsageError, match="isn't the context of llm"):
        HybridCheckpointCache(load(recurrent).ctx, llm=llm, path=root)
    assert not root.exists()


@pytest.mark.parametrize("count", [0, -1])
def test_off_it_touches_nothing(count: int, root: Path) -> None:
    cache = HybridCheckpointCache(Untouchable(), count, llm=Untouchable(), path=root)
    assert cache.save_checkpoint(1, Untouchable()) is False  # type: ignore[arg-type]
    assert cache.find_best_checkpoint(Untouchable()) is None  # type: ignore[arg-type]
    assert cache.restore_checkpoint(HybridCheckpoint(1, b"", "", 0, 0)) is False
    assert (cache.cache_size, cache.checkpoints, cache.flush()) == (0, [], True)
    cache.close()
    assert not root.exists()


def test_it_is_a_base_llama_cache_and_true_while_it_is_empty(recurrent: str) -> None:
    cache = HybridCheckpointCache(load(recurrent).ctx)
    assert isinstance(cache, BaseLlamaCache)
    assert cache, "Llama asks `if self.cache`"
    assert cache.capacity_bytes > 0


def test_as_a_dictionary_it_names_what_to_use_instead(recurrent: str) -> None:
    cache = HybridCheckpointCache(load(recurrent).ctx)
    uses: list[Callable[[], Any]] = [
        lambda: cache[[1]],
        lambda: [1] in cache,
        lambda: cache.__setitem__([1], None),
        lambda: cache._find_longest_prefix_key((1,)),
    ]
    for use in uses:
        with pytest.raises(NotImplementedError, match=r"save_checkpoint.*find_best_checkpoint.*restore_checkpoint"):
            use()


def test_a_checkpoint_says_what_it_is(llm: Any) -> None:
    (point,) = taken(llm, HybridCheckpointCache(llm.ctx), AT)
    assert [field.name for field in fields(HybridCheckpoint)][:5] == ["pos", "data", "hash_val", "size", "seq_id"]
    assert (point.pos, point.size, point.seq_id) == (AT, len(point.data), 0)
    assert isinstance(point.data, bytes)
    assert isinstance(point.hash_val, str)
    flag = llama_cpp.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY
    assert point.size == llama_cpp.llama_state_seq_get_size_ext(llm.ctx, 0, flag)


def test_the_oldest_goes_first_and_the_size_is_that_of_the_rest(llm: Any) -> None:
    cache = HybridCheckpointCache(llm.ctx, 3)
    taken(llm, cache, 10, 20, 30, 40, 50)
    assert [point.pos for point in cache.checkpoints] == [30, 40, 50]
    assert cache.cache_size == sum(len(point.data) for point in cache.checkpoints) > 0
    assert cache.find_best_checkpoint(TOKENS[:25]) is None
    cache.clear()
    assert (cache.cache_size, cache.checkpoints, cache.find_best_checkpoint(TOKENS)) == (0, [], None)


def test_the_same_position_is_kept_once(llm: Any) -> None:
    cache = HybridCheckpointCache(llm.ctx)
    first, _ = taken(llm, cache, 10, 20)
    (again,) = taken(llm, cache, 10)
    # What stood above it is gone from a context that keeps keys and values.
    assert [point.pos for point in cache.checkpoints] in ([20, 10], [10])
    assert cache.find_best_checkpoint(TOKENS[:15]) is again is not first


def test_the_best_is_the_deepest_of_the_same_tokens(recurrent: str) -> None:
    llm = load(recurrent)
    cache = HybridCheckpointCache(llm.ctx)
    taken(llm, cache, 30, 60, 90)
    taken(llm, cache, 75, tokens=TOKENS[:70] + OTHER)

    def best(tokens: list[int], seq_id: int = 0) -> int:
        found = cache.find_best_checkpoint(tokens, seq_id)
        return 0 if found is None else found.pos

    assert [best(TOKENS[:length]) for length in (0, 29, 30, 59, 60, 89, 90, 300)] == [0, 0, 30, 30, 60, 60, 90, 90]
    assert best(TOKENS[:70] + OTHER) == 75
    assert best(TOKENS[:40] + OTHER) == 30
    assert best([5, *TOKENS[1:]]) == 0
    assert best(TOKENS, 1) == 0
    assert best(np.asarray(TOKENS, np.intc)) == 90  # type: ignore[arg-type]


@pytest.mark.parametrize("positions", [[200], list(range(50, 201, 10))], ids=["one", "sixteen"])
def test_finding_the_best_hashes_the_prompt_once(recurrent: str, monkeypatch: pytest.MonkeyPatch, positions: list[int]) -> None:
    hashed = [0]

    class Counting:
        def __init__(self, *data: Any, **options: Any) -> None:
            hashed[0] += sum(len(piece) for piece in data)
            self._inner = blake3(*data, **options)

        def update(self, data: Any) -> None:
            hashed[0] += len(data)
            self._inner.update(data)

        def digest(self) -> bytes:
            return self._inner.digest()

    llm = load(recurrent)
    cache = HybridCheckpointCache(llm.ctx)
    taken(llm, cache, *positions)
    blake3 = hashing.blake3
    monkeypatch.setattr(hashing, "blake3", Counting)
    assert cache.find_best_checkpoint(TOKENS) is cache.checkpoints[-1]
    assert hashed[0] == 200 * 4


def test_where_the_sequence_does_not_stand_no_checkpoint_is_taken(llm: Any, caplog: pytest.LogCaptureFixture) -> None:
    cache = HybridCheckpointCache(llm.ctx)
    assert not cache.save_checkpoint(0, [])
    llm.eval(TOKENS[:AT])
    assert not cache.save_checkpoint(AT - 1, TOKENS)
    assert not cache.save_checkpoint(AT + 1, TOKENS)
    assert not cache.save_checkpoint(AT, TOKENS[: AT - 1])
    assert not cache.save_checkpoint(AT, TOKENS, seq_id=1)
    assert cache.checkpoints == []
    assert cache.save_checkpoint(AT, TOKENS), "more tokens may follow"
    assert 0 < len(warnings_in(caplog)) <= 3


@pytest.mark.parametrize("call", ["llama_state_seq_get_size_ext", "llama_state_seq_get_data_ext"])
def test_what_llama_cpp_does_not_write_in_full_is_no_checkpoint(
    recurrent: str, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    llm = load(recurrent)
    llm.eval(TOKENS[:AT])
    cache = HybridCheckpointCache(llm.ctx)
    monkeypatch.setattr(llama_cpp, call, lambda *arguments: 0)
    assert cache.save_checkpoint(AT, TOKENS) is False
    assert cache.checkpoints == []


@pytest.mark.parametrize("fixture", ["dense", "mla", "two_caches"])
def test_a_memory_that_can_be_cut_needs_none_and_says_so_once(
    fixture: str, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> None:
    llm = load(request.getfixturevalue(fixture))
    cache = HybridCheckpointCache(llm.ctx)
    for end in range(10, 200, 10):
        llm.eval(TOKENS[end - 10 : end])
        assert cache.save_checkpoint(end, TOKENS) is False
    assert (cache.checkpoints, cache.cache_size) == ([], 0)
    (warning,) = warnings_in(caplog)
    assert "can be cut anywhere" in warning


def test_after_close_everything_answers_no(llm: Any) -> None:
    cache = HybridCheckpointCache(llm.ctx)
    (point,) = taken(llm, cache, AT)
    cache.close()
    cache.close()
    assert cache.save_checkpoint(AT, TOKENS) is False
    assert cache.find_best_checkpoint(TOKENS) is None
    assert cache.restore_checkpoint(point) is False
    assert (cache.checkpoints, cache.cache_size, cache.flush()) == ([], 0, True)
    assert pos_max(llm) == AT - 1, "the context was only borrowed"


# -- right logits -------------------------------------------------------------------------------------------------


def drive(llm: Any, cache: HybridCheckpointCache, prompt: list[int], every: int = 32) -> tuple[int, Logits]:
    """What a fork's `Llama` does with a prompt. Where it began to decode, and the logits behind the last token."""
    best = cache.find_best_checkpoint(prompt[:-1])
    if best is not None and cache.restore_checkpoint(best):
        llm.n_tokens = best.pos
    else:
        forget(llm)
    start = llm.n_tokens
    for at in range(start, len(prompt), every):
        llm.eval(prompt[at : at + every])
        cache.save_checkpoint(llm.n_tokens, prompt[: llm.n_tokens])
    return start, logits(llm)


def test_driven_as_a_fork_does_it_gives_the_logits_of_a_live_context(llm: Any, kind: Kind, model: str) -> None:
    control = load(model, **kind.options)
    cache = HybridCheckpointCache(llm.ctx)
    script = [
        (TOKENS[:100], 0),
        (TOKENS[:170], 100),
        (TOKENS[:170], 164),
        (TOKENS[:140] + OTHER[:60], 132),
        (OTHER[:90], 0),
        (OTHER[:120], 90),
    ]
    for prompt, start in script:
        found = drive(llm, cache, prompt)
        assert found[0] == start
        live = really_there(control, prompt)
        assert np.abs(found[1] - live).max() <= 0.001 * np.abs(live).max()


# Not "unseen" in memory: without a store nobody can know what was decoded and never told; the caller answers for it.
@pytest.mark.parametrize(("stored", "saved"), [(False, True), (True, False), (True, True)], ids=["told", "store", "store-told"])
def test_back_to_a_text_that_another_has_replaced(
    llm: Any, kind: Kind, model: str, root: Path, stored: bool, saved: bool
) -> None:
    """The checkpoint is still there, keys and values below it are not: right logits or a refusal, never wrong ones."""
    cache = HybridCheckpointCache(llm.ctx, **({"llm": llm, "path": root} if stored else {}))
    points = taken(llm, cache, 100, AT)
    cache.flush()
    assert cache.restore_checkpoint(points[0])
    other = TOKENS[:100] + OTHER[:80]
    go_on(llm, 100, other)
    if saved:
        assert cache.save_checkpoint(len(other), other)
    best = cache.find_best_checkpoint(TOKENS[:END])
    restored = best is not None and cache.restore_checkpoint(best)
    if stored:
        assert restored
        assert best is not None
        assert best.pos == AT
    if restored and best is not None:
        found = go_on(llm, best.pos, TOKENS[:END])
        assert_equal(kind, found, really_there(load(model, **kind.options), TOKENS[:END], 100, AT))
    cache.close()


@pytest.mark.parametrize("at", [1, 63, 64, 65, AT])
def test_five_restores_give_the_live_logits_five_times(llm: Any, kind: Kind, at: int) -> None:
    cache = HybridCheckpointCache(llm.ctx)
    live = really_there(llm, TOKENS[: at + 50], at)
    (point,) = taken(llm, cache, at)
    go_on(llm, at, TOKENS[:300])
    found = []
    for _ in range(5):
        assert cache.restore_checkpoint(point)
        assert pos_max(llm) == at - 1
        found.append(go_on(llm, at, TOKENS[: at + 50]))
    assert_equal(kind, found[0], live)
    assert all(np.array_equal(found[0], other) for other in found[1:])


# -- refused ------------------------------------------------------------------------------------------------------


def window_with_a_hole(point: HybridCheckpoint) -> bytes:
    """The cell in the middle of the window says that it is of another position."""
    data = bytearray(point.data)
    (n_cells,) = struct.unpack_from("<I", data, 12)
    at = 16 + n_cells // 2 * 12
    (position,) = struct.unpack_from("<i", data, at)
    struct.pack_into("<i", data, at, position - 1)
    return bytes(data)


BAD: dict[str, Callable[[HybridCheckpoint], HybridCheckpoint]] = {
    "empty": lambda point: replace(point, data=b""),
    "random": lambda point: replace(point, data=np.random.default_rng(1).bytes(point.size)),
    "zeros": lambda point: replace(point, data=bytes(point.size)),
    "no bytes": lambda point: replace(point, data=None),
    "head only": lambda point: replace(point, data=point.data[:8]),
    "half": lambda point: replace(point, data=point.data[: point.size // 2]),
    "a byte short": lambda point: replace(point, data=point.data[:-1]),
    "a byte more": lambda point: replace(point, data=point.data + b"\0"),
    "other magic": lambda point: replace(point, data=b"\0" + point.data[1:]),
    "one further": lambda point: replace(point, pos=point.pos + 1),
    "two before": lambda point: replace(point, pos=point.pos - 2),
    "at 0": lambda point: replace(point, pos=0),
    "negative": lambda point: replace(point, pos=-5),
    "far away": lambda point: replace(point, pos=1 << 40),
    "other sequence": lambda point: replace(point, seq_id=1),
}


@pytest.mark.parametrize("by_hand", [False, True], ids=["", "by hand"])
@pytest.mark.parametrize("bad", BAD)
def test_a_bad_checkpoint_is_refused_and_leaves_nothing_behind(llm: Any, bad: str, by_hand: bool) -> None:
    cold = really_there(llm, TOKENS[:40])
    cache = HybridCheckpointCache(llm.ctx)
    point = BAD[bad](taken(llm, cache, AT)[0])
    if by_hand:
        point = HybridCheckpoint(point.pos, point.data, point.hash_val, point.size, point.seq_id)
    llm.eval(TOKENS[AT:END])
    assert cache.restore_checkpoint(point) is False
    assert pos_max(llm) in (-1, END - 1), "untouched or empty, nothing in between"
    # `eval` at 0 empties the sequence as llama-cpp-python does it, not the memory as a whole.
    assert np.array_equal(go_on(llm, 0, TOKENS[:40]), cold)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if "window" in kind.fixture], ids=str)
def test_a_window_with_a_hole_is_refused(llm: Any) -> None:
    cache = HybridCheckpointCache(llm.ctx)
    (point,) = taken(llm, cache, AT)
    llm.eval(TOKENS[AT:END])
    assert cache.restore_checkpoint(replace(point, data=window_with_a_hole(point))) is False
    assert cache.restore_checkpoint(point)


def test_a_checkpoint_made_by_hand_of_sound_data_is_as_good(llm: Any, kind: Kind) -> None:
    live = really_there(llm, TOKENS[:END], AT)
    cache = HybridCheckpointCache(llm.ctx)
    (point,) = taken(llm, cache, AT)
    llm.eval(TOKENS[AT:])
    assert cache.restore_checkpoint(HybridCheckpoint(AT, point.data, "", 0, 0))
    assert_equal(kind, go_on(llm, AT, TOKENS[:END]), live)


def test_what_llama_cpp_takes_in_part_is_cleared(llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cold = really_there(llm, TOKENS[:40])
    cache = HybridCheckpointCache(llm.ctx)
    (point,) = taken(llm, cache, AT)
    llm.eval(TOKENS[AT:END])
    put = llama_cpp.llama_state_seq_set_data_ext
    monkeypatch.setattr(llama_cpp, "llama_state_seq_set_data_ext", lambda *arguments: put(*arguments) - 1)
    assert cache.restore_checkpoint(point) is False
    assert pos_max(llm) == -1
    assert np.array_equal(go_on(llm, 0, TOKENS[:40]), cold)


def other_weights(kind: Kind, folder: Path) -> str:
    recipe: models.Recipe = getattr(models, kind.fixture.upper())
    return models.build(folder / "other.gguf", replace(recipe, seed=1))


def test_another_models_checkpoint_is_refused(llm: Any, kind: Kind, tmp_path: Path) -> None:
    (point,) = taken(llm, HybridCheckpointCache(llm.ctx), AT)
    other = load(other_weights(kind, tmp_path), **kind.options)
    other.eval(TOKENS[:END])
    assert HybridCheckpointCache(other.ctx).restore_checkpoint(point) is False
    assert pos_max(other) == END - 1


def test_another_models_checkpoint_is_refused_after_that_model_is_gone(kind: Kind, model: str, tmp_path: Path) -> None:
    """A model loaded next often lies at the very same address."""
    path = other_weights(kind, tmp_path)
    for _ in range(3):
        llm = load(model, **kind.options)
        cache = HybridCheckpointCache(llm.ctx)
        (point,) = taken(llm, cache, AT)
        cache.close()
        llm.close()
        del llm, cache
        gc.collect()
        other = load(path, **kind.options)
        other.eval(TOKENS[:END])
        assert HybridCheckpointCache(other.ctx).restore_checkpoint(point) is False
        other.close()


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.fixture != "recurrent"], ids=str)
def test_keys_and_values_that_are_gone_are_missed(llm: Any) -> None:
    cache = HybridCheckpointCache(llm.ctx)
    (point,) = taken(llm, cache, AT)
    for left in (0, AT - 1):
        really_there(llm, TOKENS[:left]) if left else forget(llm)
        assert cache.restore_checkpoint(point) is False
        assert pos_max(llm) == left - 1


def test_a_recurrent_checkpoint_needs_nothing_below_it(recurrent: str) -> None:
    llm = load(recurrent)
    live = really_there(llm, TOKENS[:END], AT)
    cache = HybridCheckpointCache(llm.ctx)
    (point,) = taken(llm, cache, AT)
    for before in ([], OTHER[:20], OTHER[:220]):
        forget(llm)
        llm.eval(before)
        assert cache.restore_checkpoint(point)
        assert np.array_equal(go_on(llm, AT, TOKENS[:END]), live)


# -- with a store -------------------------------------------------------------------------------------------------

SAVING = """
import json, os, signal, sys, llamas
from kvkeep.cache import HybridCheckpointCache
model, options, root, tokens, positions, end = json.loads(sys.argv[1])
llm = llamas.load(model, **options)
cache = HybridCheckpointCache(llm.ctx, llm=llm, path=root)
for position in positions:
    llm.eval(tokens[llm.n_tokens : position])
    assert cache.save_checkpoint(position, tokens[:position])
if end == "killed":
    assert cache.flush()
    os.kill(os.getpid(), signal.SIGKILL)
if end == "cycle":
    cache.llm, llm.checkpoints = llm, cache
    del cache, llm
"""


def saved_elsewhere(model: str, kind: Kind, root: Path, positions: list[int], end: str = "") -> None:
    """Checkpoints taken in a process that ends without closing anything."""
    child = run_child(["-c", SAVING, json.dumps([model, kind.options, str(root), TOKENS, positions, end])])
    assert child.returncode == (-signal.SIGKILL if end == "killed" else 0), child.stderr[-2000:]


def stored_in(llm: Any, root: Path) -> HybridCheckpointCache:
    cache = HybridCheckpointCache(llm.ctx, llm=llm, path=root)
    cache.flush()
    return cache


@pytest.mark.parametrize("end", ["", "killed", "cycle"])
def test_a_new_process_goes_on_from_the_disk(llm: Any, kind: Kind, model: str, root: Path, end: str) -> None:
    """With an empty context, and with one that holds another text, shorter or longer."""
    prompt = TOKENS[:AT] + OTHER[:50]
    live = really_there(llm, prompt, 70, AT)
    saved_elsewhere(model, kind, root, [70, AT, 230], end)
    cache = stored_in(llm, root)
    assert cache.checkpoints == []
    for before in ([], OTHER[:60], OTHER[:220]):
        forget(llm)
        llm.eval(before)
        best = cache.find_best_checkpoint(prompt)
        assert best is not None
        assert (best.pos, best.seq_id, best.size) == (AT, 0, len(best.data))
        assert cache.restore_checkpoint(best)
        assert_equal(kind, go_on(llm, AT, prompt), live)
    lengths = [69, 70, 149, 229, 230, 320]
    if kind.fixture != "window":  # whose rows in the store cover more positions than those of checkpoints
        found = [cache.find_best_checkpoint(TOKENS[:length]) for length in lengths]
        assert [point.pos if point else 0 for point in found] == [0, 70, 70, AT, 230, 230]
    assert cache.find_best_checkpoint(OTHER) is None
    assert cache.find_best_checkpoint(TOKENS, seq_id=1) is None or kind.fixture == "window"
    cache.close()


def test_what_lies_beyond_the_context_is_not_found(kind: Kind, model: str, root: Path) -> None:
    saved_elsewhere(model, kind, root, [230, 300])
    small = load(model, n_ctx=256, **kind.options)
    cache = stored_in(small, root)
    best = cache.find_best_checkpoint(TOKENS[:320])
    assert best is not None
    assert best.pos <= 256
    if kind.fixture != "window":
        assert best.pos == 230
    assert cache.restore_checkpoint(best)
    assert cache.restore_checkpoint(replace(best, pos=300)) is False
    cache.close()


def test_a_cleared_context_gets_everything_back_from_the_store(llm: Any, kind: Kind, root: Path) -> None:
    """In the very process that has the checkpoint in memory, too."""
    live = really_there(llm, TOKENS[:END], AT)
    cache = stored_in(llm, root)
    taken(llm, cache, AT)
    assert cache.flush()
    forget(llm)
    best = cache.find_best_checkpoint(TOKENS[:END])
    assert best is not None
    assert best.pos == AT
    assert cache.restore_checkpoint(best)
    assert_equal(kind, go_on(llm, AT, TOKENS[:END]), live)
    cache.close()


def test_another_model_finds_nothing_in_the_same_folder(kind: Kind, model: str, root: Path, tmp_path: Path) -> None:
    saved_elsewhere(model, kind, root, [AT])
    llm = load(other_weights(kind, tmp_path), **kind.options)
    cache = stored_in(llm, root)
    assert cache.find_best_checkpoint(TOKENS) is None
    cache.close()


def flip_blobs(path: Path, names: set[bytes] | None = None) -> None:
    """One bit of every stored value, or of those with these names."""
    with lmdb.open(str(path / "blobs-1"), map_size=1 << 30) as env, env.begin(write=True) as txn:
        for key, value in list(txn.cursor()):
            if names is None or key in names:
                middle = len(value) // 2
                txn.put(key, value[:middle] + bytes([value[middle] ^ 4]) + value[middle + 1 :])


def test_damaged_data_is_a_miss_that_is_reported_and_removed(
    llm: Any, kind: Kind, model: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "damaged"
    saved_elsewhere(model, kind, path, [70, AT])
    flip_blobs(path)
    cache = stored_in(llm, path)
    assert cache.find_best_checkpoint(TOKENS) is None
    assert cache.flush()
    assert cache.reporter.snapshot().quarantined > 0
    assert cache.find_best_checkpoint(TOKENS) is None
    cache.flush()
    assert len([warning for warning in warnings_in(caplog) if "didn't verify" in warning]) == 1
    for _ in range(4):  # what stands on damaged blocks is met only when these are there again
        taken(llm, cache, 70, AT)
        cache.flush()
        cache.clear()
        found = [cache.find_best_checkpoint(TOKENS[:length]) for length in (70, AT)]
        cache.flush()
    assert [point.pos if point else 0 for point in found] == [70, AT], "written anew"
    cache.close()


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.fixture != "window"], ids=str)
def test_one_damaged_checkpoint_leaves_the_one_below(llm: Any, kind: Kind, model: str, root: Path) -> None:
    saved_elsewhere(model, kind, root, [70, AT])
    with sqlite3.connect(root / "index.sqlite3") as connection:
        names = {bytes(row[0]) for row in connection.execute("SELECT blob FROM checkpoint WHERE pos = ?", (AT,))}
    connection.close()
    flip_blobs(root, names)
    cache = stored_in(llm, root)
    best = cache.find_best_checkpoint(TOKENS)
    assert best is not None
    assert best.pos == 70
    assert cache.restore_checkpoint(best)
    assert cache.flush()
    assert cache.reporter.snapshot().quarantined == 1
    cache.close()


@pytest.mark.parametrize("end", ["close", "clear", "gone"])
def test_what_waits_for_the_disk_is_never_lost(
    llm: Any, kind: Kind, model: str, root: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    cache = stored_in(llm, root)
    assert cache._backing is not None
    monkeypatch.setattr(cache._backing._writer, "_is_ready", lambda at_end: False)  # nothing is stored yet
    taken(llm, cache, 70)
    if end == "clear":
        cache.clear()
    llm.eval(TOKENS[70:AT])
    assert cache.save_checkpoint(AT, TOKENS)
    monkeypatch.undo()
    if end == "gone":
        del cache
        gc.collect()
    else:
        cache.close()
        cache.close()
    again = load(model, **kind.options)
    cache = stored_in(again, root)
    found = [cache.find_best_checkpoint(tokens) for tokens in (TOKENS[:70] + OTHER, TOKENS[:AT] + OTHER)]
    assert [point.pos if point else 0 for point in found] == [70, AT]
    cache.close()
