"""The border that every blob crosses: bound to its name, to its row, and through the row to its tokens."""

from dataclasses import fields, replace
from typing import Any

import pytest
from entries import ROOT, block, key_of, noise, opaque, recurrent, windowed

from kvkeep.store import codec
from kvkeep.store.checkpoints import Checkpoint, NewCheckpoint
from kvkeep.store.entry import Entry
from kvkeep.store.errors import BadFrame, HashMismatch, IntegrityError, MissingBlob
from kvkeep.store.frame import Kind
from kvkeep.store.hashing import PrefixHash, blob_id
from kvkeep.store.nodes import NewNode, Node
from kvkeep.store.verify import is_sound, verified
from kvkeep.store.windows import NewWindow, Window
from kvkeep.store.writing import NewEntry

PAYLOAD = noise(300)
BLOCK = block([1, 2, 3, 4], payload=PAYLOAD)
PIECE = block([7, 8], parent=key_of(BLOCK), start=4, anchor=key_of(BLOCK), payload=PAYLOAD)
POINT = opaque([1, 2, 3], PAYLOAD)
WINDOW = windowed([5, 6, 7], anchor=key_of(BLOCK), border=4, payload=PAYLOAD)
LATE_WINDOW = windowed([5, 6, 7], skip=1, anchor=key_of(BLOCK), border=4, payload=PAYLOAD)
TENSORS = recurrent([5, 6], PAYLOAD, anchor=key_of(BLOCK), border=4)
AT_BORDER = recurrent([], PAYLOAD, anchor=key_of(BLOCK), border=4)

EVERY = {
    "block": BLOCK,
    "piece": PIECE,
    "checkpoint": POINT,
    "window": WINDOW,
    "late window": LATE_WINDOW,
    "tensors": TENSORS,
    "tensors at a border": AT_BORDER,
}
every = pytest.mark.parametrize("entry", EVERY.values(), ids=EVERY)


def as_read(entry: NewEntry) -> Entry:
    kind: Any = {NewNode: Node, NewWindow: Window, NewCheckpoint: Checkpoint}[type(entry.row)]
    values = {field.name: getattr(entry.row, field.name) for field in fields(entry.row)}
    read: Entry = kind(**values, id=1, namespace_id=1, used=0.0)
    return read


@every
def test_what_was_stored_verifies(entry: NewEntry) -> None:
    header, payload = verified(memoryview(entry.value), as_read(entry))
    assert payload.tobytes() == PAYLOAD
    assert header.n_tokens in (0, 2, 3, 4)
    assert is_sound(memoryview(entry.value), as_read(entry))


@every
def test_missing_blob_is_named(entry: NewEntry) -> None:
    with pytest.raises(MissingBlob, match=entry.row.blob.hex()[:16]):
        verified(None, as_read(entry))
    assert not is_sound(None, as_read(entry))


@every
def test_every_flipped_byte_of_a_value_is_found(entry: NewEntry) -> None:
    row = as_read(entry)
    for at in range(len(entry.value)):
        damaged = bytearray(entry.value)
        damaged[at] ^= 0x04
        # The three bytes of padding in a value's header mean nothing, so they can't be wrong.
        assert is_sound(memoryview(damaged), row) == (at in (5, 6, 7))


@every
def test_every_truncated_value_is_found(entry: NewEntry) -> None:
    for length in range(len(entry.value)):
        with pytest.raises(IntegrityError):
            verified(memoryview(entry.value[:length]), as_read(entry))


def damaged_rows(entry: NewEntry) -> list[Any]:
    row = as_read(entry)
    unproven = {"id", "namespace_id", "used", "seq_id"}
    if not isinstance(row, Window) and not (isinstance(row, Checkpoint) and row.kind == Kind.RECURRENT):
        # Whoever looks a node or a whole state up compares it by itself.
        unproven.add("anchor")
    cases = []
    for name in (field.name for field in fields(row) if field.name not in unproven):
        value = getattr(row, name)
        if value == b"":
            continue
        other = value ^ 1 if isinstance(value, int) else value[:-1] + bytes([value[-1] ^ 1])
        cases.append(pytest.param(entry, replace(row, **{name: other}), id=f"{type(row).__name__} of {len(row.path)} {name}"))
    return cases


@pytest.mark.parametrize(("entry", "row"), [case for entry in EVERY.values() for case in damaged_rows(entry)])
def test_flipped_field_of_a_row_is_found(entry: NewEntry, row: Entry) -> None:
    with pytest.raises(IntegrityError):
        verified(memoryview(entry.value), row)


@pytest.mark.parametrize("n_tokens", [-4, -1, 0, 3, 5, 4 + 64, 4 + (1 << 30)])
def test_row_that_claims_another_number_of_tokens_is_found(n_tokens: int) -> None:
    row = as_read(BLOCK)
    assert isinstance(row, Node)
    with pytest.raises(HashMismatch):
        verified(memoryview(BLOCK.value), replace(row, n_tokens=n_tokens))


def test_blob_of_the_same_tokens_behind_others_is_refused() -> None:
    elsewhere = block([1, 2, 3, 4], parent=PrefixHash(b"e" * 32), payload=PAYLOAD)
    row = replace(as_read(BLOCK), blob=elsewhere.row.blob, stored_bytes=len(elsewhere.value))
    with pytest.raises(HashMismatch, match="another entry"):
        verified(memoryview(elsewhere.value), row)


def test_row_and_frame_that_agree_on_wrong_tokens_are_refused() -> None:
    # Both say [9, 9, 9, 9]; the key is still that of the true tokens.
    forged = block([9, 9, 9, 9], payload=PAYLOAD)
    row = as_read(forged)
    assert isinstance(row, Node)
    plain = bytearray(codec.decode(forged.value))
    plain[8:40] = key_of(BLOCK)
    value = codec.encode(bytes(plain))
    damaged = replace(row, key=key_of(BLOCK), blob=blob_id(bytes(plain)), stored_bytes=len(value))
    with pytest.raises(HashMismatch, match="doesn't hash to its key"):
        verified(memoryview(value), damaged)


def test_checkpoint_row_cant_point_to_a_block() -> None:
    row = as_read(POINT)
    assert isinstance(row, Checkpoint)
    with pytest.raises(HashMismatch):
        verified(
            memoryview(BLOCK.value), replace(row, blob=BLOCK.row.blob, kind=Kind.BLOCK, prefix=key_of(BLOCK), pos=4, path=b"")
        )


def test_value_that_is_no_frame_is_refused() -> None:
    plain = b"no frame at all" * 20
    value = codec.encode(plain)
    row = replace(as_read(BLOCK), blob=blob_id(plain), stored_bytes=len(value), plain_bytes=len(plain))
    with pytest.raises(BadFrame):
        verified(memoryview(value), row)
    assert PIECE.row.blob != BLOCK.row.blob
    assert BLOCK.row.parent == ROOT  # type: ignore[union-attr]


@pytest.mark.parametrize("start", [4, 6, 8])
def test_window_row_that_begins_elsewhere_is_refused(start: int) -> None:
    row = as_read(LATE_WINDOW)
    assert isinstance(row, Window)
    for n_tokens in (1, 2, 3):
        with pytest.raises(HashMismatch):
            verified(memoryview(LATE_WINDOW.value), replace(row, start=start, n_tokens=n_tokens))


def test_a_window_of_the_same_tokens_is_no_node_and_a_node_no_window() -> None:
    node, row = block([5, 6, 7], parent=key_of(BLOCK), start=4, payload=PAYLOAD), as_read(WINDOW)
    assert isinstance(row, Window)
    assert node.row.blob != row.blob
    with pytest.raises(HashMismatch, match="another entry"):
        verified(memoryview(node.value), replace(row, blob=node.row.blob, stored_bytes=len(node.value)))
    with pytest.raises(HashMismatch, match="another entry"):
        verified(memoryview(WINDOW.value), replace(as_read(node), blob=WINDOW.row.blob, stored_bytes=len(WINDOW.value)))


@pytest.mark.parametrize("kind", [Kind.BLOCK, Kind.OPAQUE, Kind.WINDOW, 99])
def test_tensors_are_of_no_other_kind(kind: Any) -> None:
    row = as_read(TENSORS)
    assert isinstance(row, Checkpoint)
    with pytest.raises(HashMismatch):
        verified(memoryview(TENSORS.value), replace(row, kind=kind))


def test_tensors_behind_other_tokens_are_refused() -> None:
    elsewhere = recurrent([5, 6], PAYLOAD, anchor=PrefixHash(b"e" * 32), border=4)
    row = replace(as_read(TENSORS), blob=elsewhere.row.blob, stored_bytes=len(elsewhere.value))
    with pytest.raises(HashMismatch, match="another entry"):
        verified(memoryview(elsewhere.value), row)
