"""Whether LMDB can open a data file safely, found out without LMDB.

LMDB believes its own pages. A flipped bit in one makes it read outside of the map or fail an assertion, which ends the
whole process, so the file is examined before LMDB sees it. All facts about the format are from mdb.c of LMDB 0.9 (64-bit,
little-endian); the names in the comments are its names. Values are left alone: `verify` tells whether they are sound.
"""

import os
import struct
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

# struct MDB_page: mp_pgno, mp_pad, mp_flags, mp_lower, mp_upper. mp_pad means nothing here and is never cleared.
_PAGE = struct.Struct("<QHHHH")
# The same of an overflow page, where the last two are one number: mp_pages.
_OVERFLOW_PAGE = struct.Struct("<QHHI")
# struct MDB_node: mn_lo and mn_hi (one number), mn_flags, mn_ksize.
_NODE = struct.Struct("<IHH")
# struct MDB_meta: mm_magic, mm_version, mm_address, mm_mapsize, two MDB_db, mm_last_pg, mm_txnid.
_META = struct.Struct("<IIQQ48s48sQQ")
# struct MDB_db, see `_Db`.
_DB = struct.Struct("<IHHQQQQQ")
# pgno_t, txnid_t, MDB_ID.
_NUMBER = struct.Struct("<Q")

_P_BRANCH, _P_LEAF, _P_OVERFLOW, _P_META = 0x01, 0x02, 0x04, 0x08
_F_BIGDATA = 0x01
_MDB_MAGIC = 0xBEEFC0DE
_MDB_DATA_VERSION = 1
_MDB_INTEGERKEY = 0x08
_MDB_MAXKEYSIZE = 511
_CURSOR_STACK = 32
_NUM_METAS = 2
# P_INVALID: the root of a tree without pages.
_NO_ROOT = (1 << 64) - 1
# The page sizes of operating systems, up to MAX_PAGESIZE.
_PAGE_SIZES = tuple(4096 << shift for shift in range(4))
# Half of what a process on a 64-bit machine can address. A map that can't be made leaves LMDB with dangling pointers.
_LARGEST_MAP = 1 << 46

_Numbers = npt.NDArray[np.uint64]


class _Broken(Exception):
    """What is wrong, in a sentence for people."""


def examine(data: Path, *, deep: bool = True) -> str | None:
    """The first thing that is wrong with an LMDB data file, in a sentence for people; None if LMDB can use it safely.

    A missing or empty file is fine: LMDB makes it new. Nobody may write to the file meanwhile, else a page that was
    used again looks like damage.

    Args:
        data: the data file.
        deep: also read the first page of every large value, one small read for each. Without that a damaged one is
            passed over; LMDB believes it when the value is deleted or written again.

    Raises:
        OSError: the file can't be read.
    """
    try:
        file = os.open(data, os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        if length := os.fstat(file).st_size:
            _examine(file, length, deep)
    except _Broken as broken:
        return str(broken)
    finally:
        os.close(file)
    return None


def _examine(file: int, length: int, deep: bool) -> None:
    meta = _newest_meta(file)
    _check_sizes(meta)
    pages = _Pages(file, meta, length)
    # The pages of its entries are read anyway.
    _FreeList("free list", meta.free, pages, deep=True).walk()
    _Tree("main tree", meta.main, pages, deep=deep).walk()
    pages.check_beyond()


class _Db(NamedTuple):
    """What a meta page says of a tree: struct MDB_db."""

    pad: int
    flags: int
    depth: int
    branch_pages: int
    leaf_pages: int
    overflow_pages: int
    entries: int
    root: int


class _Meta(NamedTuple):
    """The start of a snapshot: struct MDB_meta."""

    map_bytes: int
    free: _Db
    main: _Db
    last: int
    txnid: int

    @property
    def page_bytes(self) -> int:
        """mm_psize. It lies where other trees have md_pad."""
        return self.free.pad


def _newest_meta(file: int) -> _Meta:
    """The meta page that LMDB starts from, after what it demands of both: mdb_env_read_header, mdb_env_pick_meta."""
    first = _meta(file, 0, 0)
    if first.page_bytes not in _PAGE_SIZES:
        raise _Broken(f"meta page 0 says that a page has {first.page_bytes} bytes")
    second = _meta(file, 1, first.page_bytes)
    if second.page_bytes != first.page_bytes:
        raise _Broken(f"meta page 1 says that a page has {second.page_bytes} bytes, meta page 0 says {first.page_bytes}")
    return second if first.txnid < second.txnid else first


def _meta(file: int, number: int, offset: int) -> _Meta:
    raw = os.pread(file, _PAGE.size + _META.size, offset)
    if len(raw) < _PAGE.size + _META.size:
        raise _Broken(f"the file ends in or before meta page {number}")
    own_number, _, flags, _, _ = _PAGE.unpack_from(raw)
    magic, version, _, map_bytes, free, main, last, txnid = _META.unpack_from(raw, _PAGE.size)
    if own_number != number:
        raise _Broken(f"meta page {number} says that it is page {own_number}")
    if flags != _P_META:
        raise _Broken(f"meta page {number} has the flags {flags:#x}, not those of a meta page")
    if (magic, version) != (_MDB_MAGIC, _MDB_DATA_VERSION):
        raise _Broken(f"meta page {number} has the magic number {magic:#x} and format version {version}, not LMDB's")
    # Transaction N writes meta page N % 2, and LMDB finds it again by that. In a new file, both say 0.
    if txnid >> 63 or (txnid and txnid % _NUM_METAS != number):
        raise _Broken(f"meta page {number} can't be of transaction {txnid}")
    return _Meta(map_bytes, _Db(*_DB.unpack(free)), _Db(*_DB.unpack(main)), last, txnid)


def _check_sizes(meta: _Meta) -> None:
    """What LMDB's pointer arithmetic, and all of the rest here, relies on."""
    if meta.map_bytes > _LARGEST_MAP:
        raise _Broken(f"the meta page has a map size of {meta.map_bytes} bytes, which no machine can map")
    if not _NUM_METAS - 1 <= meta.last < meta.map_bytes // meta.page_bytes:
        raise _Broken(f"the meta page has the last page {meta.last}, the map size is {meta.map_bytes} bytes")
    # The free list's are the environment's too. Ours is made without flags, and its keys have no fixed size.
    if meta.free.flags != _MDB_INTEGERKEY or meta.main.flags or meta.main.pad:
        raise _Broken(
            f"the meta page has the flags {meta.free.flags:#x} for the free list, "
            f"{meta.main.flags:#x} and key size {meta.main.pad} for the main tree"
        )


class _Pages:
    """The pages of a file. Each may be used once: in a tree, for a value, or as a free one."""

    def __init__(self, file: int, meta: _Meta, length: int) -> None:
        self.size, self.last, self.txnid = meta.page_bytes, meta.last, meta.txnid
        self._file, self._in_file = file, length // self.size
        # One byte for each, and never more than the file has pages, whatever the meta page says.
        self._used = bytearray(min(self.last + 1, self._in_file))
        # Free pages behind the end of the file: LMDB doesn't write a page that one transaction took and gave back.
        self._beyond: list[_Numbers] = []

    def take(self, first: int, count: int = 1) -> None:
        """Mark pages as used. What is read was taken before, so everything comes to an end."""
        end = first + count
        if first < _NUM_METAS or end > self.last + 1:
            raise _Broken(f"page {first} ({count} in a row) can't be used, the last page is {self.last}")
        if end > self._in_file:
            raise _Broken(f"page {first} ({count} in a row) can't be read, the file ends after {self._in_file}")
        if self._used.find(1, first, end) >= 0:
            raise _Broken(f"page {first} ({count} in a row) can't be used twice")
        self._used[first:end] = b"\1" * count

    def take_free(self, numbers: _Numbers) -> None:
        """Mark free pages, which are in descending order, as used."""
        if numbers.size and (numbers[-1] < _NUM_METAS or numbers[0] > self.last):
            raise _Broken(f"pages {numbers[-1]} to {numbers[0]} can't be free, the last page is {self.last}")
        inside = numbers < len(self._used)
        used: npt.NDArray[np.uint8] = np.frombuffer(self._used, np.uint8)
        if used[numbers[inside]].any():
            raise _Broken("a page that is used can't be free")
        used[numbers[inside]] = 1
        self._beyond.append(numbers[~inside])

    def check_beyond(self) -> None:
        """The free pages that have no byte in the table."""
        if self._beyond and (beyond := np.concatenate(self._beyond)).size != np.unique(beyond).size:
            raise _Broken("the free list has a page behind the end of the file twice")

    def read(self, number: int, count: int, offset: int = 0) -> bytes:
        """Bytes of the file, counted from the start of a page."""
        raw = os.pread(self._file, count, number * self.size + offset)
        if len(raw) < count:
            raise _Broken(f"page {number} can't be read, the file ends before or in it")
        return raw


class _Node(NamedTuple):
    """An entry of a page: struct MDB_node."""

    start: int
    size: int
    flags: int
    key: bytes
    value: int
    """Where the value starts. A big one's is the number of its first page."""

    @property
    def child(self) -> int:
        """The page that a branch page's node leads to: NODEPGNO."""
        return self.size | self.flags << 32

    def end(self, is_leaf: bool) -> int:
        if not is_leaf:
            return self.value
        return self.value + (_NUMBER.size if self.flags & _F_BIGDATA else self.size)


class _Visit(NamedTuple):
    """A page to visit, and what its keys are bound to: from `low`, up to but without `high`."""

    number: int
    level: int
    low: bytes
    high: bytes | None


class _Tree:
    """A tree of pages.

    Args:
        name: for people.
        db: what the meta page says of it.
        pages: the file.
        deep: read the first page of every large value.
    """

    def __init__(self, name: str, db: _Db, pages: _Pages, *, deep: bool) -> None:
        self._name, self._db, self._pages, self._deep = name, db, pages, deep
        self._found: Counter[str] = Counter()

    def walk(self) -> None:
        """Visit every page, and compare what was found with what the meta page says."""
        if self._db.depth > _CURSOR_STACK or (self._db.depth == 0) != (self._db.root == _NO_ROOT):
            raise _Broken(f"the {self._name} has depth {self._db.depth} and root page {self._db.root}")
        waiting: list[_Visit] = []
        if self._db.depth:
            self._pages.take(self._db.root)
            waiting.append(_Visit(self._db.root, 1, b"", None))
        while waiting:
            visit = waiting.pop()
            try:
                waiting += self._visit(visit)
            except _Broken as broken:
                raise _Broken(f"page {visit.number} of the {self._name}: {broken}") from None
        self._compare()

    def _compare(self) -> None:
        for what in ("branch_pages", "leaf_pages", "overflow_pages", "entries"):
            found, said = self._found[what], getattr(self._db, what)
            # A value that isn't read counts as the pages that it needs. It may have more.
            if found > said or (found < said and (self._deep or what != "overflow_pages")):
                raise _Broken(f"the {self._name} has {found} {what.replace('_', ' ')}, the meta page says {said}")

    def _visit(self, visit: _Visit) -> list[_Visit]:
        """Check a page. Returns its children."""
        is_leaf = visit.level == self._db.depth
        page = self._pages.read(visit.number, self._pages.size)
        nodes = _nodes(page, visit.number, is_leaf)
        # The first key of a branch page means nothing: LMDB leaves it empty, or as it was.
        keys = [node.key for node in (nodes if is_leaf else nodes[1:])]
        self._check_order(keys, visit.low, visit.high)
        if is_leaf:
            self._found.update(leaf_pages=1, entries=len(nodes))
            for node in nodes:
                self._check_value(page, node)
            return []
        self._found["branch_pages"] += 1
        for node in nodes:
            self._pages.take(node.child)
        ranges = zip(nodes, [visit.low, *keys], [*keys, visit.high], strict=True)
        return [_Visit(node.child, visit.level + 1, low, high) for node, low, high in ranges]

    def _check_order(self, keys: list[bytes], low: bytes, high: bytes | None) -> None:
        ascending = all(map(bytes.__lt__, keys, keys[1:]))
        if not ascending or keys[0] < low or (high is not None and keys[-1] >= high):
            raise _Broken("its keys are in the wrong order")

    def _check_value(self, page: bytes, node: _Node) -> None:
        if not node.flags & _F_BIGDATA:
            return
        (first,) = _NUMBER.unpack_from(page, node.value)
        # OVPAGES: the first page has a header, the others have none.
        count = (_PAGE.size - 1 + node.size) // self._pages.size + 1
        if self._deep and _NUM_METAS <= first <= self._pages.last:
            number, _, flags, has = _OVERFLOW_PAGE.unpack(self._pages.read(first, _PAGE.size))
            if number != first or flags != _P_OVERFLOW:
                raise _Broken(f"page {first} should be a value's, it says that it is page {number} with the flags {flags:#x}")
            if has < count:
                raise _Broken(f"page {first} says that its value has {has} pages, {node.size} bytes need {count}")
            count = has
        self._pages.take(first, count)
        self._found["overflow_pages"] += count


class _FreeList(_Tree):
    """The tree of free pages: transaction numbers, and what each of them has freed."""

    def _check_order(self, keys: list[bytes], low: bytes, high: bytes | None) -> None:
        # Numbers in the machine's order of bytes. Turned round, they compare like any key.
        if any(len(key) != _NUMBER.size for key in keys):
            raise _Broken("a key is no transaction's number")
        super()._check_order([key[::-1] for key in keys], low[::-1], high and high[::-1])

    def _check_value(self, page: bytes, node: _Node) -> None:
        """Check an entry: MDB_IDL, a count and then page numbers in descending order."""
        super()._check_value(page, node)
        (txnid,) = _NUMBER.unpack(node.key)
        if not 1 <= txnid <= self._pages.txnid:
            raise _Broken(f"transaction {txnid} can't have freed pages, the last one was {self._pages.txnid}")
        room, odd = divmod(node.size, _NUMBER.size)
        # More than there are pages isn't even read.
        if odd or not 1 <= room <= self._pages.last:
            raise _Broken(f"the entry of transaction {txnid} has {node.size} bytes, which is no list of pages")
        numbers = self._numbers(page, node)
        # py-lmdb demands equality, LMDB alone believes the count.
        if numbers[0] != room - 1:
            raise _Broken(f"the entry of transaction {txnid} says that it has {numbers[0]} pages, it has {room - 1}")
        if (numbers[2:] >= numbers[1:-1]).any():
            raise _Broken(f"the entry of transaction {txnid} has its pages in the wrong order")
        self._pages.take_free(numbers[1:])

    def _numbers(self, page: bytes, node: _Node) -> _Numbers:
        if node.flags & _F_BIGDATA:
            (first,) = _NUMBER.unpack_from(page, node.value)
            return np.frombuffer(self._pages.read(first, node.size, _PAGE.size), "<u8")
        return np.frombuffer(page, "<u8", node.size // _NUMBER.size, node.value)


def _nodes(page: bytes, number: int, is_leaf: bool) -> list[_Node]:
    """The nodes of a page, in the order of their keys, after the header and the places of all have been checked."""
    own_number, _, flags, lower, upper = _PAGE.unpack_from(page)
    if own_number != number:
        raise _Broken(f"it says that it is page {own_number}")
    if flags != (_P_LEAF if is_leaf else _P_BRANCH):
        raise _Broken(f"it has the flags {flags:#x}, it should be a {'leaf' if is_leaf else 'branch'} page")
    count, odd = divmod(lower - _PAGE.size, 2)
    # LMDB asserts that a branch page is a choice (mdb_page_search_root), and takes a leaf page away with its last node.
    if odd or count < (1 if is_leaf else 2) or not lower <= upper <= len(page):
        raise _Broken(f"its free space can't be from {lower} to {upper}")
    starts = struct.unpack_from(f"<{count}H", page, _PAGE.size)
    if max(starts) > len(page) - _NODE.size:
        raise _Broken(f"a node can't start at {max(starts)}")
    nodes = [_node(page, start) for start in starts]
    _check_places(nodes, upper, len(page), is_leaf)
    return nodes


def _node(page: bytes, start: int) -> _Node:
    size, flags, key_bytes = _NODE.unpack_from(page, start)
    value = start + _NODE.size + key_bytes
    return _Node(start, size, flags, page[start + _NODE.size : value], value)


def _check_places(nodes: list[_Node], upper: int, end: int, is_leaf: bool) -> None:
    """Nodes lie side by side from `upper` to the end of the page: so mdb_node_add and mdb_node_del leave them."""
    for node in sorted(nodes, reverse=True):
        if len(node.key) > _MDB_MAXKEYSIZE or (is_leaf and not node.key):
            raise _Broken(f"the node at {node.start} has a key of {len(node.key)} bytes")
        if is_leaf and node.flags & ~_F_BIGDATA:
            raise _Broken(f"the node at {node.start} has the flags {node.flags:#x}")
        after = node.end(is_leaf)
        # EVEN: nodes start at even places.
        if after + after % 2 != end:
            raise _Broken(f"a node from {node.start} to {after} should end at {end}")
        end = node.start
    if end != upper:
        raise _Broken(f"its first node is at {end}, not at {upper}")
