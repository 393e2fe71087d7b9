"""States that are broken, and restores that fail: the cold answer, a clean context, and nothing broken is found again."""

import json
import os
import sqlite3
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import lmdb
import numpy as np
import numpy.typing as npt
import pytest
from blake3 import blake3
from click.testing import CliRunner
from llamas import first_logits, generate, load, random_tokens
from restart import SUPPORT, run_child

from kvkeep.cache import HybridCheckpointCache, LlamaDiskCache, attach
from kvkeep.store.errors import DiskFull
from kvkeep.store.hashing import PrefixHash
from kvkeep.tools.main import main

PROMPT = random_tokens(200)
OTHER = random_tokens(120, seed=7)
Bytes = npt.NDArray[np.uint8]


def fill(path: Path, model: str, *prompts: list[int]) -> Path:
    """A store that holds these prompts and that nobody has open."""
    llm = load(model)
    with attach(llm, path, break_even=False, capacity_bytes=16 << 20):
        for prompt in prompts or (PROMPT,):
            first_logits(llm, prompt)
    return path


def assert_cold(llm: Any, model: str, *prompts: list[int]) -> None:
    """Each prompt, one after the other, gives the logits of a fresh context."""
    for prompt in prompts:
        np.testing.assert_allclose(first_logits(llm, prompt), first_logits(load(model), prompt), atol=2e-3)


def assert_warm(model: str, path: Path, *prompts: list[int]) -> None:
    """A new model there decodes one token of each, and has the logits of a fresh context."""
    llm = load(model)
    with attach(llm, path, break_even=False) as keep:
        for prompt in prompts:
            assert_cold(llm, model, prompt)
            assert keep.last is not None
            assert keep.last.decoded == 1, keep.last


def verified(path: Path, *options: str) -> tuple[int, str]:
    """Exit code and words of `kvkeep verify`."""
    result = CliRunner().invoke(main, ["verify", "--path", str(path), *options], prog_name="kvkeep")
    return result.exit_code, result.output


# -- a restore that llama.cpp refuses ------------------------------------------------------------------------------------


def cut_off(share: float) -> Callable[[Bytes], Bytes]:
    return lambda state: state[: int(state.size * share)]


def flipped(at: int) -> Callable[[Bytes], Bytes]:
    def change(state: Bytes) -> Bytes:
        changed = state.copy()
        changed[at] ^= 1
        return changed

    return change


# A sequence state begins with a magic number, its sequence, the number of streams and the number of cells.
REFUSALS: dict[str, Callable[[Bytes], Bytes]] = {
    "a tenth": cut_off(0.1),
    "a half": cut_off(0.5),
    "99 %": cut_off(0.99),
    "nothing": cut_off(0.0),
    "magic number": flipped(0),
    "number of streams": flipped(8),
    "number of cells": flipped(12),
}


@pytest.mark.parametrize(
    ("kind", "refusal"),
    [("dense", refusal) for refusal in REFUSALS]
    + [(kind, refusal) for kind in ("window", "hybrid", "recurrent") for refusal in ("nothing", "a half", "number of cells")],
)
def test_a8_a_refused_state_leaves_a_clean_context(
    kind: str, refusal: str, root: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """A broken snapshot was refused, and what llama.cpp had taken of it until then stayed: every later answer was empty until a
    restart (llama.cpp #27068; the stock cache prints `-10000000000`)."""
    from kvkeep.cache.adapters.context import Context

    model = request.getfixturevalue(kind)
    fill(root, model)
    put = Context.put
    given = []

    def broken(self: Context, state: Bytes, *args: Any) -> None:
        given.append(state.size)
        put(self, REFUSALS[refusal](state), *args)

    llm = load(model)
    with attach(llm, root, break_even=False) as keep:
        with monkeypatch.context() as patch:
            patch.setattr(Context, "put", broken)
            assert_cold(llm, model, PROMPT)
            assert len(given) == 1
            assert keep.stats().reasons["refused"] == 1
        keep.flush()
        assert_cold(llm, model, OTHER, PROMPT, PROMPT[:150], OTHER)
        assert keep.stats().reasons["refused"] == 1
        assert keep.stats().quarantined > 0, "it is gone, and not tried again and again"
    # What was saved in its place is good.
    assert_warm(model, root, PROMPT)


def fields_of_rows(state: Bytes, n_cells: int) -> dict[str, int]:
    """Where the sequence state of a dense model says how many layers it has, and how long the first one's rows are."""
    behind_cells = 4 + 4 + 4 + 4 + n_cells * 12
    return {"transposed": behind_cells, "n_layer": behind_cells + 4, "type": behind_cells + 8, "row size": behind_cells + 12}


@pytest.mark.parametrize("field", ["transposed", "n_layer", "type", "row size"])
def test_a8_a_wrong_field_in_a_state_leaves_a_clean_context(
    field: str, dense: str, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same with a size per layer, and with the number of layers, of another model (llama.cpp #27068)."""
    from kvkeep.cache.adapters.context import Context

    fill(root, dense)
    put = Context.put

    def broken(self: Context, state: Bytes, *args: Any) -> None:
        put(self, flipped(fields_of_rows(state, len(PROMPT) - 1)[field])(state), *args)

    llm = load(dense)
    with attach(llm, root, break_even=False) as keep:
        with monkeypatch.context() as patch:
            patch.setattr(Context, "put", broken)
            assert_cold(llm, dense, PROMPT)
            assert keep.stats().reasons["refused"] == 1
        assert_cold(llm, dense, OTHER, PROMPT)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.99])
def test_a8_by_hand_too(share: float, hybrid: str) -> None:
    """A checkpoint that somebody takes and puts back by himself, and that is broken (llama.cpp #27068)."""
    llm = load(hybrid)
    cache = HybridCheckpointCache(llm.ctx, llm=llm)
    llm.eval(PROMPT)
    assert cache.save_checkpoint(len(PROMPT), PROMPT)
    llm.eval(OTHER)
    point = cache.find_best_checkpoint(PROMPT)
    assert point is not None
    assert not cache.restore_checkpoint(replace(point, data=point.data[: int(len(point.data) * share)]))
    llm.reset()
    assert_cold(llm, hybrid, OTHER, PROMPT)
    cache.close()


# -- a store that is broken ----------------------------------------------------------------------------------------------


def values_changed(path: Path, change: Callable[[bytes], bytes]) -> None:
    """Rewrite every stored value as a whole: what LMDB itself says about them stays right."""
    (folder,) = path.glob("blobs-*")
    with lmdb.open(str(folder), map_size=1 << 30) as env, env.begin(write=True) as transaction:
        for key, value in list(transaction.cursor()):
            transaction.put(key, change(value))


def file_cut(name: str, share: float) -> Callable[[Path], None]:
    def cut(path: Path) -> None:
        (file,) = path.glob(name)
        # data.mdb is sparse, and only its first part holds anything.
        used = file.stat().st_size if name != "blobs-*/data.mdb" else min(file.stat().st_size, file.stat().st_blocks * 512)
        os.truncate(file, int(used * share))

    return cut


CUTS: dict[str, Callable[[Path], None]] = {
    "values, empty": lambda path: values_changed(path, lambda value: b""),
    "values, half": lambda path: values_changed(path, lambda value: value[: len(value) // 2]),
    "blobs, a tenth": file_cut("blobs-*/data.mdb", 0.1),
    "blobs, half": file_cut("blobs-*/data.mdb", 0.5),
    "blobs, 99 %": file_cut("blobs-*/data.mdb", 0.99),
    "index, empty": file_cut("index.sqlite3", 0.0),
    "index, half": file_cut("index.sqlite3", 0.5),
}


@pytest.mark.parametrize("cut", CUTS)
def test_d3_a_truncated_store(cut: str, dense: str, tmp_path: Path) -> None:
    """A file that was cut short raised `UnpicklingError` into the first request (the stock disk cache)."""
    path = fill(tmp_path / "cut", dense)
    CUTS[cut](path)
    llm = load(dense)
    with attach(llm, path, break_even=False):
        assert_cold(llm, dense, PROMPT, OTHER)
    assert_warm(dense, path, PROMPT)
    assert verified(path)[0] == 0


def test_d3_with_the_stock_name(dense: str, tmp_path: Path) -> None:
    """The same behind `set_cache(LlamaDiskCache(...))`: the first request and the second one are answered (the stock class lost
    the first one)."""
    path = fill(tmp_path / "cut", dense)
    values_changed(path, lambda value: value[: len(value) // 2])
    llm, control = load(dense), load(dense)
    cache = LlamaDiskCache(path)
    llm.set_cache(cache)
    for _ in range(2):
        found = llm.create_completion(PROMPT, max_tokens=6, temperature=0.0)["choices"]
        assert found == control.create_completion(PROMPT, max_tokens=6, temperature=0.0)["choices"]
    cache.close()
    assert verified(path)[0] == 0


@pytest.mark.parametrize("seed", range(5))
def test_d4_rotten_bytes_are_always_seen(seed: int, dense: str, tmp_path: Path) -> None:
    """60 kB of flipped bytes in one layer were accepted in three of five places, because states have no checksum (the stock
    cache; mimo-halo #65, ds4 PR #146, ollama PR #17953)."""
    rng = Random(seed)
    path = fill(tmp_path / "rotten", dense)
    # From many bytes in one place to a single bit.
    length = (60_000, 4096, 64, 1, 1)[seed]

    def rot(value: bytes) -> bytes:
        changed = bytearray(value)
        at = rng.randrange(max(1, len(changed) - length))
        for i in range(at, min(len(changed), at + length)):
            changed[i] ^= 1 << rng.randrange(8)
        return bytes(changed)

    values_changed(path, rot)
    code, words = verified(path)
    assert code == 30, words
    llm = load(dense)
    with attach(llm, path, break_even=False) as keep:
        found = first_logits(llm, PROMPT)
        assert keep.last is not None
        assert (keep.last.length, keep.last.reason.value) == (0, "damaged")
    np.testing.assert_array_equal(found, first_logits(load(dense), PROMPT))
    assert verified(path)[0] == 0


@pytest.mark.parametrize(
    ("kind", "seed"), [("dense", 0), ("dense", 1), ("dense", 2), ("dense", 3), ("window", 0), ("hybrid", 0)]
)
def test_d4_rot_anywhere_in_the_files(kind: str, seed: int, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """The same wherever it hits: values, LMDB's own pages, or the index (ds4 PR #146)."""
    model = request.getfixturevalue(kind)
    path = fill(tmp_path / "rotten", model)
    rng = Random(seed)
    for file in (*path.glob("blobs-*/data.mdb"), path / "index.sqlite3"):
        with file.open("r+b") as stream:
            size = min(file.stat().st_size, file.stat().st_blocks * 512)
            for _ in range(rng.choice((1, 20))):
                at = rng.randrange(size)
                stream.seek(at)
                byte = stream.read(1)[0]
                stream.seek(at)
                stream.write(bytes([byte ^ 1 << rng.randrange(8)]))
    # Each damage is met when what it hit is looked for, and one may hide another.
    for _ in range(3):
        llm = load(model)
        with attach(llm, path, break_even=False):
            assert_cold(llm, model, PROMPT, OTHER)
    assert_warm(model, path, PROMPT, OTHER)
    # What nobody has looked for may still be damaged.
    verified(path, "--repair")
    assert verified(path)[0] == 0


# -- writes that fail ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [4096, 100_000, 1 << 18])
def test_a17_a_write_that_failed_is_no_hit_later(limit: int, dense: str, root: Path) -> None:
    """Stores that failed with a warning were found all the same, and gave gibberish at temperature 0 (LMCache #4991)."""
    prompts = [PROMPT, OTHER, random_tokens(300, seed=4)]
    task = {"model": dense, "root": str(root), "prompts": prompts, "file_bytes": limit}
    child = run_child([str(SUPPORT / "limited.py"), json.dumps(task)])
    assert child.returncode == 0, child.stderr[-4000:]
    answer = json.loads(child.stdout.splitlines()[-1])
    control = load(dense)
    assert answer["tokens"] == [generate(control, prompt, 4) for prompt in prompts]
    assert answer["errors"], "the limit was never met: the test tests nothing"
    if root.is_dir() and list(root.glob("index.sqlite3")):
        assert verified(root)[0] == 0
    llm = load(dense)
    with attach(llm, root, break_even=False):
        assert_cold(llm, dense, *prompts)


@pytest.mark.parametrize("after", range(2))
def test_a17_what_failed_is_not_counted_as_stored(
    after: int, each_kind: str, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A transfer that failed moved the counter of what was loaded on (dynamo #15079). The disk is full after some values."""
    from kvkeep.store.blobs import BlobStore

    written = [0]
    put = BlobStore.put

    def full(self: BlobStore, blobs: Any) -> None:
        blobs = list(blobs)
        written[0] += len(blobs)
        put(self, blobs[: max(0, after - written[0] + len(blobs))])
        if written[0] > after:
            raise DiskFull("no room")

    llm = load(each_kind)
    with attach(llm, root, break_even=False) as keep:
        with monkeypatch.context() as patch:
            patch.setattr(BlobStore, "put", full)
            first_logits(llm, PROMPT)
            keep.flush()
            assert written[0] > after, "the write that fails was never met"
            stats = keep.stats()
            assert (stats.saves, stats.written_bytes, stats.hits) == (0, 0, 0)
            assert stats.errors["DiskFull"] > 0
        first_logits(llm, OTHER)
        assert_cold(llm, each_kind, PROMPT)
    assert verified(root)[0] == 0


# -- hashes --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["dense", "window", "hybrid"])
def test_a18_colliding_hashes_are_no_hits(
    kind: str, root: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Blocks were found by a hash of their tokens, and the tokens were never compared (openvino.genai #3722). Here hashes have
    8 bits, so that most chats collide."""
    from kvkeep.cache import save
    from kvkeep.store import hashing, verify

    def short(parent: bytes, tokens: Any) -> PrefixHash:
        return PrefixHash(blake3(parent + bytes(tokens)).digest()[:1] + bytes(31))

    for module in (hashing, verify, save):
        monkeypatch.setattr(module, "extend", short)
    model = request.getfixturevalue(kind)
    llm, control = load(model), load(model)
    found = 0
    with attach(llm, root, break_even=False) as keep:
        for number in range(40):
            prompt = random_tokens(70 + number, seed=number % 30)
            np.testing.assert_allclose(first_logits(llm, prompt), first_logits(control, prompt), atol=2e-3)
            keep.flush()
            found += keep.last is not None and keep.last.source.value == "disk"
    assert found > 0


def rows_changed(path: Path, sql: str) -> None:
    with sqlite3.connect(path / "index.sqlite3") as connection:
        assert connection.execute(sql).rowcount > 0
    connection.close()


def test_a18_tokens_in_a_row_that_are_not_those_of_its_state(dense: str, tmp_path: Path) -> None:
    """The row says the tokens that are asked for, the state behind it was made of others (openvino.genai #3722)."""
    path = fill(tmp_path / "other", dense)
    asked = [5, *PROMPT[1:]]
    tokens = np.asarray(asked[:64], "<i4").tobytes().hex()
    rows_changed(path, f"UPDATE node SET path = x'{tokens}' WHERE start = 0 AND n_tokens = 64")
    llm = load(dense)
    with attach(llm, path, break_even=False):
        assert_cold(llm, dense, asked, PROMPT)
