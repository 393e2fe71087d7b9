"""Bundles: whatever was warm in one store is warm in the other, to the byte; and nothing else ever gets in."""

import io
import os
import stat
import struct
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import llamas
import numpy as np
import pytest
from entries import noise
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from restart import in_new_process
from synthetic import (
    ARCH,
    ATTENTION,
    HYBRID,
    RECURRENT,
    TWO_CACHES,
    Made,
    dense_layout,
    fingerprint_of,
    hybrid_window_model,
    identity,
    random_tokens,
    window_model,
)

from kvkeep.cache import budget, pinned
from kvkeep.cache.bundle import Bundle, Exported, export, is_bundle, stored_bytes
from kvkeep.cache.bundle import format as bundle_format
from kvkeep.cache.bundle import writing as bundle_writing
from kvkeep.cache.bundle.format import RECORD_BYTES, BundleFile, Head, Record, Seal
from kvkeep.cache.bundle.rows import as_row
from kvkeep.cache.memory import Memory, MemoryKind
from kvkeep.cache.prefix_cache import Identity, PrefixCache, token_bytes
from kvkeep.cache.state import Form
from kvkeep.store import nodes, pins, rows, steps
from kvkeep.store.check import check
from kvkeep.store.errors import (
    BadBundle,
    CapacityError,
    DiskFull,
    IntegrityError,
    KvkeepError,
    StoreError,
    TooLarge,
    TooNew,
    UsageError,
)
from kvkeep.store.frame import Kind
from kvkeep.store.hashing import Fingerprint
from kvkeep.store.registry import close_root, open_root
from kvkeep.store.repository import Repository
from kvkeep.store.space import MIN_CAPACITY
from kvkeep.store.steps import Step
from kvkeep.store.windows import NewWindow

B = 16
CHAT = random_tokens(94)
SYSTEM = CHAT[:70]
OPAQUE = identity("opaque", MemoryKind.UNKNOWN)
FULL_WINDOW = window_model(24, full=True)
KINDS = {
    "dense": ATTENTION,
    "transposed": Made(Memory(MemoryKind.ATTENTION, v_trans=True, ext=False), (dense_layout(v_trans=True),)),
    "with extensions": Made(Memory(MemoryKind.ATTENTION, v_trans=False, ext=True), (dense_layout(ext=True),)),
    "two caches": TWO_CACHES,
    "window": window_model(24),
    "full window": FULL_WINDOW,
    "hybrid": HYBRID,
    "hybrid window": hybrid_window_model(24),
    "recurrent": RECURRENT,
}


@pytest.fixture
def source(tmp_path: Path) -> Iterator[Repository]:
    """The store from which is exported."""
    opened = open_root(tmp_path / "source", 64 << 20)
    yield opened
    close_root(opened)


def form_of(made: Made) -> Form:
    return Form.WHOLE if made.memory.window is not None and made.memory.window.full else Form.SEQUENCE


def cache_in(repository: Repository, made: Made = ATTENTION, name: str = "model") -> PrefixCache:
    return PrefixCache(repository, made.identity(name), block_tokens=B)


def keep(repository: Repository, *chats: Sequence[int], made: Made = ATTENTION, name: str = "model") -> PrefixCache:
    """Save chats, those of models that need checkpoints with one at the end of the system prompt."""
    cache, form = cache_in(repository, made, name), form_of(made)
    for tokens in chats:
        needs = (made.tensor_bytes or made.memory.window) and form is Form.SEQUENCE and len(tokens) > len(SYSTEM)
        cache.save(tokens, made.state(tokens, form), form, points=[made.point(tokens[: len(SYSTEM)])] if needs else [])
    return cache


def check_restores(repository: Repository, made: Made, prompt: Sequence[int], length: int, name: str = "model") -> None:
    """That so much of a prompt comes back, and what it should be."""
    cache, form = cache_in(repository, made, name), form_of(made)
    restored = cache.restore(cache.match(prompt, form=form), prompt, form=form, arch=ARCH)
    assert restored.length == length, restored.detail
    if length:
        assert np.array_equal(restored.state, made.state(prompt[:length], form))


def export_to(cache: PrefixCache, file: Path, *prefixes: Sequence[int], **more: Any) -> Exported:
    space = cache.namespace
    assert space is not None
    return export(cache.repository, [(space, token_bytes(tokens)) for tokens in prefixes], file, **more)


def take(file: Path, repository: Repository, **more: Any) -> Any:
    with Bundle.open(file) as bundle:
        return bundle.take(repository, **more)


def empty(repository: Repository) -> None:
    with repository.writing() as writing:
        with writing.index.read() as connection:
            found = list(rows.every(connection))
        writing.remove(found)


def assert_sound(repository: Repository) -> None:
    assert [finding.message for finding in check(repository)] == []


def everything(repository: Repository) -> tuple[list[Any], set[bytes]]:
    """All rows without ids and times, and names of all blobs."""
    with repository.snapshot() as snapshot:
        found = [as_row(entry) for entry in rows.every(snapshot.connection)]
        return sorted(found, key=repr), set(snapshot.blobs.ids())


def failing_after(count: int) -> Callable[[int], None]:
    """Progress that is interrupted."""
    calls = iter(range(count))

    def progress(_n_bytes: int) -> None:
        if next(calls, None) is None:
            raise KeyboardInterrupt

    return progress


# -- there and back ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_warm_there_is_warm_here(source: Repository, repository: Repository, tmp_path: Path, kind: str) -> None:
    made, file = KINDS[kind], tmp_path / "bundle"
    done = export_to(keep(source, CHAT, made=made), file, CHAT)
    assert (done.file, done.reached, done.n_bytes) == (file, (len(CHAT),), file.stat().st_size)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    taken = take(file, repository)
    assert (taken.new, taken.present, taken.tokens) == (done.entries, 0, len(CHAT))
    assert everything(repository) == everything(source)
    check_restores(repository, made, [*CHAT, 7], len(CHAT))
    assert take(file, repository) == replace(taken, new=0, present=done.entries, written_bytes=0)
    assert everything(repository) == everything(source)


@pytest.mark.parametrize("kind", KINDS)
def test_no_token_behind_the_prefix_gets_out(source: Repository, repository: Repository, tmp_path: Path, kind: str) -> None:
    """A system prompt ends within a block that a chat has filled up with what a person said."""
    made, file = KINDS[kind], tmp_path / "bundle"
    private = CHAT[len(SYSTEM) : len(SYSTEM) + 4]
    done = export_to(keep(source, CHAT, made=made), file, SYSTEM)
    assert done.reached == (len(SYSTEM),)
    assert token_bytes(private) not in file.read_bytes()
    take(file, repository)
    check_restores(repository, made, [*SYSTEM, *random_tokens(9, seed=3)], len(SYSTEM))
    assert [one for one in everything(repository)[0] if token_bytes(private) in getattr(one, "path", b"")] == []


def test_whole_states(source: Repository, repository: Repository, tmp_path: Path) -> None:
    state = np.frombuffer(noise(5000), np.uint8)
    cache = PrefixCache(source, OPAQUE, block_tokens=B)
    cache.save(CHAT, state)
    done = export_to(cache, tmp_path / "bundle", CHAT)
    assert (done.entries, done.reached) == (1, (len(CHAT),))
    take(tmp_path / "bundle", repository)
    there = PrefixCache(repository, OPAQUE, block_tokens=B)
    assert np.array_equal(there.restore(there.match([*CHAT, 1]), [*CHAT, 1]).state, state)


def test_what_prefixes_share_is_in_it_once(source: Repository, repository: Repository, tmp_path: Path) -> None:
    other = [*CHAT[:70], *random_tokens(50, seed=5)]
    cache = keep(source, CHAT, other)
    done = export_to(cache, tmp_path / "bundle", CHAT, other, CHAT)
    # Four blocks in common, then a block and a tail, or three blocks and a tail.
    assert (done.entries, done.reached) == (4 + 2 + 4, (94, 120, 94))
    with Bundle.open(tmp_path / "bundle") as bundle:
        assert bundle.prefixes == (token_bytes(CHAT), token_bytes(other))
        bundle.take(repository)
    for chat in (CHAT, other):
        check_restores(repository, ATTENTION, chat, len(chat))


def test_what_a_bundle_says(source: Repository, tmp_path: Path) -> None:
    done = export_to(keep(source, CHAT), file := tmp_path / "bundle", CHAT)
    with Bundle.open(file) as bundle:
        assert (bundle.path, bundle.version, bundle.fingerprint) == (file, 1, fingerprint_of("model"))
        assert (bundle.label, bundle.ingredients, bundle.block_tokens) == ("model", {"name": "model"}, B)
        assert (bundle.n_entries, bundle.n_bytes) == (done.entries, file.stat().st_size)
        read: list[int] = []
        bundle.verify(read.append)
        assert sum(read) == bundle.n_bytes
    assert is_bundle(file)
    assert not is_bundle(tmp_path)
    assert not is_bundle(tmp_path / "nothing")
    assert not is_bundle(tmp_path / "source" / "index.sqlite3")


def test_a_pinned_import_survives_eviction(source: Repository, repository: Repository, tmp_path: Path) -> None:
    export_to(keep(source, CHAT), tmp_path / "bundle", CHAT)
    keep(repository, random_tokens(60, seed=4), name="other")
    assert take(tmp_path / "bundle", repository, pin=True).pinned == 1
    with repository.writing() as writing:
        assert len(budget.evict(writing, 1 << 40)) == 4
    check_restores(repository, ATTENTION, CHAT, len(CHAT))
    assert take(tmp_path / "bundle", repository, pin=True).pinned == 0


def test_after_an_import_only_the_question_is_decoded(dense: str, root: Path, tmp_path: Path) -> None:
    prompt, there = llamas.random_tokens(200), tmp_path / "there"
    in_new_process(dense, there, [prompt])
    repository = open_root(there)
    with repository.rows() as connection:
        [first] = [entry for entry in nodes.every(connection) if entry.start == 0]
        fingerprint = Fingerprint(first.parent)
    made_up = Identity(fingerprint, "", {}, ATTENTION.memory)
    export_to(PrefixCache(repository, made_up), tmp_path / "bundle", prompt)
    close_root(repository)
    repository = open_root(root)
    take(tmp_path / "bundle", repository)
    close_root(repository)
    question = llamas.random_tokens(11, seed=8)
    (warm,) = in_new_process(dense, root, [[*prompt, *question]])
    (cold,) = in_new_process(dense, None, [[*prompt, *question]])
    assert (warm["decoded"], warm["source"], cold["decoded"]) == (len(question), "disk", 211)
    np.testing.assert_allclose(warm["logits"], cold["logits"], atol=2e-3)


# -- a store that isn't empty ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_there_already_stays(source: Repository, repository: Repository, tmp_path: Path, kind: str) -> None:
    """Parts of the same chat, with tails that were cut otherwise, and a longer one."""
    made = KINDS[kind]
    done = export_to(keep(source, CHAT, made=made), tmp_path / "bundle", CHAT)
    for length in (1, 16, 40, 70, 75, 80, 94, 100):
        here = [*CHAT, *random_tokens(9, seed=6)][:length]
        keep(repository, here, made=made)
        before = everything(repository)[0]
        taken = take(tmp_path / "bundle", repository)
        assert taken.new + taken.present == done.entries
        after = everything(repository)[0]
        # Only a row with less of the window gives way to one of the same tokens with more.
        assert all(isinstance(row, NewWindow) for row in before if row not in after)
        check_restores(repository, made, CHAT, len(CHAT))
        check_restores(repository, made, here, length)
        assert take(tmp_path / "bundle", repository).new == 0
        if kind == "dense" and length >= len(CHAT):
            assert taken.new == 0
        assert_sound(repository)
        empty(repository)


def test_tails_that_came_in_pieces(source: Repository, repository: Repository, tmp_path: Path) -> None:
    keep(source, CHAT[:84], CHAT[:90])
    export_to(keep(source, CHAT), tmp_path / "bundle", CHAT)
    keep(repository, CHAT[:87])
    assert take(tmp_path / "bundle", repository).new == 3
    check_restores(repository, ATTENTION, CHAT, len(CHAT))


def test_damage_here_is_mended(source: Repository, repository: Repository, tmp_path: Path) -> None:
    export_to(keep(source, CHAT), tmp_path / "bundle", CHAT)
    keep(repository, CHAT)
    with repository.rows() as connection:
        [block] = [entry for entry in nodes.every(connection) if entry.start == 16]
    with repository.writing() as writing:
        writing.blobs.put([(block.blob, b"rotten")])
    taken = take(tmp_path / "bundle", repository)
    assert (taken.new, taken.present) == (1, 5)
    check_restores(repository, ATTENTION, CHAT, len(CHAT))


def test_blocks_of_another_length_are_refused(source: Repository, repository: Repository, tmp_path: Path) -> None:
    export_to(keep(source, CHAT), tmp_path / "bundle", CHAT)
    PrefixCache(repository, ATTENTION.identity(), block_tokens=8).save(CHAT, ATTENTION.state(CHAT))
    before = everything(repository)
    with pytest.raises(UsageError, match="blocks of 16 tokens, and model is stored here in blocks of 8;"):
        take(tmp_path / "bundle", repository)
    assert everything(repository) == before


# -- all or nothing ----------------------------------------------------------------------------------------------------


@pytest.fixture
def in_small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvkeep.cache.batches.BATCH_BYTES", 1)


@pytest.mark.usefixtures("in_small_batches")
@pytest.mark.parametrize("kind", ["dense", "hybrid window"])
def test_an_interrupted_import_leaves_nothing(source: Repository, repository: Repository, tmp_path: Path, kind: str) -> None:
    made = KINDS[kind]
    done = export_to(keep(source, CHAT, made=made), tmp_path / "bundle", CHAT)
    keep(repository, CHAT[:20], made=made)
    before = everything(repository)
    with Bundle.open(tmp_path / "bundle") as bundle:
        bundle.verify()
        for count in range(done.entries):
            with pytest.raises(KeyboardInterrupt):
                bundle.take(repository, pin=True, progress=failing_after(count))
            assert everything(repository) == before
            assert not any(pin for pin in pins_in(repository))


@pytest.mark.usefixtures("in_small_batches")
@pytest.mark.parametrize("step", [Step.SAVE_BLOBS, Step.SAVE_ROWS, Step.SAVE_DONE])
def test_an_import_that_is_interrupted_in_a_commit_leaves_nothing(
    source: Repository, repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: Step
) -> None:
    export_to(keep(source, CHAT), tmp_path / "bundle", CHAT)
    keep(repository, CHAT[:20])
    before = everything(repository)
    for count in range(1, 5):
        left = [count]

        def stop(reached: Step, left: list[int] = left) -> None:
            left[0] -= reached is step
            if left[0] == 0 and reached is step:
                raise KeyboardInterrupt

        monkeypatch.setattr(steps, "on_step", stop)
        with pytest.raises(KeyboardInterrupt):
            take(tmp_path / "bundle", repository)
        monkeypatch.setattr(steps, "on_step", None)
        assert everything(repository) == before


def pins_in(repository: Repository) -> list[Any]:
    with repository.rows() as connection:
        return pins.every(connection)


@pytest.mark.usefixtures("in_small_batches")
def test_a_disk_that_fills_up_half_way_leaves_nothing(
    source: Repository, repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export_to(keep(source, CHAT), tmp_path / "bundle", CHAT)
    keep(repository, CHAT[:20])
    before = everything(repository)
    put, calls = repository.blobs.put, []

    def full(blobs: Any) -> None:
        calls.append(1)
        if len(calls) == 3:
            raise DiskFull("no room")
        put(blobs)

    monkeypatch.setattr(repository.blobs, "put", full)
    with pytest.raises(DiskFull, match="no room"):
        take(tmp_path / "bundle", repository)
    assert len(calls) == 3
    assert everything(repository) == before


def test_a_bundle_that_cannot_fit_is_refused_before_anything_is_written(source: Repository, tmp_path: Path, root: Path) -> None:
    cache = PrefixCache(source, OPAQUE, block_tokens=B)
    prefixes = [random_tokens(40, seed=seed) for seed in range(3)]
    for number, tokens in enumerate(prefixes):
        cache.save(tokens, np.frombuffer(noise(4 << 20, number), np.uint8))
    export_to(cache, tmp_path / "one", prefixes[0])
    export_to(cache, tmp_path / "all", *prefixes)
    small = open_root(root, MIN_CAPACITY)
    keep(small, CHAT)
    before = everything(small)
    with pytest.raises(TooLarge, match="the bundle's 12595200 bytes don't fit"):
        take(tmp_path / "all", small)
    assert everything(small) == before
    # Two would fit if the pinned one went.
    take(tmp_path / "one", small, pin=True)
    export_to(cache, tmp_path / "two", *prefixes[1:])
    before = everything(small)
    for pin in (True, False):
        with pytest.raises(CapacityError):
            take(tmp_path / "two", small, pin=pin)
        assert everything(small) == before
    close_root(small)


def test_what_nobody_has_pinned_goes_for_it(source: Repository, tmp_path: Path, root: Path) -> None:
    cache = PrefixCache(source, OPAQUE, block_tokens=B)
    prefixes = [random_tokens(40, seed=seed) for seed in range(4)]
    for number, tokens in enumerate(prefixes):
        cache.save(tokens, np.frombuffer(noise(4 << 20, number), np.uint8))
    export_to(cache, tmp_path / "first", *prefixes[:2])
    export_to(cache, tmp_path / "second", *prefixes[2:])
    small = open_root(root, MIN_CAPACITY)
    take(tmp_path / "first", small)
    taken = take(tmp_path / "second", small)
    assert (taken.new, taken.evicted) == (2, 2)
    there = PrefixCache(small, OPAQUE, block_tokens=B)
    assert [there.match(tokens).length for tokens in prefixes[2:]] == [40, 40]
    close_root(small)


# -- exporting ---------------------------------------------------------------------------------------------------------


def test_an_interrupted_export_leaves_nothing(source: Repository, tmp_path: Path) -> None:
    cache = keep(source, CHAT)
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "bundle").write_text("the old one")
    for count in range(6):
        with pytest.raises(KeyboardInterrupt):
            export_to(cache, folder / "bundle", CHAT, progress=failing_after(count))
        assert [(file.name, file.read_text()) for file in folder.iterdir()] == [("bundle", "the old one")]
    read: list[int] = []
    export_to(cache, folder / "bundle", CHAT, progress=read.append)
    space = cache.namespace
    assert space is not None
    assert sum(read) == stored_bytes(source, [(space, token_bytes(CHAT))])
    assert [file.name for file in folder.iterdir()] == ["bundle"]


class Full(io.FileIO):
    """A file on a disk that has no room."""

    def write(self, _data: object) -> int:
        raise OSError(28, os.strerror(28))


def test_a_full_disk_leaves_nothing(source: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = keep(source, CHAT)
    folder = tmp_path / "folder"
    folder.mkdir()

    monkeypatch.setattr(bundle_writing.os, "fdopen", lambda descriptor, mode: io.BufferedWriter(Full(descriptor, mode)))
    with pytest.raises(DiskFull, match=r"writing .*bundle failed: No space left on device"):
        export_to(cache, folder / "bundle", CHAT)
    assert list(folder.iterdir()) == []


def test_damage_is_never_exported(source: Repository, tmp_path: Path) -> None:
    cache = keep(source, CHAT)
    with source.rows() as connection:
        last = max(nodes.every(connection), key=lambda node: node.start)
    with source.writing() as writing:
        writing.blobs.put([(last.blob, b"x" * last.stored_bytes)])
    for prefix in (CHAT, CHAT[:90]):
        with pytest.raises(IntegrityError):
            export_to(cache, tmp_path / "bundle", prefix)
    assert not (tmp_path / "bundle").exists()
    export_to(cache, tmp_path / "bundle", CHAT[:80])


def test_what_is_evicted_meanwhile(source: Repository, tmp_path: Path) -> None:
    cache = keep(source, CHAT)

    def evict(_n_bytes: int) -> None:
        with source.rows() as connection:
            found = list(rows.every(connection))
        with source.writing() as writing:
            writing.remove(found)

    with pytest.raises(StoreError, match="has changed while it was exported"):
        export_to(cache, tmp_path / "bundle", CHAT, progress=evict)
    assert not (tmp_path / "bundle").exists()


def test_more_than_one_bundle_holds() -> None:
    head = Head(fingerprint_of("model"), "model", {}, B, (bytes(4),) * 4097, 1, 200)
    with pytest.raises(UsageError, match="at most 4096 prefixes, not 4097"):
        head.pack()
    with pytest.raises(UsageError, match="at most 67108864 bytes together"):
        replace(head, prefixes=(bytes(64 << 20),)).pack()


def test_what_cannot_be_exported(source: Repository, tmp_path: Path) -> None:
    one, other = keep(source, CHAT), keep(source, CHAT, name="other")
    file = tmp_path / "bundle"
    spaces = [one.namespace, other.namespace]
    assert spaces[0] is not None
    assert spaces[1] is not None
    tokens = token_bytes(CHAT)
    refused: list[tuple[list[Any], Path, str]] = [
        ([], file, "exactly one model"),
        ([(spaces[0], tokens), (spaces[1], tokens)], file, "exactly one model"),
        ([(spaces[0], b"")], file, "empty prefix"),
        ([(spaces[0], tokens), (spaces[0], token_bytes([1, 2, 3]))], file, "nothing is stored of a prefix of 3 tokens"),
        ([(spaces[0], tokens)], tmp_path / "missing" / "bundle", "is no folder"),
        ([(spaces[0], tokens)], tmp_path, "no ordinary file"),
    ]
    for prefixes, target, message in refused:
        with pytest.raises(UsageError, match=message):
            export(source, prefixes, target)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


# -- what isn't whole, or isn't what it says ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The smallest bundle: a block and a tail."""
    folder = tmp_path_factory.mktemp("small")
    made = Made(ATTENTION.memory, (replace(ATTENTION.caches[0], sections=ATTENTION.caches[0].sections[:2], n_layer=1),))
    repository = open_root(folder / "root", 32 << 20)
    cache = PrefixCache(repository, made.identity(), block_tokens=2)
    cache.save([5, 6, 7], made.state([5, 6, 7]))
    export_to(cache, folder / "bundle", [5, 6, 7])
    close_root(repository)
    return (folder / "bundle").read_bytes()


@pytest.fixture
def refuses(repository: Repository, tmp_path: Path) -> Callable[..., None]:
    """That bytes are refused with one of these errors, before anything is written."""

    def check(data: bytes, *kinds: type[KvkeepError], match: str | None = None) -> None:
        file = tmp_path / "changed"
        file.write_bytes(data)
        with pytest.raises(kinds or BadBundle, match=match), Bundle.open(file) as bundle:
            bundle.verify()
        with pytest.raises(kinds or BadBundle):
            take(file, repository)
        with repository.rows() as connection:
            assert not list(rows.every(connection))

    return check


def test_cut_off_anywhere(small: bytes, refuses: Callable[..., None]) -> None:
    for length in range(len(small)):
        refuses(small[:length])
    refuses(small + b"\0")


def test_a_flip_in_any_byte(small: bytes, refuses: Callable[..., None]) -> None:
    for at in range(len(small)):
        changed = bytearray(small)
        changed[at] ^= 1 << at % 8
        # Of the version's four bytes, version 1 becomes 0 by the first flip, and a higher one by the others.
        refuses(bytes(changed), TooNew if 8 < at < 12 else BadBundle)


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_whatever_is_written_over_it(small: bytes, tmp_path: Path, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(small) - 1))
    other = data.draw(st.binary(min_size=1, max_size=40))
    changed = small[:at] + other + small[at + data.draw(st.integers(0, 60)) :]
    if changed == small:
        return
    (tmp_path / "changed").write_bytes(changed)
    with pytest.raises((BadBundle, TooNew)), Bundle.open(tmp_path / "changed") as bundle:
        bundle.verify()


# Offsets of the head's numbers of 64 bits: label, ingredients, prefixes, entries, bytes of these.
HEAD_FIELDS = (48, 56, 64, 72, 80)


def test_lengths_that_cannot_be(small: bytes, refuses: Callable[..., None]) -> None:
    """With all hashes right, too: whoever wrote it meant it."""
    head_bytes = len(head_of(small).pack()) - 32
    for value in (1 << 63, (1 << 64) - 1, (1 << 63) - 1, 1 << 40, 1 << 32, 0):
        number = struct.pack("<Q", value)
        for at in (*HEAD_FIELDS, head_bytes - 20):
            changed = small[:at] + number + small[at + 8 :]
            refuses(changed)
            body = changed[:head_bytes]
            refuses(body + bundle_format.digest(body) + changed[head_bytes + 32 :])
        for at in (RECORD_BYTES - 16, RECORD_BYTES - 8):
            at += head_bytes + 32
            refuses(small[:at] + number + small[at + 8 :])


def test_a_newer_version_and_a_foreign_file(small: bytes, refuses: Callable[..., None], tmp_path: Path) -> None:
    refuses(small[:8] + struct.pack("<I", 2) + b"whatever comes then", TooNew, match="version 2; this kvkeep reads version 1")
    refuses(b"GGUF" + bytes(200), match="is no bundle: it starts with")
    refuses(small.replace(b"\r\n", b"\n"), match="is no bundle")
    refuses(b"")
    for path in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(UsageError, match="a bundle is needed"):
            Bundle.open(path)


# -- forged: every hash is right ---------------------------------------------------------------------------------------


def head_of(data: bytes) -> Head:
    return parts_of(data)[0]


def parts_of(data: bytes) -> tuple[Head, list[tuple[Record, bytes]]]:
    with tempfile.NamedTemporaryFile() as file:
        file.write(data)
        file.flush()
        bundle = BundleFile(Path(file.name))
        entries = [(record, bytes(value)) for record, _, value in bundle.entries()]
        bundle.close()
        return bundle.head, entries


def forged(head: Head, entries: Sequence[tuple[Record, bytes]]) -> bytes:
    """A bundle with the hashes that it should have."""
    n_bytes = sum(RECORD_BYTES + len(value) for _, value in entries)
    packed = replace(head, n_entries=len(entries), entries_bytes=n_bytes).pack()
    seal = Seal(head.fingerprint)
    for record, value in entries:
        seal.add(record, value)
    return packed + b"".join(record.pack() + value for record, value in entries) + seal.close(packed)


CHANGES: dict[str, Callable[[Record], Record]] = {
    "another prefix": lambda record: record._replace(prefix=1),
    "a later position": lambda record: record._replace(start=record.start + 1),
    "an earlier position": lambda record: record._replace(start=max(0, record.start - 1), n_tokens=record.n_tokens + 1),
    "a far position": lambda record: record._replace(start=(1 << 32) - 1),
    "too many tokens": lambda record: record._replace(n_tokens=(1 << 32) - 1),
    "no tokens": lambda record: record._replace(n_tokens=0),
    "another kind": lambda record: record._replace(kind=Kind.WINDOW if record.kind == Kind.BLOCK else Kind.BLOCK),
    "an unknown kind": lambda record: record._replace(kind=9),
    "another parent": lambda record: record._replace(parent=type(record.parent)(bytes(32))),
    "another name": lambda record: record._replace(blob=type(record.blob)(bytes(32))),
    "another plain size": lambda record: record._replace(plain_bytes=record.plain_bytes + 1),
}


@pytest.fixture(scope="module")
def of_each_kind(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    found = {}
    for kind in ("dense", "window", "hybrid", "recurrent"):
        folder = tmp_path_factory.mktemp("bundle")
        repository = open_root(folder / "root", 32 << 20)
        export_to(keep(repository, CHAT, made=KINDS[kind]), folder / "bundle", CHAT)
        close_root(repository)
        found[kind] = (folder / "bundle").read_bytes()
    return found


def test_an_entry_that_is_not_what_the_bundle_says(of_each_kind: dict[str, bytes], refuses: Callable[..., None]) -> None:
    for data in of_each_kind.values():
        head, entries = parts_of(data)
        assert forged(head, entries) == data
        for number, (record, value) in enumerate(entries):
            for change in CHANGES.values():
                other = change(record)
                assert other != record
                refuses(forged(head, [*entries[:number], (other, value), *entries[number + 1 :]]), match="is damaged")


def test_entries_in_another_order_twice_or_missing(of_each_kind: dict[str, bytes], refuses: Callable[..., None]) -> None:
    head, entries = parts_of(of_each_kind["dense"])
    refuses(forged(head, entries[1:]), match="stands on nothing")
    refuses(forged(head, [entries[1], entries[0], *entries[2:]]), match="stands on nothing")
    refuses(forged(head, [*entries, entries[0]]), match="twice")
    refuses(forged(head, []), match="holds nothing")
    refuses(forged(replace(head, prefixes=()), entries), match="holds nothing")


def test_another_model_or_other_tokens(of_each_kind: dict[str, bytes], refuses: Callable[..., None]) -> None:
    for data in of_each_kind.values():
        head, entries = parts_of(data)
        refuses(forged(replace(head, fingerprint=fingerprint_of("other")), entries), match="is damaged")
        changed = bytearray(head.prefixes[0])
        changed[4] ^= 1
        refuses(forged(replace(head, prefixes=(bytes(changed),)), entries), match="is damaged")
        refuses(forged(replace(head, block_tokens=8), entries), match="is damaged")
        refuses(forged(replace(head, prefixes=(head.prefixes[0][:40],)), entries), match="is damaged")


def test_texts_that_are_none(small: bytes, refuses: Callable[..., None]) -> None:
    head = head_of(small)
    head_bytes = len(head.pack()) - 32
    ingredients = b'{"name": "model"}'
    for old, new in (
        (b"model", b"\xff\xff\xff\xff\xff"),
        (ingredients, b'["name", "model"]'),
        (ingredients, b'{"name":       1}'),
        (ingredients, b'{"a":"\\ud800"   }'),
        (ingredients, b"[" * 17),
    ):
        assert len(old) == len(new)
        body = small[:head_bytes].replace(old, new, 1)
        assert body != small[:head_bytes]
        refuses(body + bundle_format.digest(body) + small[head_bytes + 32 :], match="no UTF-8|no JSON|no object")


def test_a_file_that_changes_behind_its_verification(source: Repository, repository: Repository, tmp_path: Path) -> None:
    export_to(keep(source, CHAT), file := tmp_path / "bundle", CHAT)
    with Bundle.open(file) as bundle:
        bundle.verify()
        with file.open("r+b") as out:
            out.seek(-40, 2)
            out.write(b"12345678")
        with pytest.raises(IntegrityError):
            bundle.take(repository)
        assert everything(repository) == ([], set())


def test_pinning_needs_room_for_the_rest(
    source: Repository, repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export_to(keep(source, CHAT), tmp_path / "bundle", CHAT)
    monkeypatch.setattr(pinned, "MAX_SHARE", 1e-6)
    with pytest.raises(TooLarge, match="half of the budget"):
        take(tmp_path / "bundle", repository, pin=True)
    assert everything(repository) == ([], set())
    assert take(tmp_path / "bundle", repository).new == 6


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [1, 15, 16, 17, 40, 69, 70, 71, 94])
def test_it_says_how_much_of_a_prefix_can_be_had_from_it(
    kind: str, length: int, source: Repository, repository: Repository, tmp_path: Path
) -> None:
    """Blocks alone are of no use to a model that has recurrent tensors."""
    made, file, prefix = KINDS[kind], tmp_path / "bundle", CHAT[:length]
    cache = keep(source, CHAT, made=made)
    there = cache.match(prefix, form=form_of(made)).length
    try:
        done = export_to(cache, file, prefix)
    except UsageError:
        # Nothing is stored of it.
        assert there == 0
        return
    assert done.reached == (there,)
    take(file, repository)
    assert cache_in(repository, made).match(prefix, form=form_of(made)).length == there
