"""The radix index: neighbours, leaves, children."""

from collections.abc import Sequence

import pytest
from entries import ROOT, block, chain_of, key_of, store, token_bytes
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import text

from kvkeep.store import nodes
from kvkeep.store.hashing import PrefixHash
from kvkeep.store.nodes import Node
from kvkeep.store.repository import Repository
from kvkeep.store.writing import NewEntry


def all_nodes(repository: Repository) -> list[Node]:
    with repository.rows() as connection:
        return list(nodes.every(connection))


def set_used(repository: Repository, used: dict[PrefixHash, float]) -> None:
    with repository.index.write() as connection:
        for key, when in used.items():
            connection.execute(text("UPDATE node SET used = :when WHERE key = :key"), {"when": when, "key": key})


def pieces(*runs: Sequence[int]) -> list[NewEntry]:
    """Pieces of one tail behind the root."""
    entries: list[NewEntry] = []
    parent, before = ROOT, list[int]()
    for run in runs:
        entries.append(block(run, parent=parent, anchor=ROOT, before=before, start=len(before)))
        parent = key_of(entries[-1])
        before += run
    return entries


def test_a_node_comes_back_as_it_was_added(repository: Repository) -> None:
    entry = block([1, 2, 3, 4])
    space = store(repository, [entry])
    (found,) = all_nodes(repository)
    for field in ("key", "parent", "anchor", "path", "start", "n_tokens", "blob", "stored_bytes", "plain_bytes"):
        assert getattr(found, field) == getattr(entry.row, field)
    assert found.namespace_id == space.id
    assert found.used > 0


def test_own_tokens_are_the_last_of_the_path(repository: Repository) -> None:
    store(repository, pieces([1, 2], [3]))
    first, second = all_nodes(repository)
    assert (first.tokens, second.tokens) == (token_bytes([1, 2]), token_bytes([3]))
    assert second.path == token_bytes([1, 2, 3])


def test_by_keys_finds_those_that_are_there(repository: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvkeep.store.schema.MANY", 2)  # more keys than one statement takes
    entries = chain_of([1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12])
    store(repository, entries)
    keys = [key_of(entry) for entry in entries]
    with repository.rows() as connection:
        found = nodes.by_keys(connection, [PrefixHash(b"?" * 32), *keys])
        assert nodes.by_keys(connection, []) == {}
    assert set(found) == set(keys)
    assert [found[key].start for key in keys] == [0, 4, 8]


def test_neighbours_stand_on_both_sides(repository: Repository) -> None:
    store(repository, [block([1, 1]), block([1, 3]), block([1, 5])])
    with repository.rows() as connection:

        def around(*tokens: int) -> list[bytes]:
            return [node.path for node in nodes.neighbours(connection, ROOT, token_bytes(tokens))]

        assert around(1, 4) == [token_bytes([1, 3]), token_bytes([1, 5])]
        assert around(1, 3) == [token_bytes([1, 3]), token_bytes([1, 5])]
        assert around(0) == [token_bytes([1, 1])]
        assert around(9) == [token_bytes([1, 5])]


def test_neighbours_of_another_anchor_are_none(repository: Repository) -> None:
    store(repository, [block([1, 1])])
    with repository.rows() as connection:
        assert nodes.neighbours(connection, PrefixHash(b"?" * 32), token_bytes([1, 1])) == []


runs = st.lists(st.integers(-(2**31), 2**31 - 1) | st.integers(0, 2) | st.sampled_from([255, 256, 257]), min_size=1, max_size=4)


@given(stored=st.lists(runs, min_size=1, max_size=8, unique_by=tuple), wanted=runs)
@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_one_of_the_neighbours_shares_the_longest_prefix(
    repository: Repository, stored: list[list[int]], wanted: list[int]
) -> None:
    # Tokens are compared as little-endian bytes, negative ones too; the order is strange, the claim holds in any.
    anchor = PrefixHash(bytes(31) + bytes([len(all_nodes(repository)) % 251]))
    with repository.writing() as writing:
        writing.remove(all_nodes(repository))
    store(repository, [block(run, parent=anchor) for run in stored])

    def common(run: Sequence[int]) -> int:
        return next((i for i, (a, b) in enumerate(zip(run, wanted, strict=False)) if a != b), min(len(run), len(wanted)))

    with repository.rows() as connection:
        near = nodes.neighbours(connection, anchor, token_bytes(wanted))
    found = [next(run for run in stored if token_bytes(run) == node.path) for node in near]
    assert max(map(common, found)) == max(map(common, stored))
    with repository.writing() as writing:
        writing.remove(all_nodes(repository))


def test_slot_holds_everything_at_an_anchor_in_byte_order(repository: Repository) -> None:
    entries = [*pieces([7], [8]), block([3, 4])]
    store(repository, [*entries, block([1], parent=PrefixHash(b"?" * 32), anchor=key_of(entries[0]), before=[7])])
    with repository.rows() as connection:
        paths = [node.path for node in nodes.slot(connection, ROOT)]
    assert paths == [token_bytes([3, 4]), token_bytes([7]), token_bytes([7, 8])]
    with repository.writing() as writing:
        writing.remove(all_nodes(repository))


def test_leaves_are_those_without_children_oldest_first(repository: Repository) -> None:
    first, second, third = chain_of([1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12])
    lonely = block([50, 51, 52, 53])
    store(repository, [first, second, third, lonely])
    # The parents are older than the leaves, and must not go before them.
    set_used(repository, {key_of(first): 1.0, key_of(second): 2.0, key_of(lonely): 3.0, key_of(third): 4.0})
    with repository.rows() as connection:
        assert [leaf.key for leaf in nodes.oldest_leaves(connection, 10)] == [key_of(lonely), key_of(third)]
        assert [leaf.key for leaf in nodes.oldest_leaves(connection, 1)] == [key_of(lonely)]


def test_of_equally_old_leaves_the_deepest_goes_first(repository: Repository) -> None:
    shallow = block([50, 51, 52, 53])
    first, deep = chain_of([1, 2, 3, 4], [5, 6, 7, 8])
    store(repository, [shallow, first, deep])
    set_used(repository, {key_of(entry): 1.0 for entry in (shallow, first, deep)})
    with repository.rows() as connection:
        assert [leaf.start for leaf in nodes.oldest_leaves(connection, 10)] == [4, 0]


def test_children_besides_the_named_ones_are_seen(repository: Repository) -> None:
    first, second = chain_of([1, 2, 3, 4], [5, 6, 7, 8])
    store(repository, [first, second])
    child = all_nodes(repository)[1]
    with repository.rows() as connection:
        assert nodes.has_children(connection, key_of(first))
        assert not nodes.has_children(connection, key_of(first), besides=[child.id])
        assert nodes.has_children(connection, key_of(first), besides=[child.id + 1])
        assert not nodes.has_children(connection, key_of(second))


def test_every_names_parents_before_children(repository: Repository) -> None:
    entries = chain_of([1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12])
    store(repository, entries[:1])
    store(repository, entries[2:])
    store(repository, entries[1:2])
    assert [node.start for node in all_nodes(repository)] == [0, 4, 8]


@pytest.mark.parametrize("statement", [nodes._BELOW, nodes._ABOVE, nodes._OLD_LEAVES])
def test_hot_statements_use_an_index(repository: Repository, statement: object) -> None:
    said = str(statement)
    values = {"anchor": ROOT, "path": b"", "count": 1, "param_1": 1}
    wanted = {name: value for name, value in values.items() if f":{name}" in said}
    with repository.rows() as connection:
        steps = [row[-1] for row in connection.execute(text("EXPLAIN QUERY PLAN " + said), wanted)]
    assert steps
    assert all("USING" in step for step in steps if step.startswith(("SCAN", "SEARCH"))), steps
    assert not any(step == "USE TEMP B-TREE FOR ORDER BY" for step in steps), steps
