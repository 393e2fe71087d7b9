"""Namespaces: created once, counted right, never mixed up."""

import pytest
from entries import FINGERPRINT, OTHER_FINGERPRINT, ROOT, add_namespace, block, chain_of, key_of, opaque, store

from kvkeep.store import namespaces, rows
from kvkeep.store.hashing import PrefixHash
from kvkeep.store.repository import Repository
from kvkeep.store.writing import NewEntry

BLOCKS = chain_of([1, 2, 3, 4], [5, 6, 7, 8])
OTHER_ROOT = PrefixHash(OTHER_FINGERPRINT)


def test_namespace_is_created_once_and_keeps_its_block_size(repository: Repository) -> None:
    first = add_namespace(repository, block_tokens=4)
    assert add_namespace(repository, block_tokens=64) == first
    assert (first.fingerprint, first.block_tokens, first.prefill_rate) == (FINGERPRINT, 4, None)


def test_unknown_fingerprint_is_none(repository: Repository) -> None:
    add_namespace(repository)
    with repository.rows() as connection:
        assert namespaces.find(connection, OTHER_FINGERPRINT) is None


def test_measured_speeds_are_remembered_one_by_one(repository: Repository) -> None:
    space = add_namespace(repository)
    other = add_namespace(repository, OTHER_FINGERPRINT)
    with repository.index.write() as connection:
        namespaces.measured(connection, space, 100.0, None)
        namespaces.measured(connection, space, None, 5e8)
    with repository.rows() as connection:
        found = namespaces.find(connection, FINGERPRINT)
        assert found is not None
        assert (found.prefill_rate, found.restore_rate) == (100.0, 5e8)
        assert namespaces.find(connection, OTHER_FINGERPRINT) == other


@pytest.mark.parametrize("entry", [block([1, 2, 3, 4], parent=OTHER_ROOT), opaque([1, 2], root=OTHER_ROOT)])
def test_what_another_model_has_is_seen_whatever_it_is(repository: Repository, entry: NewEntry) -> None:
    space = add_namespace(repository)
    store(repository, [entry], OTHER_FINGERPRINT)
    with repository.rows() as connection:
        assert namespaces.any_other(connection, FINGERPRINT)
        assert not namespaces.any_other(connection, OTHER_FINGERPRINT)
        assert not rows.holds_any(connection, space.id)


def test_usage_counts_blocks_tails_checkpoints_and_bytes(repository: Repository) -> None:
    tail = block([9, 10], parent=key_of(BLOCKS[1]), start=8)
    entries = [*BLOCKS, tail, opaque([1, 2])]
    store(repository, entries)
    store(repository, [block([1, 2, 3, 4], parent=OTHER_ROOT)], OTHER_FINGERPRINT)
    with repository.rows() as connection:
        usage = {found.fingerprint: found for found in namespaces.usage(connection)}
    mine = usage[FINGERPRINT]
    assert (mine.blocks, mine.tails, mine.checkpoints, mine.tokens) == (2, 1, 1, 10)
    assert mine.stored_bytes == sum(len(entry.value) for entry in entries)
    assert mine.plain_bytes == sum(entry.row.plain_bytes for entry in entries)
    assert mine.ingredients == {"n_layer": "2"}
    assert usage[OTHER_FINGERPRINT].blocks == 1


def test_usage_of_an_empty_namespace_is_zero(repository: Repository) -> None:
    add_namespace(repository)
    with repository.rows() as connection:
        (found,) = namespaces.usage(connection)
    assert (found.blocks, found.tails, found.checkpoints, found.tokens, found.stored_bytes) == (0, 0, 0, 0, 0)
    assert found.fingerprint == ROOT


def test_ids_name_every_namespace(repository: Repository) -> None:
    spaces = [add_namespace(repository), add_namespace(repository, OTHER_FINGERPRINT)]
    with repository.rows() as connection:
        assert namespaces.ids(connection) == {space.fingerprint: space.id for space in spaces}
