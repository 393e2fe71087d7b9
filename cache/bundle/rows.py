"""What a bundle's entries are: the rows that follow from its prefixes, and frames cut to end where a prefix does.

A row is computed from the tokens of its prefix, never read. So an entry that belongs to other tokens, or stands on
something else, can't be expressed, or isn't what its own frame says.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from kvkeep.cache import planes
from kvkeep.cache.bundle.format import Record
from kvkeep.cache.layout import Cells, unpack_all
from kvkeep.cache.planes import Planes
from kvkeep.cache.radix import common_tokens
from kvkeep.cache.restore_point import Prompt
from kvkeep.store import codec, frame
from kvkeep.store.checkpoints import Checkpoint, NewCheckpoint
from kvkeep.store.entry import Entry
from kvkeep.store.errors import BadFrame, HashMismatch, UnknownLayout
from kvkeep.store.frame import TOKEN_BYTES, FrameHeader, Kind
from kvkeep.store.hashing import PrefixHash, blob_id, extend, prefix_of
from kvkeep.store.nodes import NewNode, Node
from kvkeep.store.rows import NewRow
from kvkeep.store.verify import verified
from kvkeep.store.windows import NewWindow, Window
from kvkeep.store.writing import NewEntry


def record_of(row: NewRow, prefix: int, root: PrefixHash) -> Record:
    """What a bundle says about a row.

    Args:
        row: of a prefix.
        prefix: the number of that.
        root: the fingerprint.
    """
    sizes = (row.blob, row.stored_bytes, row.plain_bytes)
    match row:
        case NewNode():
            return Record(Kind.BLOCK, 0, prefix, row.start, row.n_tokens, row.parent, *sizes)
        case NewWindow():
            return Record(Kind.WINDOW, 0, prefix, row.start, row.n_tokens, row.anchor, *sizes)
    if row.kind == Kind.OPAQUE:
        return Record(Kind.OPAQUE, row.seq_id, prefix, 0, row.pos, root, *sizes)
    n_path = len(row.path) // TOKEN_BYTES
    return Record(row.kind, row.seq_id, prefix, row.pos - n_path, n_path, row.anchor, *sizes)


def row_of(record: Record, prompt: Prompt) -> NewRow:
    """The row that a record stands for.

    Raises:
        BadFrame: it can't be an entry of this prefix.
    """
    size, end = prompt.block_tokens, record.start + record.n_tokens
    if not 0 < end <= prompt.n_tokens:
        raise BadFrame(f"it is to hold the positions {record.start} to {end - 1}, its prefix has {prompt.n_tokens} tokens")
    sizes = (record.blob, record.stored_bytes, record.plain_bytes)
    is_run = record.kind in (Kind.BLOCK, Kind.WINDOW)
    slot = (record.start if is_run else end) // size
    border = slot * size
    anchor, path = prompt.borders[slot], prompt.tokens[border * TOKEN_BYTES : end * TOKEN_BYTES]
    if is_run and (record.n_tokens == 0 or end > border + size):
        raise BadFrame(f"{record.n_tokens} tokens from position {record.start} on reach across a block border, or are none")
    if not is_run:
        kind = _kind_of_checkpoint(record, prompt, border)
        return NewCheckpoint(kind, record.seq_id, end, prefix_of(anchor, path), anchor, path, *sizes)
    if record.kind == Kind.WINDOW:
        return NewWindow(extend(anchor, path), anchor, path, record.start, record.n_tokens, *sizes)
    if record.start > border and end == border + size:
        raise BadFrame(f"a piece of a tail ends on the block border at {end}")
    key = extend(record.parent, path[(record.start - border) * TOKEN_BYTES :])
    return NewNode(key, record.parent, anchor, path, record.start, record.n_tokens, *sizes)


def _kind_of_checkpoint(record: Record, prompt: Prompt, border: int) -> Kind:
    if record.kind not in (Kind.OPAQUE, Kind.RECURRENT):
        raise BadFrame(f"kind {record.kind} is unknown to this version of kvkeep")
    begins = 0 if record.kind == Kind.OPAQUE else border
    if record.start != begins:
        raise BadFrame(f"a checkpoint's tokens begin at position {record.start} instead of {begins}")
    return Kind(record.kind)


def as_entry(row: NewRow) -> Entry:
    """A row as if the index held it, for those who verify one."""
    values: dict[str, Any] = asdict(row) | {"id": 0, "namespace_id": 0, "used": 0.0}
    match row:
        case NewNode():
            return Node(**values)
        case NewWindow():
            return Window(**values)
    return Checkpoint(**values)


def as_row(entry: Entry) -> NewRow:
    """The inverse."""
    values: dict[str, Any] = {
        name: value for name, value in asdict(entry).items() if name not in ("id", "namespace_id", "used")
    }
    match entry:
        case Node():
            return NewNode(**values)
        case Window():
            return NewWindow(**values)
    return NewCheckpoint(**values)


def unique(row: NewRow) -> tuple[object, ...]:
    """What no two entries of a bundle may have in common."""
    return (row.kind, row.seq_id, row.pos, row.prefix) if isinstance(row, NewCheckpoint) else (type(row), row.key)


def check_value(value: memoryview, row: NewRow, record: Record, prompt: Prompt) -> None:
    """Whether a value is that of a row, down to the last byte, and was laid out as this version reads it.

    Raises:
        BadFrame, HashMismatch, UnknownLayout: it isn't.
    """
    header, payload = verified(value, as_entry(row))
    tokens = prompt.tokens[record.start * TOKEN_BYTES : (record.start + record.n_tokens) * TOKEN_BYTES]
    # The frame of a whole state has more tokens than its row: all from position 0 on.
    parent = prompt.borders[0] if header.kind is Kind.OPAQUE else header.parent
    if (header.tokens, record.parent, header.parent) != (tokens, parent, parent):
        raise HashMismatch(f"the frame at position {record.start} has other tokens or stands on something else")
    match header.kind:
        case Kind.BLOCK | Kind.WINDOW:
            layouts = unpack_all(header.layout)
            wanted = sum(planes.payload_bytes(layout, header.n_tokens) for layout in layouts)
            is_sound = wanted == payload.size and (header.kind is Kind.BLOCK or len(layouts) == 1)
        case Kind.RECURRENT:
            is_sound = payload.size > 0 and header.layout == bytes([planes.run_width(payload.size)])
        case _:
            is_sound = payload.size > 0 and header.layout == b""
    if not is_sound:
        raise UnknownLayout(f"the payload at position {record.start} isn't laid out as its frame says")


def taken(entry: Node | Window, prompt: Prompt) -> int:
    """How many of an entry's own tokens are those of a prefix; 0 or less if none."""
    rest = prompt.rest(prompt.borders.index(entry.anchor))
    before = len(entry.path) // TOKEN_BYTES - entry.n_tokens
    return common_tokens(entry.path, rest) - before


def cut_key(entry: Node | Window, take: int) -> PrefixHash:
    """The key that the first `take` tokens of an entry have."""
    before = len(entry.path) - entry.n_tokens * TOKEN_BYTES
    if isinstance(entry, Node):
        return extend(entry.parent, entry.tokens[: take * TOKEN_BYTES])
    return extend(entry.anchor, entry.path[: before + take * TOKEN_BYTES])


def cut(value: memoryview | None, entry: Node | Window, take: int) -> NewEntry:
    """The first `take` tokens of an entry as an entry of their own.

    Raises:
        IntegrityError, LayoutError: its value is damaged, or laid out in a way that nobody knows.
    """
    header, payload = verified(value, entry)
    layouts = unpack_all(header.layout)
    before = len(entry.path) // TOKEN_BYTES - entry.n_tokens
    path, own = entry.path[: (before + take) * TOKEN_BYTES], header.tokens[: take * TOKEN_BYTES]
    key = cut_key(entry, take)
    new = FrameHeader(header.kind, key, header.parent, header.start, own, header.layout)
    plain, room = frame.allocate(new, sum(planes.payload_bytes(layout, take) for layout in layouts))
    source = target = 0
    for layout in layouts:
        arrays = tuple(np.empty((part.outer, take, part.inner), np.uint8) for part in layout.sections)
        cells = Planes(Cells(layout, np.arange(take, dtype=np.int32), arrays))
        n_all, n_own = cells.token_bytes * header.n_tokens, cells.token_bytes * take
        cells.join(payload[source : source + n_all], header.n_tokens, take, 0)
        cells.split(0, take, room[target : target + n_own])
        source, target = source + n_all, target + n_own
    encoded = codec.encode(plain)
    sizes = (blob_id(plain.data), len(encoded), plain.size)
    if isinstance(entry, Node):
        return NewEntry(NewNode(key, entry.parent, entry.anchor, path, entry.start, take, *sizes), encoded)
    return NewEntry(NewWindow(key, entry.anchor, path, entry.start, take, *sizes), encoded)


def reached(prompts: Iterable[Prompt], rows: Iterable[NewRow], tables: Collection[str]) -> list[int]:
    """How many of each prefix's first tokens can be had from some rows.

    Args:
        prompts: the prefixes.
        rows: the rows.
        tables: those that this model's states need, see `kvkeep.store.rows.tables_in_use`. What has blocks and recurrent
            tensors can be had only where there are both.
    """
    at: dict[PrefixHash, list[NewRow]] = defaultdict(list)
    for row in rows:
        at[row.anchor].append(row)
    return [_reached(list(_along(prompt, at)), tables) for prompt in prompts]


def _along(prompt: Prompt, at: Mapping[PrefixHash, Sequence[NewRow]]) -> Iterator[NewRow]:
    for slot, anchor in enumerate(prompt.borders):
        rest = prompt.rest(slot)
        yield from (row for row in at.get(anchor, ()) if rest.startswith(row.path))


def _reached(rows: Sequence[NewRow], tables: Collection[str]) -> int:
    ends = {
        "node": {row.start + row.n_tokens for row in rows if isinstance(row, NewNode)},
        "window": {row.start + row.n_tokens for row in rows if isinstance(row, NewWindow)},
        "checkpoint": {row.pos for row in rows if isinstance(row, NewCheckpoint) and row.kind == Kind.RECURRENT},
    }
    whole = max((row.pos for row in rows if isinstance(row, NewCheckpoint) and row.kind == Kind.OPAQUE), default=0)
    covered = max(ends["node"], default=0) if "node" in tables else max(ends["checkpoint"], default=0)
    for table in ("window", "checkpoint"):
        if table in tables:
            covered = max((end for end in ends[table] if end <= covered), default=0)
    return max(whole, covered)


def check_order(row: NewRow, before: dict[PrefixHash, NewNode], prompts: Sequence[Prompt]) -> None:
    """Whether what a node stands on came before it.

    Args:
        row: the next one.
        before: nodes that came before it, by key.
        prompts: the prefixes.

    Raises:
        BadFrame: it didn't.
    """
    if not isinstance(row, NewNode):
        return
    if row.start == 0 and row.parent == prompts[0].borders[0]:
        return
    above = before.get(row.parent)
    in_slot = above is not None and (above.anchor, above.path + row.tokens) == (row.anchor, row.path)
    on_border = row.path == row.tokens and row.parent == row.anchor
    if above is None or above.start + above.n_tokens != row.start or not (in_slot or on_border):
        raise BadFrame(f"the node at position {row.start} stands on nothing that comes before it")
