"""Where a prompt parts from what is known, by tokens alone."""

from pathlib import Path

import numpy as np
import pytest
from entries import FINGERPRINT, ROOT, add_namespace, block, chain_of, key_of, store

from kvkeep.cache.difference import Difference, Stored, Tokens, common, first
from kvkeep.cache.match import Source
from kvkeep.store.registry import close_root, open_root

BLOCK = 4


def ints(*tokens: int) -> Tokens:
    return np.array(tokens, np.int32)


RULES = np.arange(1000, 1400, dtype=np.int32)


def test_what_two_runs_have_in_common() -> None:
    assert common(ints(1, 2, 3), ints(1, 2, 4)) == 2
    assert common(ints(1, 2, 3), ints(1, 2)) == 2
    assert common(ints(), ints(1)) == 0
    assert common(ints(5), ints(1)) == 0


def test_a_changed_head_shows_in_what_follows() -> None:
    prompt, live = np.concatenate([ints(1, 2), RULES]), np.concatenate([ints(1, 3), RULES])
    found = first(prompt, live, None)
    assert found is not None
    assert (found.index, found.source, found.is_inserted) == (1, Source.LIVE, True)
    assert (found.tokens[0], found.known[0]) == (2, 3)


@pytest.mark.parametrize("shift", [0, 1, 5, 17])
def test_a_head_that_grows_shows_too(shift: int) -> None:
    prompt = np.concatenate([ints(1), np.arange(shift, dtype=np.int32) + 7, ints(2), RULES])
    found = first(prompt, np.concatenate([ints(1, 3), RULES]), None)
    assert found is not None
    assert found.is_inserted


def test_a_figure_that_changes_in_every_line_hides_nothing() -> None:
    """As the states of devices do, twelve tokens a line."""
    prompt = np.concatenate([ints(1, 2), RULES])
    live = np.concatenate([ints(1, 3), RULES])
    live[10::12] = 9
    found = first(prompt, live, None)
    assert found is not None
    assert found.is_inserted


def test_another_question_is_nothing_inserted() -> None:
    live = np.concatenate([RULES, np.arange(2000, 2200, dtype=np.int32)])
    found = first(np.concatenate([RULES, np.arange(3000, 3200, dtype=np.int32)]), live, None)
    assert found is not None
    assert (found.index, found.repeated, found.is_inserted) == (400, 0, False)


def test_a_few_tokens_say_nothing() -> None:
    found = Difference.between(ints(1, *range(50)), ints(9, *range(50)), 0, Source.LIVE)
    assert found.repeated >= 40
    assert not found.is_inserted


def test_to_go_on_is_no_difference() -> None:
    assert first(RULES, RULES[:100], None) is None
    assert first(RULES[:100], RULES, None) is None
    assert first(RULES, RULES[:0], None) is None


def test_the_store_knows_what_shares_most_and_what_follows_there(root: Path) -> None:
    repository = open_root(root)
    store(repository, chain_of([1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]))
    try:
        with repository.rows() as connection:

            def stored(*prompt: int) -> Stored:
                return Stored(connection, FINGERPRINT, BLOCK, ints(*prompt))

            inside = stored(1, 2, 3, 4, 5, 99)
            assert (inside.in_common, inside.following().tolist()) == (5, [6, 7, 8, 9, 10, 11, 12])
            border = stored(1, 2, 3, 4, 99, 98)
            assert (border.in_common, border.following().tolist()) == (4, [5, 6, 7, 8, 9, 10, 11, 12])
            beyond = stored(*range(1, 13), 77)
            assert (beyond.in_common, beyond.following().tolist()) == (12, [])
            nothing = stored(50, 51)
            assert (nothing.in_common, nothing.following().tolist()[:4]) == (0, [1, 2, 3, 4])
            assert Stored(connection, FINGERPRINT, BLOCK, ints()).in_common == 0
            found = first(ints(1, 2, 3, 4, 5, 99), ints(1, 2, 8), inside)
            assert found is not None
            assert (found.index, found.source, found.known[0]) == (5, Source.DISK, 6)
            assert first(ints(*range(1, 13), 77), ints(1, 2, 8), beyond) is None
    finally:
        close_root(repository)


def test_alternatives_that_are_alike_are_counted_once_each_whatever_pieces_they_have(root: Path) -> None:
    """With blocks of 40 tokens: a head of 4 and the same 36 behind it, one of them in two pieces; and others."""
    repository = open_root(root)
    space = add_namespace(repository, FINGERPRINT, 40)
    same, other = list(range(100, 136)), list(range(300, 336))
    piece = block([1, 4, 4, 4, *same[:20]])
    entries = [
        block([1, 7, 7, 7, *same]),
        block([1, 8, 8, 8, *same]),
        block([1, 6, 6, 6, *other]),
        piece,
        block(same[20:], parent=key_of(piece), start=24, anchor=ROOT, before=[1, 4, 4, 4, *same[:20]]),
    ]
    with repository.writing() as writing:
        writing.add(space.id, entries)
    try:
        with repository.rows() as connection:

            def alternatives(*prompt: int, at_most: int = 9) -> int:
                return Stored(connection, FINGERPRINT, 40, ints(*prompt)).alternatives(at_most)

            assert alternatives(1, 9, 9, 9, *same) == 3
            assert alternatives(1, 9, 9, 9, *same, at_most=2) == 2
            assert alternatives(1, 7, 7, 7, *same[:30]) == 2
            assert alternatives(1, 9, 9, 9, *range(500, 536)) == 0
    finally:
        close_root(repository)
