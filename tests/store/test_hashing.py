"""Names: prefix hashes, digests of fields, digests of files."""

from pathlib import Path

import pytest
from blake3 import blake3
from entries import token_bytes
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkeep.store import hashing
from kvkeep.store.hashing import Fingerprint, PrefixHash, blob_id, chain, digest_fields, digest_file, extend

ROOT = Fingerprint(b"f" * 32)

fields = st.lists(st.tuples(st.text(max_size=4), st.one_of(st.text(max_size=4), st.binary(max_size=4))), max_size=4)


@pytest.mark.parametrize(("count", "blocks"), [(0, 0), (1, 0), (3, 0), (4, 1), (5, 1), (7, 1), (8, 2), (11, 2)])
def test_only_full_blocks_are_hashed(count: int, blocks: int) -> None:
    assert len(chain(ROOT, token_bytes(range(count)), 16)) == blocks


def test_a_border_hash_depends_on_every_token_before_it() -> None:
    tokens = list(range(12))
    whole = chain(ROOT, token_bytes(tokens), 16)
    for changed in range(12):
        other = chain(ROOT, token_bytes([99 if i == changed else t for i, t in enumerate(tokens)]), 16)
        same = [a == b for a, b in zip(whole, other, strict=True)]
        assert same == [changed // 4 > i for i in range(3)]


def test_the_chain_is_what_the_format_says() -> None:
    first = blake3(ROOT + token_bytes([1, 2])).digest()
    second = blake3(first + token_bytes([3, 4])).digest()
    assert chain(ROOT, token_bytes([1, 2, 3, 4]), 8) == [first, second]
    assert extend(PrefixHash(first), token_bytes([3, 4])) == second


def test_another_root_shares_no_hash() -> None:
    assert chain(ROOT, token_bytes(range(4)), 16) != chain(Fingerprint(b"g" * 32), token_bytes(range(4)), 16)


def test_views_and_bytes_hash_alike() -> None:
    data = token_bytes(range(8))
    assert extend(ROOT, memoryview(data)[4:8]) == extend(ROOT, data[4:8])
    assert chain(ROOT, memoryview(data), 16) == chain(ROOT, data, 16)
    assert blob_id(memoryview(data)) == blob_id(data)


def encoded(items: list[tuple[str, str | bytes]]) -> list[tuple[str, bytes]]:
    return [(name, value.encode() if isinstance(value, str) else value) for name, value in items]


@given(fields, fields)
@settings(deadline=None, max_examples=200)
def test_different_fields_never_give_the_same_digest(
    a: list[tuple[str, str | bytes]], b: list[tuple[str, str | bytes]]
) -> None:
    assert (digest_fields("purpose", a) == digest_fields("purpose", b)) == (encoded(a) == encoded(b))


def test_a_field_cant_be_moved_into_its_neighbour() -> None:
    assert digest_fields("p", [("ab", "c")]) != digest_fields("p", [("a", "bc")])
    assert digest_fields("p", [("a", "b"), ("c", "d")]) != digest_fields("p", [("a", "bcd")])
    assert digest_fields("p", [("a", "")]) != digest_fields("p", [])


def test_another_purpose_is_another_digest() -> None:
    assert digest_fields("one", [("a", "b")]) != digest_fields("two", [("a", "b")])


@pytest.mark.parametrize("size", [0, 1, 15, 16, 17, 32, 100])
def test_a_file_is_hashed_whole_whatever_its_size(size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hashing, "_CHUNK", 16)
    content = bytes(range(size))
    (tmp_path / "model").write_bytes(content)
    pieces: list[int] = []
    assert digest_file(tmp_path / "model", progress=pieces.append) == blake3(content).digest()
    assert sum(pieces) == size
    assert all(piece <= 16 for piece in pieces)


def test_hashing_can_be_stopped(tmp_path: Path) -> None:
    (tmp_path / "model").write_bytes(b"content")

    def stop(_: int) -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        digest_file(tmp_path / "model", progress=stop)


def test_missing_file_is_an_oserror(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        digest_file(tmp_path / "nowhere")
