"""LMDB's own pages: sound files pass, every kind of damage is named, and nothing that passes can kill a process."""

import json
import os
import random
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import lmdb
import pytest

from kvkeep.store.blobs import DATA_FILE, BlobStore
from kvkeep.store.hashing import BlobId
from kvkeep.store.pages import examine

MAP = 8 << 20
PAGE = 4096
# Inline, at the border to pages of their own, one page, several.
SIZES = (0, 5, 300, 1990, 2100, 4000, 9000, 40_000)


def put(env: lmdb.Environment, rng: random.Random, count: int, sizes: tuple[int, ...] = SIZES) -> None:
    with env.begin(write=True) as txn:
        for _ in range(count):
            txn.put(rng.randbytes(32), rng.randbytes(rng.choice(sizes)))


def delete(env: lmdb.Environment, rng: random.Random, count: int) -> None:
    with env.begin(write=True) as txn:
        names = list(txn.cursor().iternext(values=False))
        for name in rng.sample(names, min(count, len(names))):
            txn.delete(name)


def opened(folder: Path, map_bytes: int = MAP) -> lmdb.Environment:
    return lmdb.open(str(folder), map_size=map_bytes, sync=False, meminit=False)


def worn(env: lmdb.Environment, rng: random.Random) -> None:
    """Both trees with branch pages, values of all sizes, a free list whose entries have pages of their own."""
    put(env, rng, 150)
    put(env, rng, 4, (200_000,))
    delete(env, rng, 90)
    # As long as somebody reads, nothing that is freed can be used again.
    with env.begin():
        for _ in range(70):
            put(env, rng, 2, (5, 300, 1990, 2100))
            delete(env, rng, 2)
    put(env, rng, 1, (5,))


def made(folder: Path, use: Callable[[lmdb.Environment, random.Random], None]) -> Path:
    """A data file as kvkeep has it: as long as its map."""
    env = opened(folder)
    use(env, random.Random(1))
    env.close()
    os.truncate(folder / DATA_FILE, MAP)
    return folder / DATA_FILE


@dataclass
class Tree:
    """Where things are in a sound file."""

    branches: list[int] = field(default_factory=list)
    leaves: list[int] = field(default_factory=list)
    values: list[int] = field(default_factory=list)


class Image:
    """The bytes of a data file, to be damaged."""

    def __init__(self, data: bytes) -> None:
        self.data = bytearray(data)
        # Transaction N is in meta page N % 2.
        number = max((0, 1), key=lambda page: self.number(page * PAGE + 16 + TXNID))
        self.meta = number * PAGE + 16
        self.free_db, self.main_db = self.meta + 24, self.meta + 72
        self.free, self.main = self._tree(self.free_db), self._tree(self.main_db)

    def number(self, at: int, kind: str = "Q") -> int:
        return int(struct.unpack_from(f"<{kind}", self.data, at)[0])

    def write(self, at: int, value: int, kind: str = "Q") -> None:
        struct.pack_into(f"<{kind}", self.data, at, value)

    def nodes(self, page: int) -> list[int]:
        """Where the nodes of a page are in the file."""
        count = (self.number(page * PAGE + 12, "H") - 16) // 2
        return [page * PAGE + self.number(page * PAGE + 16 + 2 * index, "H") for index in range(count)]

    def pointer(self, node: int) -> int:
        """Where a node has the number of its value's first page."""
        return node + 8 + self.number(node + 6, "H")

    def big(self) -> int:
        """A node whose value has several pages."""
        nodes = (node for leaf in self.main.leaves for node in self.nodes(leaf))
        return next(node for node in nodes if self.number(node + 4, "H") and self.number(node, "I") > 2 * PAGE)

    def small(self) -> int:
        """A node with its value behind it."""
        nodes = (node for leaf in self.main.leaves for node in self.nodes(leaf))
        return next(node for node in nodes if not self.number(node + 4, "H") and self.number(node, "I"))

    def records(self) -> list[int]:
        """Where the entries of the free list start that lie in a leaf page and have pages."""
        nodes = (node for leaf in self.free.leaves for node in self.nodes(leaf))
        return [node + 16 for node in nodes if not self.number(node + 4, "H") and self.number(node + 16)]

    def record(self) -> int:
        """One of them with at least two pages."""
        return next(record for record in self.records() if self.number(record) > 1)

    def _tree(self, db: int) -> Tree:
        tree, waiting = Tree(), [self.number(db + 40)]
        while waiting:
            page = waiting.pop()
            if page == (1 << 64) - 1:
                continue
            if self.number(page * PAGE + 10, "H") == 1:
                tree.branches.append(page)
                waiting += [self.number(node, "I") for node in self.nodes(page)]
            else:
                tree.leaves.append(page)
                big = [node for node in self.nodes(page) if self.number(node + 4, "H") == 1]
                tree.values += [self.number(self.pointer(node)) for node in big]
        # The fullest first: what is damaged below has neighbours.
        tree.leaves.sort(key=lambda page: len(self.nodes(page)), reverse=True)
        return tree


@contextmanager
def damaged(target: Path, at: int, content: bytes) -> Iterator[None]:
    """The file with other bytes in one place, for as long as this lasts."""
    with target.open("r+b", buffering=0) as file:
        before = os.pread(file.fileno(), len(content), at)
        os.pwrite(file.fileno(), content, at)
        yield
        os.pwrite(file.fileno(), before, at)


@pytest.fixture(scope="module")
def worn_bytes(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return made(tmp_path_factory.mktemp("worn"), worn).read_bytes()


@pytest.fixture
def image(worn_bytes: bytes) -> Image:
    return Image(worn_bytes)


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / DATA_FILE


def test_the_sample_has_everything_that_is_damaged_below(image: Image) -> None:
    assert image.free.branches
    assert len(image.free.leaves) > 1
    assert image.free.values
    assert image.main.branches
    assert len(image.main.leaves) > 1
    assert len(image.nodes(image.main.leaves[0])) > 3
    assert image.main.values


def test_what_isnt_there_yet_is_sound(tmp_path: Path) -> None:
    assert examine(tmp_path / "none") is None
    (tmp_path / "empty").touch()
    assert examine(tmp_path / "empty") is None


def test_what_cant_be_read_is_no_verdict(tmp_path: Path) -> None:
    with pytest.raises(OSError):  # noqa: PT011
        examine(tmp_path)


def deep_tree(env: lmdb.Environment, rng: random.Random) -> None:
    put(env, rng, 2500, (1500,))
    delete(env, rng, 100)


def odd_keys(env: lmdb.Environment, rng: random.Random) -> None:
    """Long and short keys, so that separators have many lengths and branch pages split and merge."""
    with env.begin(write=True) as txn:
        for _ in range(1500):
            txn.put(rng.randbytes(rng.choice((1, 7, 32, 511))), rng.randbytes(rng.choice((0, 1, 33))))
    delete(env, rng, 1200)


def nothing(env: lmdb.Environment, rng: random.Random) -> None:
    pass


def emptied(env: lmdb.Environment, rng: random.Random) -> None:
    put(env, rng, 50)
    delete(env, rng, 50)


@pytest.mark.parametrize("deep", [True, False])
@pytest.mark.parametrize("use", [nothing, emptied, worn, deep_tree, odd_keys])
def test_what_lmdb_made_is_sound(tmp_path: Path, use: Callable[[lmdb.Environment, random.Random], None], deep: bool) -> None:
    env = opened(tmp_path, 4 * MAP)
    use(env, random.Random(1))
    depth = env.stat()["depth"]
    env.close()
    assert depth >= 3 or use is not deep_tree
    # As LMDB leaves it, and as kvkeep does: as long as the map.
    assert examine(tmp_path / DATA_FILE, deep=deep) is None
    os.truncate(tmp_path / DATA_FILE, 4 * MAP)
    assert examine(tmp_path / DATA_FILE, deep=deep) is None


def test_free_pages_behind_the_end_of_the_file_are_sound(tmp_path: Path) -> None:
    env = opened(tmp_path)
    # A page that is taken and given back goes to the free pages from earlier on, if there are any, and isn't written.
    for _ in range(5):
        with env.begin(write=True) as txn:
            txn.put(b"stays", b"")
    with env.begin(write=True) as txn:
        txn.put(b"stays", b"")
        txn.put(b"goes", bytes(200_000))
        txn.delete(b"goes")
    last = env.info()["last_pgno"]
    env.close()
    data = tmp_path / DATA_FILE
    assert data.stat().st_size <= last * PAGE
    assert examine(data) is None
    image = Image(data.read_bytes())
    free_twice(image)
    data.write_bytes(image.data)
    assert examine(data) == "the free list has a page behind the end of the file twice"


def test_a_compacted_copy_is_sound(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    env = opened(tmp_path / "a")
    worn(env, random.Random(1))
    env.copy(str(tmp_path / "b"), compact=True)
    env.close()
    assert examine(tmp_path / "b" / DATA_FILE) is None


def test_what_kvkeep_wrote_is_sound(tmp_path: Path) -> None:
    store, rng = BlobStore(tmp_path / "blobs", MAP), random.Random(1)
    for _ in range(30):
        names = [BlobId(rng.randbytes(32)) for _ in range(5)]
        store.put((name, rng.randbytes(20_000)) for name in names)
        store.delete(names[:3])
        store.settle()
        assert examine(tmp_path / "blobs" / DATA_FILE) is None
    store.close()
    assert examine(tmp_path / "blobs" / DATA_FILE) is None


def test_heavy_use_is_sound_all_the_time(tmp_path: Path) -> None:
    """A false alarm costs all that was stored."""
    env, rng = opened(tmp_path, 16 * MAP), random.Random(7)
    reader: lmdb.Transaction | None = None
    for turn in range(400):
        if turn % 40 == 0:
            if reader:
                reader.abort()
            reader = env.begin() if turn % 80 == 0 else None
        put(env, rng, rng.choice((1, 2, 20)))
        delete(env, rng, rng.choice((0, 1, 3, 30)))
        if turn % 4 == 0:
            assert examine(tmp_path / DATA_FILE, deep=turn % 8 == 0) is None, turn
    env.close()


Damage = Callable[[Image], None]


def at_meta(offset: int, value: int, kind: str = "Q") -> Damage:
    return lambda image: image.write(image.meta + offset, value, kind)


def at_other_meta(offset: int, value: int, kind: str = "Q") -> Damage:
    return lambda image: image.write((image.meta ^ PAGE) + offset, value, kind)


def add(tree: str, offset: int, change: int, kind: str = "Q") -> Damage:
    def damage(image: Image) -> None:
        at = getattr(image, tree) + offset
        image.write(at, image.number(at, kind) + change, kind)

    return damage


def at_page(tree: str, role: str, offset: int, value: int, kind: str = "H") -> Damage:
    return lambda image: image.write(getattr(getattr(image, tree), role)[0] * PAGE + offset, value, kind)


def at_node(role: str, offset: int, value: int, kind: str = "H", which: int = 1, tree: str = "main") -> Damage:
    return lambda image: image.write(image.nodes(getattr(getattr(image, tree), role)[0])[which] + offset, value, kind)


def at_big(value: Callable[[Image], int]) -> Damage:
    return lambda image: image.write(image.pointer(image.big()), value(image))


def at_big_header(offset: int, value: int, kind: str) -> Damage:
    return lambda image: image.write(image.number(image.pointer(image.big())) * PAGE + offset, value, kind)


def at_record(offset: int, value: Callable[[Image], int]) -> Damage:
    return lambda image: image.write(image.record() + offset, value(image))


def swap_keys(image: Image) -> None:
    at = image.main.leaves[0] * PAGE + 16
    first, second = image.number(at, "H"), image.number(at + 2, "H")
    image.write(at, second, "H")
    image.write(at + 2, first, "H")


def swap_children(image: Image) -> None:
    first, second = image.nodes(image.main.branches[0])[:2]
    one, other = image.number(first, "I"), image.number(second, "I")
    image.write(first, other, "I")
    image.write(second, one, "I")


def share_offset(image: Image) -> None:
    at = image.main.leaves[0] * PAGE + 16
    image.write(at, image.number(at + 2, "H"), "H")


def free_twice(image: Image) -> None:
    """The largest page of each entry is the largest of all."""
    for record in image.records():
        image.write(record + 8, image.number(image.meta + LAST))


def long_free_key(image: Image) -> None:
    """Two bytes of the value are the key's, so that the node is as long as before."""
    node = image.record() - 16
    image.write(node, image.number(node, "I") - 2, "I")
    image.write(node + 6, 10, "H")


def odd_record(image: Image) -> None:
    node = image.record() - 16
    image.write(node, image.number(node, "I") - 1, "I")


def one_key(image: Image) -> None:
    image.write(image.main.branches[0] * PAGE + 12, 18, "H")


# Of a meta page, counted from its MDB_meta.
LAST, TXNID = 120, 128
DAMAGES: list[tuple[str, Damage, str]] = [
    ("meta number", lambda image: image.write(image.meta - 16, 7), "says that it is page 7"),
    ("meta flags", lambda image: image.write(image.meta - 6, 0x0A, "H"), "has the flags 0xa"),
    ("magic", at_meta(0, 0xBEEFC0DF, "I"), "magic number 0xbeefc0df"),
    ("version", at_meta(4, 3, "I"), "format version 3"),
    ("other meta's number", lambda image: image.write((image.meta ^ PAGE) - 16, 7), "says that it is page 7"),
    ("other meta's magic", at_other_meta(0, 1, "I"), "magic number 0x1"),
    ("other meta's version", at_other_meta(4, 0, "I"), "format version 0"),
    ("page size", at_meta(24, 0, "I"), "page has 0 bytes"),
    ("other page size", at_other_meta(24, 8192, "I"), "meta page 1 says"),
    ("transaction", add("meta", TXNID, 1), "can't be of transaction"),
    ("large map", at_meta(16, 1 << 50), "map size"),
    ("small map", at_meta(16, 2 * PAGE), "map size"),
    ("large last page", at_meta(LAST, 1 << 33), "last page"),
    ("small last page", at_meta(LAST, 40), "the last page is 40"),
    ("no last page", at_meta(LAST, 0), "last page 0"),
    ("free flags", at_meta(28, 0x18, "H"), "flags 0x18 for the free list"),
    ("main flags", at_meta(76, 0x04, "H"), "0x4 and key size 0 for the main tree"),
    ("main pad", at_meta(72, 5, "I"), "key size 5"),
    ("great depth", at_meta(78, 33, "H"), "depth 33"),
    ("no depth", at_meta(78, 0, "H"), "depth 0"),
    ("more depth", add("main_db", 6, 1, "H"), "should be a branch page"),
    ("less depth", add("main_db", 6, -1, "H"), "should be a leaf page"),
    ("branch pages", add("main_db", 8, 1), "branch pages"),
    ("leaf pages", add("main_db", 16, -1), "leaf pages"),
    ("overflow pages", add("main_db", 24, 1), "overflow pages"),
    ("entries", add("main_db", 32, 1), "entries"),
    ("free list's branch pages", add("free_db", 8, 1), "the free list has"),
    ("free list's leaf pages", add("free_db", 16, -1), "the free list has"),
    ("free list's overflow pages", add("free_db", 24, 1), "the free list has"),
    ("free list's entries", add("free_db", 32, 1), "the free list has"),
    ("root is meta", at_meta(72 + 40, 1), "page 1 (1 in a row) can't be used"),
    ("root is far", at_meta(72 + 40, 1 << 40), "can't be used"),
    ("no root", at_meta(72 + 40, (1 << 64) - 1), "root page"),
    ("own number", at_page("main", "leaves", 0, 3, "Q"), "says that it is page 3"),
    ("dirty", at_page("main", "leaves", 10, 0x12), "flags 0x12"),
    ("loose", at_page("main", "branches", 10, 0x4001), "flags 0x4001"),
    ("subpage", at_page("main", "leaves", 10, 0x42), "flags 0x42"),
    ("leaf2", at_page("free", "leaves", 10, 0x22), "flags 0x22"),
    ("odd lower", at_page("main", "leaves", 12, 19), "free space"),
    ("small lower", at_page("main", "leaves", 12, 14), "free space"),
    ("no nodes", at_page("main", "leaves", 12, 16), "free space"),
    ("large lower", at_page("main", "leaves", 12, 4094), "free space"),
    ("large upper", at_page("main", "leaves", 14, 5000), "free space"),
    ("small upper", at_page("main", "leaves", 14, 60), "its first node is at"),
    ("one key", one_key, "free space"),
    ("offset outside", at_page("main", "leaves", 16, 65534), "can't start at 65534"),
    ("offset odd", at_page("main", "leaves", 16, 4001), "4001"),
    ("overlap", share_offset, "should end at"),
    ("key length", at_node("leaves", 6, 33 + 1), "should end at"),
    ("long key", at_node("leaves", 6, 600), "should end at"),
    ("no key", at_node("leaves", 6, 0), "key of 0 bytes"),
    ("branch's key length", at_node("branches", 6, 200), "should end at"),
    ("value length", lambda image: image.write(image.small(), 0x7FFF, "I"), "should end at"),
    ("node flags", at_node("leaves", 4, 0x02), "flags 0x2"),
    ("free node flags", at_node("leaves", 4, 0x06, tree="free"), "flags 0x6"),
    ("keys", swap_keys, "wrong order"),
    ("children", swap_children, "wrong order"),
    ("child is meta", at_node("branches", 0, 0, "I"), "page 0 (1 in a row) can't be used"),
    ("child is far", at_node("branches", 4, 5), "can't be used"),
    ("child twice", lambda image: image.write(image.nodes(image.main.branches[0])[0], image.main.leaves[0], "I"), "twice"),
    ("value is far", at_big(lambda _: 1 << 50), "can't be used"),
    ("value is meta", at_big(lambda _: 1), "page 1 ("),
    ("value is a leaf", at_big(lambda image: image.main.leaves[-1]), "flags 0x2"),
    ("value too large", lambda image: image.write(image.big() + 2, 0x10, "H"), "bytes need"),
    ("value's number", at_big_header(0, 4, "Q"), "should be a value's"),
    ("value's flags", at_big_header(10, 0x14, "H"), "should be a value's"),
    ("value has fewer pages", at_big_header(12, 1, "I"), "has 1 pages"),
    ("value has more pages", at_big_header(12, 1 << 30, "I"), "can't be used"),
    ("free transaction", at_node("leaves", 8, 1 << 40, "Q", -1, "free"), "the free list"),
    ("free transaction 0", at_node("leaves", 8, 0, "Q", 0, "free"), "the free list"),
    ("free key length", at_node("leaves", 6, 10, tree="free"), "the free list"),
    ("free count", at_record(0, lambda _: 1 << 40), "says that it has 1099511627776 pages"),
    ("free order", at_record(8, lambda _: 2), "wrong order"),
    ("free page is far", at_record(8, lambda _: 1 << 40), "can't be free"),
    ("free key", long_free_key, "no transaction's number"),
    ("free size", odd_record, "no list of pages"),
    ("free twice", free_twice, "a page that is used can't be free"),
    ("free page is used", at_record(8, lambda image: image.main.leaves[0]), ""),
]


@pytest.mark.parametrize(("damage", "sentence"), [case[1:] for case in DAMAGES], ids=[case[0] for case in DAMAGES])
def test_damage_is_found_and_named(image: Image, target: Path, damage: Damage, sentence: str) -> None:
    damage(image)
    target.write_bytes(image.data)
    said = examine(target)
    assert said is not None
    assert sentence in said


def test_a_used_page_in_the_free_list_is_found(image: Image, target: Path) -> None:
    """Here it fits into the order, so that only the table of used pages can tell."""
    at = image.record() + 8
    used = {*image.main.leaves, *image.main.branches, *image.main.values, *image.free.leaves}
    image.write(at, next(page for page in sorted(used, reverse=True) if page > image.number(at + 8)))
    target.write_bytes(image.data)
    assert "twice" in (examine(target) or "") or "can't be free" in (examine(target) or "")


def test_without_depth_only_the_pages_of_values_are_passed_over(image: Image, target: Path) -> None:
    image.write(image.main.values[0] * PAGE, 1 << 40)
    target.write_bytes(image.data)
    assert examine(target, deep=False) is None
    assert "should be a value's" in (examine(target) or "")
    # Those of the free list are LMDB's own.
    image.write(image.free.values[0] * PAGE, 1 << 40)
    target.write_bytes(image.data)
    assert "the free list" in (examine(target, deep=False) or "")


def test_a_cut_off_file_is_found_unless_only_free_pages_are_missing(image: Image, target: Path) -> None:
    ends = [*image.free.leaves, *image.free.branches, *image.main.leaves, *image.main.branches]
    # A value's pages: the first of them has how many there are.
    ends += [first + image.number(first * PAGE + 12, "I") - 1 for first in image.free.values + image.main.values]
    end = (max(ends) + 1) * PAGE
    target.write_bytes(image.data)
    for length in [end, end - 1, end - PAGE, *range(end - 5 * PAGE, 1, -37 * PAGE - 11), 8191, 4300, 4096, 151, 1]:
        os.truncate(target, length)
        for deep in (True, False):
            assert (examine(target, deep=deep) is None) == (length >= end), length


def test_a_cut_off_file_that_was_made_long_again_is_found(image: Image, target: Path) -> None:
    end = min(image.main.leaves) * PAGE
    target.write_bytes(image.data[:end])
    os.truncate(target, MAP)
    assert "says that it is page 0" in (examine(target) or "")


def test_garbage_is_found(image: Image, target: Path) -> None:
    rng = random.Random(3)
    for length in (1, 100, 4096, 5000, 100_000):
        target.write_bytes(rng.randbytes(length))
        assert examine(target)
    target.write_bytes(bytes(100_000))
    assert examine(target)


def test_whatever_the_bytes_are_there_is_a_verdict(image: Image, target: Path) -> None:
    """Garbage all over the pages that are examined. No crash, no endless loop."""
    rng = random.Random(4)
    target.write_bytes(image.data)
    pages = [*image.free.leaves, *image.free.branches, *image.main.leaves, *image.main.branches, *image.free.values]
    for _ in range(300):
        at = rng.choice([0, 1, *pages]) * PAGE + rng.choice((0, 16, 40, rng.randrange(PAGE)))
        count = rng.choice((1, 8, 100))
        with damaged(target, at, rng.choice((rng.randbytes(count), bytes(count), b"\xff" * count))):
            examine(target, deep=rng.random() < 0.5)
    assert examine(target) is None


# Uses a damaged file in every way that kvkeep does, once for each flip, each in a process of its own. It runs in a fresh
# interpreter because pytest's may have threads, which don't survive a fork.
USER = r"""
import json, lmdb, os, random, resource, signal, sys

def use(folder, map_bytes):
    env = lmdb.open(folder, map_size=map_bytes, sync=False, meminit=False)
    rng = random.Random(1)
    with env.begin(buffers=True) as txn:
        names = [bytes(name) for name, value in txn.cursor() if bytes(value) is not None]
    with env.begin(write=True) as txn:
        for name in names[::2]:
            txn.delete(name)
    for _ in range(4):
        with env.begin(write=True) as txn:
            for size in (10, 1000, 3000, 9000, 40000) * 3:
                txn.put(rng.randbytes(32), rng.randbytes(size))
        with env.begin(write=True) as txn:
            txn.put(b"\0settle", b"")
            txn.delete(b"\0settle")
    with env.begin(write=True) as txn:
        for name in names[1::2]:
            txn.put(name, rng.randbytes(3000))
    with env.begin(write=True) as txn:
        for name in list(txn.cursor().iternext(values=False)):
            txn.delete(name)
    with env.begin(write=True) as txn:
        for _ in range(30):
            txn.put(rng.randbytes(32), rng.randbytes(5000))
    env.close()

def outcome(folder, map_bytes):
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        try:
            use(folder, map_bytes)
        except Exception:
            os._exit(3)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

folder, map_bytes = sys.argv[1], int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
data = folder + "/data.mdb"
sound = open(data, "rb").read().rstrip(b"\0")
sound += bytes(-len(sound) % 4096)
outcomes = []
for at, bit in json.load(sys.stdin):
    damaged = bytearray(sound)
    damaged[at] ^= 1 << bit
    for name in os.listdir(folder):
        os.unlink(folder + "/" + name)
    with open(data, "wb") as file:
        file.write(damaged)
        file.truncate(map_bytes)
    outcomes.append(outcome(folder, map_bytes))
json.dump(outcomes, sys.stdout)
"""


def flips(image: Image, rng: random.Random, count: int) -> Iterator[tuple[int, int]]:
    """Places of single bits in what LMDB believes. Headers, offsets and nodes are hit more often than free space."""
    trees = [*image.free.leaves, *image.free.branches, *image.main.leaves, *image.main.branches]
    for _ in range(count):
        page = rng.choice(trees)
        places = [rng.choice((0, 1)) * PAGE + rng.randrange(152), page * PAGE + rng.randrange(16)]
        places += [page * PAGE + rng.randrange(PAGE), rng.choice(image.nodes(page)) + rng.randrange(16)]
        places += [rng.choice(image.main.values + image.free.values) * PAGE + rng.randrange(16)]
        yield rng.choice(places), rng.randrange(8)


def outcomes_of(data: Path, places: list[tuple[int, int]]) -> list[int]:
    ran = subprocess.run(
        [sys.executable, "-c", USER, str(data.parent), str(MAP)],
        input=json.dumps(places),
        capture_output=True,
        text=True,
        check=True,
        timeout=100,
    )
    return [int(outcome) for outcome in json.loads(ran.stdout)]


def test_no_flipped_bit_that_passes_kills_a_process(image: Image, target: Path) -> None:
    target.write_bytes(image.data)
    passed, found = [], []
    for at, bit in flips(image, random.Random(5), 500):
        with damaged(target, at, bytes([image.data[at] ^ 1 << bit])):
            (found if examine(target) else passed).append((at, bit))
    assert len(found) > len(passed) > 50
    outcomes = outcomes_of(target, passed)
    assert [place for place, outcome in zip(passed, outcomes, strict=True) if outcome < 0] == []
