"""The walk down the index: as far as tokens agree, and never further."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from entries import FINGERPRINT, ROOT, block, key_of, store, token_bytes

from kvkeep.cache import radix
from kvkeep.cache.match import Step
from kvkeep.store import nodes
from kvkeep.store.hashing import PrefixHash, chain
from kvkeep.store.nodes import Node
from kvkeep.store.repository import Repository
from kvkeep.store.writing import NewEntry

B = 4


def walk(repository: Repository, tokens: Sequence[int]) -> list[tuple[int, int]]:
    """Position and number of tokens of every step."""
    data = token_bytes(tokens)
    borders = [ROOT, *chain(FINGERPRINT, data, B * 4)]
    with repository.rows() as connection:
        steps = radix.walk(connection, borders, data, B)
    taken = b"".join(node.tokens[: take * 4] for node, take in steps)
    assert taken == data[: len(taken)]
    return [(node.start, take) for node, take in steps]


def chat(*runs: Sequence[int]) -> list[NewEntry]:
    """Full blocks, then pieces of a tail."""
    entries: list[NewEntry] = []
    anchor = parent = ROOT
    start, before = 0, list[int]()
    for run in runs:
        entries.append(block(run, parent=parent, anchor=anchor, before=before, start=start))
        parent, start = key_of(entries[-1]), start + len(run)
        before += run
        if len(before) == B:
            anchor, before = parent, []
    return entries


def remove(repository: Repository, *numbers: int) -> None:
    """Remove nodes by their place in the order of insertion."""
    with repository.rows() as connection:
        found = sorted(nodes.every(connection), key=lambda node: node.id)
    with repository.writing() as writing:
        writing.remove([found[number] for number in numbers])


def everything(repository: Repository) -> list[Node]:
    with repository.rows() as connection:
        return list(nodes.every(connection))


def test_nothing_stored_is_no_steps(repository: Repository) -> None:
    assert walk(repository, [1, 2, 3]) == []
    assert walk(repository, []) == []


@pytest.mark.parametrize(
    ("prompt", "steps"),
    [
        ([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11], [(0, 4), (4, 4), (8, 2), (10, 1)]),
        ([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13], [(0, 4), (4, 4), (8, 2), (10, 1)]),
        ([1, 2, 3, 4, 5, 6, 7, 8, 9, 10], [(0, 4), (4, 4), (8, 2)]),
        ([1, 2, 3, 4, 5, 6, 7, 8, 9], [(0, 4), (4, 4), (8, 1)]),
        ([1, 2, 3, 4, 5, 6, 7, 8], [(0, 4), (4, 4)]),
        ([1, 2, 3, 4, 5, 6, 7], [(0, 4), (4, 3)]),
        ([1, 2, 3, 4, 5, 99, 7, 8], [(0, 4), (4, 1)]),
        ([1, 2, 3], [(0, 3)]),
        ([1], [(0, 1)]),
        ([1, 99], [(0, 1)]),
        ([99, 2], []),
    ],
)
def test_as_far_as_the_tokens_agree(repository: Repository, prompt: list[int], steps: list[tuple[int, int]]) -> None:
    store(repository, chat([1, 2, 3, 4], [5, 6, 7, 8], [9, 10], [11]))
    assert walk(repository, prompt) == steps


def test_of_several_chats_the_one_that_shares_most(repository: Repository) -> None:
    store(repository, [*chat([1, 2, 3, 4]), *chat([1, 2, 9, 9]), *chat([1, 3, 3, 4])])
    assert walk(repository, [1, 2, 9, 5]) == [(0, 3)]
    assert walk(repository, [1, 3, 3, 3]) == [(0, 3)]
    assert walk(repository, [1, 9]) == [(0, 1)]


def test_a_gap_ends_the_run(repository: Repository) -> None:
    store(repository, chat([1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]))
    remove(repository, 1)
    assert walk(repository, range(1, 13)) == [(0, 4)]
    with repository.writing() as writing:
        writing.remove(everything(repository))


def test_a_removed_piece_hides_what_stands_on_it(repository: Repository) -> None:
    store(repository, chat([1, 2], [3]))
    remove(repository, 0)
    assert walk(repository, [1, 2, 3]) == []
    with repository.writing() as writing:
        writing.remove(everything(repository))


def test_a_removed_piece_doesnt_hide_its_neighbours(repository: Repository) -> None:
    # In byte order the orphan [1, 2, 3] stands between the prompts below and the block that shares tokens with them.
    store(repository, [*chat([1, 2], [3]), *chat([1, 2, 3, 9])])
    remove(repository, 0)
    assert walk(repository, [1, 2, 3]) == [(0, 3)]
    assert walk(repository, [1, 2, 1]) == [(0, 2)]
    with repository.writing() as writing:
        writing.remove([node for node in everything(repository) if node.n_tokens == 1])


def test_two_divisions_of_the_same_tail_are_each_whole(repository: Repository) -> None:
    store(repository, [*chat([1, 2], [3]), *chat([1, 2, 3])])
    assert sum(take for _, take in walk(repository, [1, 2, 3])) == 3


def node(entry: NewEntry, **changes: object) -> Node:
    row = entry.row
    assert not isinstance(row, Node)
    values = {name: getattr(row, name) for name in row.__dataclass_fields__}
    return replace(Node(**values, id=1, namespace_id=1, used=0.0), **changes)  # type: ignore[arg-type]


BLOCK = node(chat([1, 2, 3, 4])[0])
PIECES = [node(entry) for entry in chat([1, 2], [3])]


def test_a_block_is_recognised() -> None:
    assert radix.is_block(BLOCK, ROOT, token_bytes([1, 2, 3, 4]), 0)


@pytest.mark.parametrize(
    "changes",
    [
        {"parent": PrefixHash(b"?" * 32)},
        {"anchor": PrefixHash(b"?" * 32)},
        {"path": token_bytes([1, 2, 3, 5])},
        {"path": token_bytes([9, 1, 2, 3, 4])},
        {"start": 4},
        {"n_tokens": 3},
        {"n_tokens": 4 + 64},
        {"n_tokens": 0},
        {"n_tokens": -4},
    ],
    ids=str,
)
def test_a_damaged_or_colliding_row_is_no_block(changes: dict[str, object]) -> None:
    assert not radix.is_block(replace(BLOCK, **changes), ROOT, token_bytes([1, 2, 3, 4]), 0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("number", "changes"),
    [
        (0, {"n_tokens": 3}),
        (0, {"n_tokens": 2 + (1 << 30)}),
        (0, {"n_tokens": -2}),
        (0, {"n_tokens": 0}),
        (0, {"start": 1}),
        (0, {"path": token_bytes([1, 9])}),
        (1, {"n_tokens": 2}),
        (1, {"path": token_bytes([1, 9, 3])}),
        (1, {"path": token_bytes([1, 2, 2, 3])}),
        (1, {"start": 9}),
    ],
    ids=str,
)
def test_a_damaged_piece_is_never_taken_for_more_than_it_has(number: int, changes: dict[str, object]) -> None:
    line = list(PIECES)
    line[number] = replace(line[number], **changes)  # type: ignore[arg-type]
    steps: list[Step] = radix.cut_to(line, token_bytes([1, 2, 3]), 0)
    assert radix.covered(steps) < 3
    assert all(0 < take <= 2 for _, take in steps)


def test_steps_are_told_apart_by_whether_they_are_whole() -> None:
    steps = radix.cut_to(PIECES, token_bytes([1, 2, 9]), 0)
    assert radix.whole(steps) == [PIECES[0]]
    assert radix.covered(steps) == 2
    assert radix.whole(radix.cut_to(PIECES, token_bytes([1]), 0)) == []


@pytest.mark.parametrize(
    ("a", "b", "common"),
    [
        ([], [], 0),
        ([1], [], 0),
        ([1, 2], [1, 2, 3], 2),
        ([1, 2, 3], [1, 2, 4], 2),
        ([1], [2], 0),
        ([256], [1], 0),
        # The same first bytes, but not the same token.
        ([0x01020304], [0x7F020304], 0),
        ([-1, -2], [-1, -3], 1),
    ],
)
def test_common_tokens_are_whole_tokens(a: list[int], b: list[int], common: int) -> None:
    assert radix.common_tokens(token_bytes(a), token_bytes(b)) == common
    assert radix.common_tokens(token_bytes(b), token_bytes(a)) == common
