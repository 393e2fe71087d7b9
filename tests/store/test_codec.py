"""Stored values: codec, sizes, and what becomes of damaged ones."""

import struct
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import zstandard
from entries import noise
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkeep.store import codec
from kvkeep.store.codec import HEADER_BYTES, Codec
from kvkeep.store.errors import BadFrame
from kvkeep.store.frame import MAX_FRAME_BYTES

SOFT = b"all the same " * 100
HARD = noise(1000)


def codec_of(value: bytes) -> Codec:
    return Codec(value[4])


@given(st.one_of(st.binary(max_size=2000), st.binary(max_size=8).map(lambda part: part * 300)))
@settings(deadline=None, max_examples=80)
def test_what_is_encoded_is_decoded(plain: bytes) -> None:
    assert bytes(codec.decode(codec.encode(plain))) == plain


def test_arrays_and_views_are_taken_as_their_bytes() -> None:
    array = np.arange(1000, dtype="<u2")
    assert bytes(codec.decode(codec.encode(array))) == array.tobytes()
    assert bytes(codec.decode(codec.encode(memoryview(array)))) == array.tobytes()


def test_what_gains_nothing_is_stored_raw() -> None:
    value = codec.encode(HARD)
    assert codec_of(value) is Codec.RAW
    assert len(value) == HEADER_BYTES + len(HARD)


def test_what_gains_is_compressed() -> None:
    value = codec.encode(SOFT)
    assert codec_of(value) is Codec.ZSTD
    assert len(value) < codec.WORTH_IT * len(SOFT)


def test_three_percent_decide() -> None:
    # Noise and 2 % of zeros behind it: zstd gains them, but that isn't worth decompressing.
    plain = noise(140_000) + bytes(3_000)
    assert len(zstandard.ZstdCompressor(level=1).compress(plain)) < len(plain)
    assert codec_of(codec.encode(plain)) is Codec.RAW


def test_raw_values_are_read_without_a_copy() -> None:
    value = codec.encode(HARD)
    view = codec.decode(value)
    assert np.shares_memory(np.frombuffer(view, np.uint8), np.frombuffer(value, np.uint8))


def test_released_bytes_stay_readable() -> None:
    assert bytes(codec.decode(b"KVV1\0\0\0\0" + struct.pack("<Q", 3) + b"abc")) == b"abc"
    packed = zstandard.ZstdCompressor(level=1).compress(b"abc" * 9)
    assert bytes(codec.decode(b"KVV1\1\0\0\0" + struct.pack("<Q", 27) + packed)) == b"abc" * 9


@pytest.mark.parametrize("plain", [SOFT, HARD, b""])
def test_every_truncation_is_refused(plain: bytes) -> None:
    value = codec.encode(plain)
    for length in range(len(value)):
        with pytest.raises(BadFrame):
            codec.decode(value[:length])


@pytest.mark.parametrize("plain", [SOFT, HARD])
def test_appended_bytes_are_refused(plain: bytes) -> None:
    with pytest.raises(BadFrame):
        codec.decode(codec.encode(plain) + b"x")


@pytest.mark.parametrize("plain", [SOFT, HARD])
def test_a_flip_raises_or_changes_the_bytes_but_never_their_number(plain: bytes) -> None:
    value = codec.encode(plain)
    for at in range(len(value)):
        damaged = bytearray(value)
        damaged[at] ^= 0x10
        try:
            found = bytes(codec.decode(damaged))
        except BadFrame:
            continue
        assert len(found) == len(plain)


def test_unknown_codec_is_named() -> None:
    value = bytearray(codec.encode(HARD))
    value[4] = 77
    with pytest.raises(BadFrame, match="codec 77"):
        codec.decode(value)


@pytest.mark.parametrize("size", [MAX_FRAME_BYTES + 1, 2**63, 2**64 - 1])
def test_hostile_size_is_refused_before_it_is_allocated(size: int) -> None:
    for kind in Codec:
        with pytest.raises(BadFrame, match="more than any frame"):
            codec.decode(b"KVV1" + bytes([kind, 0, 0, 0]) + struct.pack("<Q", size) + b"x" * 20)


def test_bomb_is_refused_before_it_is_inflated() -> None:
    # A frame of zstd that announces 16 GiB, in a value that announces 10 bytes.
    bomb = b"\x28\xb5\x2f\xfd\xe0" + struct.pack("<Q", 1 << 34) + b"\1\0\0"
    assert zstandard.frame_content_size(bomb) == 1 << 34
    with pytest.raises(BadFrame, match="announces 10 bytes"):
        codec.decode(b"KVV1\1\0\0\0" + struct.pack("<Q", 10) + bomb)


def test_zstd_frame_that_hides_its_size_is_refused() -> None:
    packed = zstandard.ZstdCompressor(write_content_size=False).compress(SOFT)
    with pytest.raises(BadFrame):
        codec.decode(b"KVV1\1\0\0\0" + struct.pack("<Q", len(SOFT)) + packed)


def test_threads_dont_share_a_context() -> None:
    plains = [bytes([i]) * 50_000 + noise(100, i) for i in range(40)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda plain: bytes(codec.decode(codec.encode(plain))), plains)) == plains


# -- into memory that is used again ------------------------------------------------------------------------------------


@given(st.lists(st.binary(max_size=8).map(lambda part: part * 300), min_size=1, max_size=5))
@settings(deadline=None, max_examples=40)
def test_scratch_is_used_again_and_again(plains: list[bytes]) -> None:
    scratch = codec.Scratch()
    for plain in plains:
        assert bytes(codec.decode(codec.encode(plain), len(plain), scratch)) == plain


def test_scratch_holds_one_value_at_a_time() -> None:
    scratch = codec.Scratch()
    first = codec.decode(codec.encode(SOFT), scratch=scratch)
    second = codec.decode(codec.encode(SOFT[::-1]), scratch=scratch)
    assert bytes(first) == bytes(second) == SOFT[::-1]


@pytest.mark.parametrize("plain", [SOFT, HARD, b""])
def test_with_scratch_every_truncation_is_refused(plain: bytes) -> None:
    """What an earlier value has left there must never pass for the rest of a shorter one."""
    value, scratch = codec.encode(plain), codec.Scratch()
    codec.decode(value, scratch=scratch)
    for length in range(len(value)):
        with pytest.raises(BadFrame):
            codec.decode(value[:length], scratch=scratch)


def test_with_scratch_a_flip_raises_or_changes_the_bytes_but_never_their_number() -> None:
    value, scratch = codec.encode(SOFT), codec.Scratch()
    codec.decode(value, scratch=scratch)
    for at in range(len(value)):
        damaged = bytearray(value)
        damaged[at] ^= 0x10
        try:
            found = bytes(codec.decode(damaged, len(SOFT), scratch))
        except BadFrame:
            continue
        assert len(found) == len(SOFT)
