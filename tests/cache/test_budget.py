"""Who has to go when the budget is full."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from entries import ROOT, block, chain_of, key_of, noise, opaque, recurrent, store, windowed
from synthetic import HYBRID, Made, dense_layout, hybrid_window_model, random_tokens, window_model

from kvkeep.cache import budget
from kvkeep.cache.prefix_cache import PrefixCache
from kvkeep.store import checkpoints, nodes, windows
from kvkeep.store.blobs import PAGE_BYTES
from kvkeep.store.checkpoints import Checkpoint
from kvkeep.store.entry import Entry
from kvkeep.store.errors import TooLarge
from kvkeep.store.frame import Kind
from kvkeep.store.hashing import PrefixHash
from kvkeep.store.nodes import Node
from kvkeep.store.registry import close_root, open_root
from kvkeep.store.repository import Repository
from kvkeep.store.writing import NewEntry

MB = 1 << 20


@pytest.fixture
def tight(root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Repository]:
    """A store whose budget leaves 11 MiB for blobs."""
    monkeypatch.setattr(budget, "largest", lambda _: 11 * MB)
    opened = open_root(root, 64 * MB)
    yield opened
    close_root(opened)


def entries(repository: Repository) -> list[Entry]:
    with repository.rows() as connection:
        return [*nodes.every(connection), *windows.every(connection), *checkpoints.every(connection)]


def keys(repository: Repository) -> set[PrefixHash]:
    return {budget.key_of(entry) for entry in entries(repository)}


def lonely(number: int, size: int = MB) -> NewEntry:
    return block([number, number, number, number], payload=noise(size, number))


def age(repository: Repository, *order: NewEntry) -> None:
    """The first one is the least recently used."""
    with repository.index.write() as connection:
        for used, entry in enumerate(order):
            for table in ("node", "window", "checkpoint"):
                connection.exec_driver_sql(f"UPDATE {table} SET used = ? WHERE blob = ?", (float(used), entry.row.blob))


def make_room(repository: Repository, incoming: int, *protect: NewEntry) -> list[Entry]:
    protected = {key_of(entry) for entry in protect}
    with repository.writing() as writing:
        evicted = budget.make_room(writing, incoming, protected)
        assert writing.blobs.used_bytes + incoming <= budget.largest(writing)
    return evicted


def test_where_there_is_room_nobody_goes(tight: Repository) -> None:
    store(tight, [lonely(i) for i in range(8)])
    assert make_room(tight, MB) == []
    assert len(entries(tight)) == 8


def test_no_more_go_than_must(tight: Repository) -> None:
    store(tight, [lonely(i) for i in range(10)])
    evicted = make_room(tight, 3 * MB)
    assert 1 <= len(evicted) <= 3
    assert len(entries(tight)) == 10 - len(evicted)


def test_the_least_recently_used_goes_first(tight: Repository) -> None:
    all_of_them = [lonely(i) for i in range(10)]
    store(tight, all_of_them)
    order = [all_of_them[i] for i in (3, 7, 1, 9, 0, 2, 4, 5, 6, 8)]
    age(tight, *order)
    evicted = make_room(tight, 4 * MB)
    assert {entry.blob for entry in evicted} == {entry.row.blob for entry in order[: len(evicted)]}
    assert len(evicted) >= 3


def test_touched_entries_outlive_untouched_ones(tight: Repository) -> None:
    all_of_them = [lonely(i) for i in range(10)]
    store(tight, all_of_them)
    age(tight, *all_of_them)
    first = next(entry for entry in entries(tight) if entry.blob == all_of_them[0].row.blob)
    tight.touch([first])
    tight.flush_touched()
    make_room(tight, 6 * MB)
    assert key_of(all_of_them[0]) in keys(tight)
    assert key_of(all_of_them[1]) not in keys(tight)


def test_leaves_go_before_what_they_stand_on_however_old_that_is(tight: Repository) -> None:
    line = chain_of(*([i] * 4 for i in range(5)), payload=noise(2 * MB))
    store(tight, line)
    age(tight, *line)
    evicted = make_room(tight, 5 * MB)
    starts = [entry.start for entry in evicted if isinstance(entry, nodes.Node)]
    assert starts == sorted(starts, reverse=True)
    assert keys(tight) == {key_of(entry) for entry in line[: 5 - len(evicted)]}
    assert evicted


def test_a_checkpoint_goes_by_its_age_too(tight: Repository) -> None:
    old, new = opaque([1], noise(4 * MB)), opaque([2], noise(MB, 1))
    blocks = [lonely(i) for i in range(5)]
    store(tight, [old, new, *blocks])
    age(tight, blocks[0], old, *blocks[1:], new)
    evicted = make_room(tight, 5 * MB)
    assert {entry.blob for entry in evicted} == {blocks[0].row.blob, old.row.blob}


def test_protected_ones_stay_however_old_they_are(tight: Repository) -> None:
    all_of_them = [lonely(i) for i in range(10)]
    store(tight, all_of_them)
    age(tight, *all_of_them)
    make_room(tight, 5 * MB, *all_of_them[:3])
    assert keys(tight) >= {key_of(entry) for entry in all_of_them[:3]}


def test_many_protected_ones_dont_hide_the_others(tight: Repository) -> None:
    protected = [lonely(i, 1000) for i in range(150)]
    others = [lonely(1000 + i) for i in range(10)]
    store(tight, [*protected, *others])
    age(tight, *protected, *others)
    assert make_room(tight, 3 * MB, *protected)
    assert len(keys(tight) & {key_of(entry) for entry in protected}) == 150


def test_many_protected_checkpoints_dont_hide_the_others(tight: Repository) -> None:
    protected = [opaque([i], noise(1000, i)) for i in range(100)]
    others = [opaque([1000 + i], noise(MB, i)) for i in range(10)]
    store(tight, [*protected, *others])
    age(tight, *protected, *others)
    with tight.writing() as writing:
        names = {entry.row.prefix for entry in protected if not hasattr(entry.row, "key")}
        assert budget.make_room(writing, 3 * MB, names)
    assert len(keys(tight) & names) == 100


def test_what_can_never_fit_evicts_nobody(tight: Repository) -> None:
    store(tight, [lonely(i) for i in range(10)])
    with tight.writing() as writing, pytest.raises(TooLarge, match="don't fit into"):
        budget.make_room(writing, budget.largest(writing) + 1)
    assert len(entries(tight)) == 10


def test_what_doesnt_fit_beside_the_protected_says_so(tight: Repository) -> None:
    all_of_them = [lonely(i) for i in range(10)]
    store(tight, all_of_them)
    with tight.writing() as writing, pytest.raises(TooLarge, match="beside what is protected"):
        budget.make_room(writing, 8 * MB, {key_of(entry) for entry in all_of_them})
    assert len(entries(tight)) == 10


def test_leftovers_of_dead_writers_go_before_an_error(tight: Repository) -> None:
    kept = lonely(0)
    left = [lonely(i) for i in range(1, 11)]
    store(tight, [kept])
    tight.blobs.put((entry.row.blob, entry.value) for entry in left)
    assert make_room(tight, 8 * MB, kept) == []
    assert len(tight.blobs) == 1


def test_everything_may_go(tight: Repository) -> None:
    store(tight, [lonely(i) for i in range(10)])
    with tight.writing() as writing:
        incoming = budget.largest(writing) - 64 * PAGE_BYTES
    assert len(make_room(tight, incoming)) == 10
    assert entries(tight) == []


@pytest.mark.parametrize(("stored", "pages"), [(0, 1), (1, 1), (4080, 1), (4081, 2), (100_000, 25)])
def test_footprint_is_whole_pages_with_a_header(stored: int, pages: int) -> None:
    assert budget.footprint(stored) == pages * PAGE_BYTES


def test_footprint_is_what_lmdb_really_takes(tight: Repository) -> None:
    sizes = [5_000, 20_000, 100_000, 1_000_000]
    for number, size in enumerate(sizes):
        before = tight.blobs.used_bytes
        entry = lonely(number, size)
        tight.blobs.put([(entry.row.blob, entry.value)])
        taken = tight.blobs.used_bytes - before
        assert budget.footprint(len(entry.value)) <= taken <= budget.footprint(len(entry.value)) + 2 * PAGE_BYTES
    with tight.writing() as writing:
        assert writing.sweep() == len(sizes)
    assert key_of(lonely(1)) != ROOT


# -- what stands on nodes ----------------------------------------------------------------------------------------------


def blobs(repository: Repository) -> set[bytes]:
    return {entry.blob for entry in entries(repository)}


def names(*entries: NewEntry) -> set[bytes]:
    return {entry.row.blob for entry in entries}


def test_checkpoints_and_windows_go_with_the_node_that_they_stand_on(tight: Repository) -> None:
    line = chain_of([1, 2, 3, 4], [5, 6, 7, 8], payload=noise(4 * MB))
    first, second = line
    above = [
        recurrent([5, 6], anchor=key_of(first), border=4),
        recurrent([], anchor=key_of(second), border=8),
        windowed([5, 6, 7, 8], skip=1, anchor=key_of(first), border=4),
        windowed([9], anchor=key_of(second), border=8),
    ]
    below = [recurrent([], anchor=key_of(first), border=4), recurrent([1, 2, 3]), windowed([1, 2, 3, 4])]
    store(tight, [*line, *above, *below])
    age(tight, second, *below, *above, first)
    make_room(tight, 3 * MB)
    assert blobs(tight) == names(first, *below)


def test_an_opaque_state_stands_on_nothing(tight: Repository) -> None:
    node, state = block([1, 2, 3, 4], payload=noise(8 * MB)), opaque([1, 2, 3])
    store(tight, [node, state])
    age(tight, node, state)
    make_room(tight, 4 * MB)
    assert blobs(tight) == names(state)


def test_a_node_takes_nothing_along_that_stands_on_another(tight: Repository) -> None:
    mine, theirs = block([1, 2, 3, 4]), block([1, 2, 9, 9], payload=noise(8 * MB))
    above = [recurrent([1, 2, 3]), recurrent([], anchor=key_of(mine), border=4), windowed([1, 2, 3, 4])]
    store(tight, [mine, theirs, *above])
    age(tight, theirs, mine, *above)
    make_room(tight, 4 * MB)
    assert blobs(tight) == names(mine, *above)


def test_a_node_takes_nothing_along_that_another_covers_too(tight: Repository) -> None:
    mine, theirs = block([1, 2, 3, 4]), block([1, 2, 9, 9], payload=noise(8 * MB))
    above = [recurrent([1, 2]), windowed([1, 2])]
    store(tight, [mine, theirs, *above])
    age(tight, theirs, mine, *above)
    make_room(tight, 4 * MB)
    assert blobs(tight) == names(mine, *above)


def test_windows_go_by_their_age_and_leave_their_nodes(tight: Repository) -> None:
    node = block([1, 2, 3, 4], payload=noise(MB))
    old, new = windowed([1, 2, 3, 4], payload=noise(4 * MB)), windowed([7], payload=noise(4 * MB, 1))
    store(tight, [node, old, new])
    age(tight, old, node, new)
    make_room(tight, 3 * MB)
    assert blobs(tight) == names(node, new)


def test_protected_checkpoints_and_windows_stay(tight: Repository) -> None:
    old, row = (
        recurrent([], anchor=PrefixHash(b"e" * 32), border=4, payload=noise(2 * MB)),
        windowed([7], payload=noise(2 * MB, 1)),
    )
    others = [lonely(i) for i in range(6)]
    store(tight, [old, row, *others])
    age(tight, old, row, *others)
    with tight.writing() as writing:
        budget.make_room(writing, 4 * MB, {budget.key_of(old.row), budget.key_of(row.row)})
    assert names(old, row) <= blobs(tight)


def uncovered(repository: Repository) -> list[Entry]:
    """Windows and checkpoints whose tokens no unbroken line of nodes has."""
    found = entries(repository)
    by_key = {node.key: node for node in found if isinstance(node, Node)}
    roots = {node.parent for node in by_key.values() if node.start == 0}

    def is_there(key: PrefixHash) -> bool:
        while key in by_key:
            key = by_key[key].parent
        return key in roots

    def covers(node: Node, entry: Entry) -> bool:
        return node.anchor == entry.anchor and node.path.startswith(entry.path) and is_there(node.key)

    needy = [entry for entry in found if not isinstance(entry, Node)]
    needy = [entry for entry in needy if not (isinstance(entry, Checkpoint) and entry.kind == Kind.OPAQUE)]
    return [
        entry
        for entry in needy
        if not (any(covers(node, entry) for node in by_key.values()) or (not entry.path and is_there(entry.anchor)))
    ]


# Values of several pages, as those of real models.
LARGE = replace(HYBRID, caches=(dense_layout(2, 64),), tensor_bytes=9000)
LARGE_WINDOW = replace(window_model(24, full=True), caches=LARGE.caches, window=dense_layout(2, 64))
LARGE_BOTH = replace(hybrid_window_model(40), window=dense_layout(2, 64), tensor_bytes=9000)


@pytest.mark.parametrize("made", [LARGE, LARGE_WINDOW, LARGE_BOTH], ids=["hybrid", "window", "hybrid with a window"])
@pytest.mark.parametrize("seed", range(3))
def test_nothing_outlives_its_nodes_and_what_was_just_saved_is_all_there(
    root: Path, monkeypatch: pytest.MonkeyPatch, made: Made, seed: int
) -> None:
    monkeypatch.setattr(budget, "largest", lambda _: 150 * PAGE_BYTES)
    repository = open_root(root, 64 * MB)
    cache = PrefixCache(repository, made.identity(), block_tokens=16)
    rng = Random(seed)
    chats: list[list[int]] = [[]]
    evicted = 0
    for number in range(25):
        trunk = rng.choice(chats[-4:])
        chat = trunk[: rng.randint(0, len(trunk))][:150] + random_tokens(rng.randint(1, 60), seed=1000 * seed + number)
        points = [made.point(chat[:at]) for at in rng.sample(range(1, len(chat) + 1), min(2, len(chat)))]
        points = [point for point in points if made.tensor_bytes and point.pos < len(chat)]
        evicted += cache.save(chat, made.state(chat), points=points).evicted
        chats.append(chat)
        assert uncovered(repository) == []
        assert cache.match(chat).length == len(chat)
    assert evicted > 20
    close_root(repository)


def test_the_nodes_of_another_chat_that_cover_a_new_checkpoint_stay_for_it(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository = open_root(root, 64 * MB)
    cache = PrefixCache(repository, LARGE.identity(), block_tokens=16)
    chat = random_tokens(42)
    for other in (chat, random_tokens(40, seed=1)):
        cache.save(other, LARGE.state(other))
    # Something must go for the new checkpoint: the other chat, although it is younger.
    room = repository.blobs.used_bytes
    monkeypatch.setattr(budget, "largest", lambda _: room)
    saved = cache.save(chat[:37], LARGE.state(chat[:37]))
    assert (saved.written, saved.evicted >= 1) == (1, True)
    assert cache.match(chat[:37]).length == 37
    assert uncovered(repository) == []
    close_root(repository)
