"""What may come in is looked at whole, and what comes in is found again by a new process."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from foreign import saved_by_llama_cpp, saved_slot, stock_folder
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from llamas import first_logits, load, n_decoded, random_tokens
from restart import in_new_process
from synthetic import dense_layout, identity, state_of

from kvkeep.cache import attach
from kvkeep.cache.adapters.named_model import NamedModel
from kvkeep.cache.foreign import stock_folder as stock_reader
from kvkeep.cache.foreign.item import Found, Item, check_size
from kvkeep.cache.foreign.llama_files import found_at
from kvkeep.cache.foreign.taking import Taker, fitted
from kvkeep.cache.state import Form
from kvkeep.store import pins
from kvkeep.store.errors import KvkeepError, LayoutError, TooLarge, UnknownLayout
from kvkeep.store.registry import close_root, open_root
from kvkeep.store.repository import Repository

KINDS = ["dense", "window", "hybrid", "recurrent"]
FILES = ["sequence", "session"]
TOKENS = random_tokens(150)
MORE = random_tokens(20, seed=5)


@contextmanager
def taker(model: str, root: Path, **options: Any) -> Iterator[Taker]:
    """Takes states of a model into a root."""
    repository = open_root(root)
    llm = load(model, **options)
    try:
        yield Taker(NamedModel(llm, repository), repository)
    finally:
        llm.close()
        close_root(repository)


def take(model: str, root: Path, *found: Found) -> list[int]:
    """Import states. Returns how many bytes each one has written."""
    with taker(model, root) as into:
        return [into.store(into.read(one)).written_bytes for one in found]


def compare_with_cold(model: str, root: Path, prompt: list[int], reused: int) -> None:
    """A new process decodes only what is new, and its logits are those of one without a cache."""
    (warm,) = in_new_process(model, root, [prompt])
    assert (warm["length"], warm["decoded"], warm["source"]) == (reused, len(prompt) - reused, "disk")
    assert_close(warm["logits"], model, prompt)


def compare_here(model: str, root: Path, prompt: list[int], reused: int) -> None:
    """The same without a process of its own, which takes most of the time."""
    llm = load(model)
    with attach(llm, root, break_even=False) as keep:
        warm = first_logits(llm, prompt)
        assert keep.last is not None
        assert (keep.last.length, keep.last.source.value) == (reused, "disk")
        assert n_decoded(llm) == len(prompt) - reused
    llm.close()
    assert_close(warm, model, prompt)


def assert_close(logits: object, model: str, prompt: list[int]) -> None:
    """As far as llama.cpp itself lies apart between a batch and token by token, which is how answers were decoded."""
    llm = load(model)
    cold = first_logits(llm, prompt)
    llm.close()
    np.testing.assert_allclose(np.asarray(logits), cold, atol=0.001 * np.abs(cold).max())


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_of_the_stock_cache_is_hit_after_a_restart(
    kind: str, root: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    model = request.getfixturevalue(kind)
    folder = stock_folder(tmp_path / "stock", model, [["hello there, " * 5, "what next?"], ["another one " * 4]])
    found = sorted(stock_reader.found_in(folder), key=lambda one: -one.n_bytes)
    items = [one.read(1 << 30) for one in found]
    written = take(model, root, *found)
    assert len(items) == 3
    # Of the first turn only what can't be cut out of the second one.
    assert [bool(n_bytes) for n_bytes in written] == [True, kind in ("hybrid", "recurrent"), True]
    for item in items if kind == "hybrid" else items[1:]:
        compare_with_cold(model, root, [*item.tokens.tolist(), *MORE], len(item.tokens))


@pytest.mark.parametrize("what", FILES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_file_of_llama_cpp_is_hit_after_a_restart(
    kind: str, what: str, root: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    model = request.getfixturevalue(kind)
    take(model, root, found_at(saved_by_llama_cpp(tmp_path / "file", what, model, TOKENS)))
    compare_with_cold(model, root, TOKENS + MORE, len(TOKENS))


@pytest.mark.parametrize("unified", [True, False], ids=["unified", "a stream each"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_slot_of_a_server_with_several(
    kind: str, unified: bool, root: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    model = request.getfixturevalue(kind)
    take(model, root, found_at(saved_slot(tmp_path / "slot", model, TOKENS, unified=unified)))
    compare_here(model, root, TOKENS + MORE, len(TOKENS))


def test_a_slot_with_cells_of_another_one(dense: str, root: Path, tmp_path: Path) -> None:
    path = saved_slot(tmp_path / "slot", dense, TOKENS, unified=False)
    # Tokens, number of streams, that of the empty first one, and of the second one; then its third cell.
    at = 12 + 4 * (len(TOKENS) + 4) + 12 + 2 * 12
    for position in (1, 1 << 30):
        patched(path, at, position)
        with taker(dense, root) as into, pytest.raises(UnknownLayout, match="each once"):
            into.read(found_at(path))


def test_a_sequence_of_a_memory_that_nobody_parses(opaque: str, root: Path, tmp_path: Path) -> None:
    take(opaque, root, found_at(saved_by_llama_cpp(tmp_path / "file", "sequence", opaque, TOKENS)))
    compare_here(opaque, root, TOKENS + MORE, len(TOKENS))
    with taker(opaque, root) as into, pytest.raises(UnknownLayout, match="only as saved sequences"):
        into.read(found_at(saved_by_llama_cpp(tmp_path / "session", "session", opaque, TOKENS)))


def test_a_dense_state_is_hit_anywhere(dense: str, root: Path, tmp_path: Path) -> None:
    take(dense, root, found_at(saved_by_llama_cpp(tmp_path / "file", "sequence", dense, TOKENS)))
    compare_here(dense, root, TOKENS[:77] + MORE, 77)


def test_what_a_longer_one_holds_is_not_written_again(dense: str, root: Path, tmp_path: Path) -> None:
    long = found_at(saved_by_llama_cpp(tmp_path / "long", "sequence", dense, TOKENS))
    short = found_at(saved_by_llama_cpp(tmp_path / "short", "session", dense, TOKENS[:100]))
    with taker(dense, root) as into:
        first = into.read(long)
        assert (first.stored, first.is_new) == (0, True)
        into.store(first)
        for again in (long, short):
            checked = into.read(again)
            assert not checked.is_new
            assert into.store(checked).written_bytes == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_last_token_that_was_never_decoded(kind: str, root: Path, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """As llama-cli saves a prompt."""
    model = request.getfixturevalue(kind)
    take(model, root, found_at(saved_by_llama_cpp(tmp_path / "file", "session", model, TOKENS, spare=[99])))
    compare_here(model, root, TOKENS + MORE, len(TOKENS))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("what", "spare"), [("sequence", [99]), ("session", [99, 100]), ("sequence", []), ("session", [])])
def test_other_numbers_of_tokens_are_refused(
    kind: str, what: str, spare: list[int], root: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    model = request.getfixturevalue(kind)
    path = saved_by_llama_cpp(tmp_path / "file", what, model, TOKENS, spare)
    if not spare:
        # One token fewer than there are.
        data = path.read_bytes()
        path.write_bytes(data[:8] + (len(TOKENS) - 1).to_bytes(4, "little") + data[12 : 12 + 4 * 149] + data[12 + 4 * 150 :])
    with taker(model, root) as into, pytest.raises(UnknownLayout, match=r"names 1(49|51|52) tokens and holds a state of 150"):
        into.read(found_at(path))
    assert_empty(root)


def assert_empty(root: Path) -> None:
    from kvkeep.store import rows

    repository = open_root(root)
    with repository.rows() as connection:
        assert list(rows.every(connection)) == []
    close_root(repository)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("what", FILES)
def test_other_models_and_settings(kind: str, what: str, root: Path, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Whatever can be seen: kinds of memory, layers, sizes, types, and the order of values."""
    model = request.getfixturevalue(kind)
    files = [saved_by_llama_cpp(tmp_path / "f16", what, model, TOKENS)]
    others: list[tuple[str, dict[str, Any]]] = [(request.getfixturevalue(other), {}) for other in KINDS if other != kind]
    if kind != "recurrent":
        others += [(model, {"flash_attn": True}), (model, {"type_k": 8})]
    for other, options in others:
        with taker(other, root, **options) as into, pytest.raises(LayoutError):
            into.read(found_at(files[0]))
    assert_empty(root)


def test_a_longer_state_than_the_context_is_compared_all_the_same(dense: str, root: Path, tmp_path: Path) -> None:
    path = saved_by_llama_cpp(tmp_path / "file", "sequence", dense, TOKENS)
    with taker(dense, root, n_ctx=64) as into:
        assert into.store(into.read(found_at(path))).tokens == len(TOKENS)
    with taker(dense, root, n_ctx=64, flash_attn=True) as into, pytest.raises(LayoutError):
        into.read(found_at(path))
    compare_here(dense, root, TOKENS + MORE, len(TOKENS))


@pytest.mark.parametrize("what", FILES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_truncation_is_refused(kind: str, what: str, root: Path, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    model = request.getfixturevalue(kind)
    path = saved_by_llama_cpp(tmp_path / "file", what, model, TOKENS[:2])
    data = path.read_bytes()
    lengths = range(len(data)) if kind == "dense" else [*range(200), *range(200, len(data), 499), len(data) - 1]
    with taker(model, root) as into:
        found = found_at(path)
        assert into.read(found).is_new
        for length in reversed(lengths):
            os.truncate(path, length)
            with pytest.raises(LayoutError):
                into.read(found)
        path.write_bytes(data + b"\0")
        with pytest.raises(LayoutError):
            into.read(found)
    assert_empty(root)


def patched(path: Path, at: int, value: int) -> Path:
    """Overwrite 32 bits of a file."""
    data = bytearray(path.read_bytes())
    data[at : at + 4] = value.to_bytes(4, "little", signed=value < 0)
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("position", [0, 1, 5, -1, 1 << 30])
def test_positions_that_can_not_be(position: int, dense: str, root: Path, tmp_path: Path) -> None:
    """Twice there, missing, negative, far beyond: a trial doesn't say so where the context is too small."""
    path = saved_by_llama_cpp(tmp_path / "file", "sequence", dense, TOKENS)
    # Head, tokens, number of streams, number of cells; then the third cell.
    at = 12 + 4 * len(TOKENS) + 8 + 2 * 12
    patched(path, at, position)
    with taker(dense, root, n_ctx=64) as into, pytest.raises(UnknownLayout):
        into.read(found_at(path))


def test_a_token_beyond_the_vocabulary(dense: str, root: Path, tmp_path: Path) -> None:
    path = saved_by_llama_cpp(tmp_path / "file", "sequence", dense, TOKENS)
    patched(path, 12, 512)
    with taker(dense, root) as into, pytest.raises(UnknownLayout, match="vocabulary"):
        into.read(found_at(path))


class Anybody:
    """A model that doesn't exist, and takes everything."""

    identity = identity()

    def check(self, tokens: object, data: object, form: object) -> None:
        pass


LARGE = dense_layout(2, 512)
"""4 KiB a token."""


def made(n_tokens: int) -> Found:
    tokens = random_tokens(n_tokens)
    item = Item(np.asarray(tokens, np.int32), state_of(LARGE, tokens), Form.SEQUENCE)

    def read(at_most: int) -> Item:
        check_size(item.data.size, at_most)
        return item

    return Found("made", item.data.size, read)


@pytest.fixture
def small(root: Path) -> Iterator[Repository]:
    """A store of 16 MiB."""
    repository = open_root(root, 16 << 20)
    yield repository
    close_root(repository)


def test_an_item_beyond_the_budget_is_refused_before_anything_is_written(small: Repository, root: Path) -> None:
    into = Taker(Anybody(), small)
    assert into.read(made(1500)).is_new
    for n_tokens in (2400, 4000):
        with pytest.raises(TooLarge, match="the budget leaves"):
            into.read(made(n_tokens))
    assert_empty(root)


def test_one_that_is_stored_needs_no_room(small: Repository) -> None:
    into = Taker(Anybody(), small)
    into.store(into.read(made(1500)))
    # What is added is all that needs room.
    checked = into.read(made(1600))
    assert (checked.stored, checked.is_new) == (1500, True)
    assert checked.needed_bytes < 1 << 20
    assert not into.read(made(1500)).is_new


def test_no_more_is_pinned_than_may_be(small: Repository, root: Path) -> None:
    assert Taker(Anybody(), small).read(made(1600)).is_new
    into = Taker(Anybody(), small, pin=True)
    with pytest.raises(TooLarge, match="would be pinned"):
        into.read(made(1600))
    assert_empty(root)
    into.store(into.read(made(600)))
    with small.rows() as connection:
        (found,) = pins.every(connection)
    assert found.n_tokens == 600


@pytest.fixture(scope="module")
def saved(dense: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_by_llama_cpp(tmp_path_factory.mktemp("saved") / "file", "session", dense, TOKENS[:70])


def test_a_changed_file_is_the_same_state_or_refused(saved: Path, dense: str, root: Path, tmp_path: Path) -> None:
    """No such file has a checksum: keys, values and token ids may be anything, but nothing else."""
    original = found_at(saved).read(1 << 30)
    path = tmp_path / "changed"
    with taker(dense, root) as into:
        memory = into._judge.identity.memory

        @settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
        @given(changes=st.lists(st.tuples(st.integers(0, 1200), st.integers(0, 255)), min_size=1, max_size=4))
        def change(changes: list[tuple[int, int]]) -> None:
            data = bytearray(saved.read_bytes())
            for at, value in changes:
                data[at] = value
            path.write_bytes(data)
            with suppress(KvkeepError):
                checked = into.read(found_at(path))
                assert isinstance(checked.item, Item)
                assert checked.item.tokens.size == original.tokens.size
                assert fitted(checked.item, memory).data.size == original.data.size

        change()
    assert_empty(root)
