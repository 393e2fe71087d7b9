"""Prefixes and runs: what is shared, what goes with what, and rows that lead nowhere."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from entries import token_bytes
from sqlalchemy import text
from synthetic import ATTENTION, HYBRID, RECURRENT, SMALL, Made, fingerprint_of, random_tokens, state_of, window_model

from kvkeep.cache import pinned
from kvkeep.cache.listing import Listing, Run, listing
from kvkeep.cache.points import Point
from kvkeep.cache.prefix_cache import PrefixCache
from kvkeep.store import namespaces, nodes, rows
from kvkeep.store.entry import Entry
from kvkeep.store.nodes import Node
from kvkeep.store.registry import close_root, open_root
from kvkeep.store.repository import Repository

B = 16
SYSTEM = random_tokens(40)
FIRST = [*SYSTEM, *random_tokens(30, seed=1)]
SECOND = [*SYSTEM, *random_tokens(25, seed=2)]


def look(repository: Repository) -> Listing:
    with repository.rows() as connection:
        return listing(connection)


def every(repository: Repository) -> list[Entry]:
    with repository.rows() as connection:
        return list(rows.every(connection))


def keep(repository: Repository, made: Made, *chats: Sequence[int], points: Sequence[Point] = (), name: str = "model") -> None:
    cache = PrefixCache(repository, made.identity(name), block_tokens=B)
    for tokens in chats:
        cache.save(tokens, made.state(tokens), points=points)


def sql(repository: Repository, statement: str, **values: Any) -> None:
    with repository.index.write() as connection:
        connection.exec_driver_sql("PRAGMA defer_foreign_keys=ON")
        assert connection.execute(text(statement), values).rowcount == 1


def by_tokens(found: Listing) -> dict[bytes, Run]:
    return {run.all_tokens(): run for run in found.prefixes()}


def stored(entries: Sequence[Entry]) -> int:
    return sum(entry.stored_bytes for entry in entries)


def test_nothing_is_listed_of_nothing(repository: Repository) -> None:
    found = look(repository)
    assert (found.spaces, found.trees, found.strays, found.shared, found.prefixes()) == ([], [], [], [], [])


def test_one_chat_is_one_run(repository: Repository) -> None:
    keep(repository, ATTENTION, FIRST)
    [run] = look(repository).prefixes()
    assert (run.start, run.end, run.parts_at, run.above, run.beyond) == (0, 70, 0, None, [])
    assert run.all_tokens() == token_bytes(FIRST)
    assert run.own_bytes == run.path_bytes == stored(every(repository))
    assert run.space.fingerprint == fingerprint_of("model")
    last = max((entry for entry in every(repository) if isinstance(entry, Node)), key=lambda node: node.start)
    assert run.key == last.key


def test_chats_share_what_they_begin_with(repository: Repository) -> None:
    keep(repository, ATTENTION, FIRST, SECOND)
    found = look(repository)
    [trunk] = found.trees
    assert (trunk.start, trunk.end) == (0, 32)
    first, second = (by_tokens(found)[token_bytes(tokens)] for tokens in (FIRST, SECOND))
    assert trunk.beyond == [first, second]
    # Stored apart from the border on, though they part later.
    assert (first.start, first.parts_at) == (second.start, second.parts_at) == (32, 40)
    assert first.path == [trunk, first]
    assert first.path_bytes == trunk.own_bytes + first.own_bytes
    assert trunk.own_bytes + first.own_bytes + second.own_bytes == stored(every(repository))


def test_a_chat_that_ends_within_another_parts_where_it_ends(repository: Repository) -> None:
    keep(repository, ATTENTION, FIRST)
    keep(repository, ATTENTION, [*FIRST[:50], *random_tokens(30, seed=4)], FIRST[:20])
    found = by_tokens(look(repository))
    assert found[token_bytes(FIRST)].parts_at == 50
    assert token_bytes(FIRST[:20]) not in found, "it is a beginning of the others, and stored with them"


def test_pieces_of_one_tail_are_one_run(repository: Repository) -> None:
    keep(repository, ATTENTION, FIRST[:33], FIRST[:36], FIRST[:41])
    [run] = look(repository).prefixes()
    assert len(run.entries) == 5
    assert run.all_tokens() == token_bytes(FIRST[:41])
    assert run.parts_at == 0


def test_tails_that_part_within_their_pieces(repository: Repository) -> None:
    first = FIRST[:37]
    second = [*FIRST[:35], *random_tokens(4, seed=8)]
    keep(repository, ATTENTION, first, second)
    found = by_tokens(look(repository))
    assert found[token_bytes(first)].parts_at == found[token_bytes(second)].parts_at == 35


def test_models_are_told_apart(repository: Repository) -> None:
    keep(repository, ATTENTION, FIRST, name="one")
    keep(repository, ATTENTION, FIRST, SECOND, name="two")
    found = look(repository)
    assert {space.label for space in found.spaces} == {"one", "two"}
    assert len(found.prefixes()) == 3
    only = found.of([space for space in found.spaces if space.label == "one"])
    assert [run.space.label for run in only.prefixes()] == ["one"]


def test_the_last_used_comes_first_and_hits_are_counted(repository: Repository) -> None:
    keep(repository, ATTENTION, FIRST, SECOND)
    cache = PrefixCache(repository, ATTENTION.identity(), block_tokens=B)
    assert cache.restore(cache.match(FIRST), FIRST).length == len(FIRST)
    repository.flush_touched()
    found = look(repository).prefixes()
    assert [run.all_tokens() for run in found] == [token_bytes(FIRST), token_bytes(SECOND)]
    assert [run.hits for run in found] == [1, 0]
    assert found[0].used > found[1].used


# -- what stands on nodes ----------------------------------------------------------------------------------------------


def test_windows_go_with_their_nodes(repository: Repository) -> None:
    keep(repository, window_model(8, full=True), FIRST, SECOND)
    found = look(repository)
    assert found.strays == []
    assert stored(found.going_with({run.key for run in found.prefixes()})) == stored(every(repository))
    first = by_tokens(found)[token_bytes(FIRST)]
    gone = found.going_with({first.key})
    assert {type(entry).__name__ for entry in gone} == {"Node", "Window"}
    assert stored(gone) == first.own_bytes


def test_a_checkpoint_where_chats_part_stands_on_both(repository: Repository) -> None:
    point = HYBRID.point(SYSTEM)
    keep(repository, HYBRID, FIRST, points=[point])
    keep(repository, HYBRID, SECOND)
    found = look(repository)
    [(entry, holders)] = found.shared
    first, second = (by_tokens(found)[token_bytes(tokens)] for tokens in (FIRST, SECOND))
    assert holders == [first, second] or holders == [second, first]
    assert first.path_bytes == stored([*first.path[0].entries, *first.entries, entry])
    assert entry not in found.going_with({first.key})
    assert entry in found.going_with({first.key, second.key})
    assert stored(found.going_with({first.key, second.key})) == stored(every(repository))


@pytest.mark.parametrize("made", [ATTENTION, HYBRID, window_model(8), RECURRENT])
def test_everything_stored_is_listed_once(repository: Repository, made: Made) -> None:
    for tokens in (FIRST, SECOND, FIRST[:45], [*FIRST, *SECOND]):
        keep(repository, made, tokens, points=[made.point(tokens[:20])] if made.tensor_bytes else [])
    found = look(repository)
    listed = [entry for run in found.runs() for entry in run.entries] + [entry for entry, _ in found.shared] + found.strays
    assert sorted((type(entry).__name__, entry.id) for entry in listed) == sorted(
        (type(entry).__name__, entry.id) for entry in every(repository)
    )
    assert found.strays == []


def test_states_without_nodes_are_prefixes(repository: Repository) -> None:
    keep(repository, RECURRENT, FIRST, SECOND)
    found = look(repository).prefixes()
    assert {run.end for run in found} >= {len(FIRST), len(SECOND)}
    run = next(run for run in found if run.end == len(FIRST))
    # Only what comes after the block border is in its row.
    assert run.first_known == 64
    assert run.all_tokens() == token_bytes(FIRST[64:])
    assert run.path_bytes == run.own_bytes > 0


# -- what goes ---------------------------------------------------------------------------------------------------------


def test_shared_runs_go_with_the_last_that_stands_on_them(repository: Repository) -> None:
    keep(repository, ATTENTION, FIRST, SECOND)
    found = look(repository)
    [trunk] = found.trees
    first, second = (run.key for run in found.prefixes())
    assert not set(trunk.entries) & set(found.going_with({first}))
    assert set(trunk.entries) <= set(found.going_with({first, second}))
    assert found.going_with(set()) == found.going_with({trunk.key}) == []


def test_what_stands_on_something_goes_before_it(repository: Repository) -> None:
    keep(repository, HYBRID, FIRST, points=[HYBRID.point(SYSTEM)])
    found = look(repository)
    gone = found.going_with({run.key for run in found.prefixes()})
    starts = [entry.start for entry in gone if isinstance(entry, Node)]
    assert starts == sorted(starts, reverse=True)
    assert not any(isinstance(entry, Node) for entry in gone[: len(gone) - len(starts)])


def test_what_goes_leaves_a_sound_store(repository: Repository) -> None:
    keep(repository, HYBRID, FIRST, points=[HYBRID.point(SYSTEM)])
    keep(repository, HYBRID, SECOND)
    found = look(repository)
    with repository.writing() as writing:
        writing.remove(found.going_with({by_tokens(found)[token_bytes(FIRST)].key}))
    left = look(repository)
    assert [run.all_tokens() for run in left.prefixes()] == [token_bytes(SECOND)]
    assert left.strays == []


def test_pins_show(repository: Repository) -> None:
    keep(repository, ATTENTION, FIRST, SECOND)
    with repository.rows() as connection:
        [space] = namespaces.every(connection)
    with repository.writing() as writing:
        pinned.pin(writing, space, token_bytes(FIRST))
    found = look(repository)
    assert [run.all_tokens() for run in found.prefixes() if run.pinned] == [token_bytes(FIRST)]
    assert found.trees[0].pinned


# -- damage ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def loose(tmp_path: Path) -> Iterator[Repository]:
    """A store that isn't checked when the test ends."""
    opened = open_root(tmp_path / "loose", 64 << 20)
    yield opened
    close_root(opened)


@pytest.fixture
def damaged(loose: Repository) -> Repository:
    cache = PrefixCache(loose, ATTENTION.identity(), block_tokens=B)
    for tokens in (FIRST, SECOND):
        cache.save(tokens, state_of(SMALL, tokens))
    return loose


def node_at(repository: Repository, start: int) -> Node:
    with repository.rows() as connection:
        return next(node for node in nodes.every(connection) if node.start == start)


@pytest.mark.parametrize("start", [0, 16, 32])
def test_without_a_node_what_stands_on_it_is_stray(damaged: Repository, start: int) -> None:
    sql(damaged, "DELETE FROM node WHERE id = :id", id=node_at(damaged, start).id)
    found = look(damaged)
    expected = [node for node in every(damaged) if isinstance(node, Node)]
    listed = [entry for run in found.runs() for entry in run.entries]
    assert len(listed) + len(found.strays) == len(expected)
    assert all(isinstance(entry, Node) and entry.start > start for entry in found.strays)
    assert found.strays


def test_a_circle_is_stray(damaged: Repository) -> None:
    upper, lower = node_at(damaged, 16), node_at(damaged, 0)
    sql(damaged, "UPDATE node SET parent = :key WHERE id = :id", key=upper.key, id=lower.id)
    assert look(damaged).prefixes() == []
    sql(damaged, "UPDATE node SET parent = key WHERE id = :id", id=lower.id)
    assert look(damaged).prefixes() == []
    assert len(look(damaged).strays) == len(every(damaged))


@pytest.mark.parametrize("field", ["start", "n_tokens", "parent", "anchor", "path", "key", "namespace_id"])
def test_any_flip_is_survived(damaged: Repository, field: str) -> None:
    for victim in every(damaged):
        sound = getattr(victim, field)
        for flip in (1, 64, 1 << 20):
            value = sound ^ flip if isinstance(sound, int) else bytes([sound[0] ^ (flip & 0xFF or 1)]) + sound[1:]
            with damaged.index.write() as connection:
                connection.exec_driver_sql("PRAGMA defer_foreign_keys=ON")
                connection.execute(text(f"UPDATE node SET {field} = :value WHERE id = :id"), {"value": value, "id": victim.id})
                found = listing(connection)
                assert sum(len(run.entries) for run in found.runs()) + len(found.strays) == len(every(damaged))
                found.going_with({run.key for run in found.prefixes()})
                connection.execute(text(f"UPDATE node SET {field} = :value WHERE id = :id"), {"value": sound, "id": victim.id})


def test_a_long_chat_with_a_thousand_forks_is_listed(loose: Repository) -> None:
    """Deeper than Python calls itself."""
    cache = PrefixCache(loose, ATTENTION.identity(), block_tokens=1)
    chat = random_tokens(1500)
    cache.save(chat, state_of(SMALL, chat))
    template = node_at(loose, 1499)
    with loose.index.write() as connection:
        for node in list(nodes.every(connection)):
            connection.execute(
                text(
                    "INSERT INTO node (namespace_id, key, parent, anchor, path, start, n_tokens, blob, stored_bytes, "
                    "plain_bytes, created, used) "
                    "VALUES (:space, randomblob(32), :parent, :parent, :path, :start, 1, :blob, 1, 1, 0, 0)"
                ),
                {
                    "space": node.namespace_id,
                    "parent": node.parent,
                    "path": token_bytes([40_000]),
                    "start": node.start,
                    "blob": template.blob,
                },
            )
    found = look(loose)
    assert len(found.prefixes()) == 1501
    assert found.strays == []
