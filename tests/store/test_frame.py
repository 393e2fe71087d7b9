"""Frames: what a blob means, readable without any row."""

import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkeep.store import frame
from kvkeep.store.errors import BadFrame
from kvkeep.store.frame import HEADER_BYTES, FrameHeader, Kind
from kvkeep.store.hashing import PrefixHash

KEY = PrefixHash(b"k" * 32)
PARENT = PrefixHash(b"p" * 32)


def made(header: FrameHeader, payload: bytes) -> bytes:
    plain, view = frame.allocate(header, len(payload))
    view[:] = np.frombuffer(payload, np.uint8)
    return plain.tobytes()


SAMPLE_HEADER = FrameHeader(Kind.BLOCK, KEY, PARENT, 128, b"\1\0\0\0\2\0\0\0", b"layout")
SAMPLE = made(SAMPLE_HEADER, b"payload")

headers = st.builds(
    FrameHeader,
    kind=st.sampled_from(Kind),
    key=st.binary(min_size=32, max_size=32).map(PrefixHash),
    parent=st.binary(min_size=32, max_size=32).map(PrefixHash),
    start=st.integers(0, 2**32 - 1),
    tokens=st.lists(st.binary(min_size=4, max_size=4), max_size=70).map(b"".join),
    layout=st.binary(max_size=100),
)


@given(headers, st.binary(max_size=300))
@settings(deadline=None, max_examples=60)
def test_what_is_written_is_read(header: FrameHeader, payload: bytes) -> None:
    found, view = frame.unpack(made(header, payload))
    assert found == header
    assert view.tobytes() == payload


def test_released_bytes_stay_readable() -> None:
    # Written out by hand: whoever changes the format must notice that old stores become unreadable.
    head = b"KVF1" + b"\1" + b"\0\0\0" + KEY + PARENT + struct.pack("<IIIQ", 128, 2, 6, 7)
    assert head + b"\1\0\0\0\2\0\0\0" + b"layout" + b"payload" == SAMPLE
    assert frame.unpack(SAMPLE)[0] == SAMPLE_HEADER


def test_header_knows_its_size_and_tokens() -> None:
    assert SAMPLE_HEADER.n_tokens == 2
    assert SAMPLE_HEADER.size + len(b"payload") == len(SAMPLE)


def test_every_truncated_frame_is_refused() -> None:
    for length in range(len(SAMPLE)):
        with pytest.raises(BadFrame):
            frame.unpack(SAMPLE[:length])


def test_longer_frame_is_refused() -> None:
    with pytest.raises(BadFrame, match=f"announce {len(SAMPLE)} bytes, there are {len(SAMPLE) + 1}"):
        frame.unpack(SAMPLE + b"\0")


def test_flipped_magic_kind_or_length_is_refused() -> None:
    lengths = range(76, HEADER_BYTES)
    for at in (*range(5), *lengths):
        for bit in range(8):
            damaged = bytearray(SAMPLE)
            damaged[at] ^= 1 << bit
            if at == 4 and damaged[at] in Kind.__members__.values():
                # Another kind that there is: the row says which one is meant.
                assert frame.unpack(damaged)[0].kind == damaged[at] != SAMPLE_HEADER.kind
                continue
            with pytest.raises(BadFrame):
                frame.unpack(damaged)


def test_unknown_kind_is_named() -> None:
    damaged = bytearray(SAMPLE)
    damaged[4] = 99
    with pytest.raises(BadFrame, match="kind 99"):
        frame.unpack(damaged)


@pytest.mark.parametrize("size", [2**31, 2**32, 2**63, 2**64 - 1])
def test_hostile_length_is_refused_without_allocating(size: int) -> None:
    damaged = bytearray(SAMPLE)
    damaged[HEADER_BYTES - 8 : HEADER_BYTES] = struct.pack("<Q", size)
    with pytest.raises(BadFrame):
        frame.unpack(damaged)


@pytest.mark.parametrize("key", [b"", b"short", b"k" * 33])
def test_key_of_another_length_is_no_key(key: bytes) -> None:
    with pytest.raises(ValueError, match="32 bytes"):
        frame.allocate(FrameHeader(Kind.BLOCK, PrefixHash(key), PARENT, 0, b"", b""), 1)


def test_payload_is_a_view_and_no_copy() -> None:
    plain, view = frame.allocate(SAMPLE_HEADER, 7)
    view[:] = 9
    assert plain[-7:].tolist() == [9] * 7
    assert np.shares_memory(frame.unpack(plain)[1], plain)
