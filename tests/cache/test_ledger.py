"""What is known of a live context's positions. What isn't known must never be saved."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkeep.cache.ledger import Ledger


def ledger(*tokens: int, n_ctx: int = 32) -> Ledger:
    made = Ledger(n_ctx)
    made.extend(0, tokens)
    return made


def test_new_one_knows_nothing_and_doubts_nothing() -> None:
    made = Ledger(8)
    assert (len(made), made.proven, made.tokens.tolist()) == (0, True, [])


def test_decoded_tokens_are_known() -> None:
    made = ledger(1, 2)
    made.extend(2, [3])
    assert made.tokens.tolist() == [1, 2, 3]


def test_decoding_over_old_positions_forgets_what_came_after() -> None:
    made = ledger(1, 2, 3, 4, 5)
    made.extend(2, [9])
    assert made.tokens.tolist() == [1, 2, 9]


def test_behind_a_gap_nothing_is_known() -> None:
    # Position 2 holds an image that didn't come through as tokens.
    made = ledger(1, 2)
    made.extend(3, [4, 5])
    assert made.tokens.tolist() == [1, 2]
    made.extend(5, [6])
    assert made.tokens.tolist() == [1, 2]


def test_decoding_nothing_cuts_and_adds_nothing() -> None:
    made = ledger(1, 2, 3)
    made.extend(2, [])
    assert made.tokens.tolist() == [1, 2]


def test_cut_beyond_the_end_cuts_nothing() -> None:
    made = ledger(1, 2, 3)
    made.cut(9)
    assert made.tokens.tolist() == [1, 2, 3]


def test_doubt_stays_until_nothing_is_left_to_doubt() -> None:
    made = Ledger(8)
    made.set([1, 2, 3], proven=False)
    made.extend(3, [4])
    made.cut(1)
    assert not made.proven
    made.cut(0)
    assert made.proven


def test_set_replaces_everything() -> None:
    made = ledger(1, 2, 3)
    made.set(np.array([7], np.int32), proven=True)
    assert (made.tokens.tolist(), made.proven) == ([7], True)


def test_whole_context_can_be_known() -> None:
    assert len(ledger(*range(8), n_ctx=8)) == 8


@pytest.mark.parametrize(
    ("tokens", "at_most", "expected"),
    [
        ([1, 2, 3], 99, 3),
        ([1, 2, 3], 2, 2),
        ([1, 2, 9], 99, 2),
        ([9], 99, 0),
        ([], 99, 0),
        ([1, 2, 3, 4, 5], 99, 4),
        ([1], 0, 0),
    ],
)
def test_common_prefix_is_cut_at_every_bound(tokens: list[int], at_most: int, expected: int) -> None:
    assert ledger(1, 2, 3, 4).common(np.array(tokens, np.int32), at_most) == expected


steps = st.lists(
    st.one_of(
        st.tuples(st.just("extend"), st.integers(0, 12), st.lists(st.integers(0, 3), max_size=4)),
        st.tuples(st.just("cut"), st.integers(0, 12), st.just([])),
    ),
    max_size=12,
)


@given(steps)
@settings(deadline=None, max_examples=150)
def test_it_never_knows_more_than_a_dictionary_of_positions(script: list[tuple[str, int, list[int]]]) -> None:
    made = Ledger(64)
    positions: dict[int, int] = {}
    for step, at, tokens in script:
        positions = {position: token for position, token in positions.items() if position < at}
        if step == "cut":
            made.cut(at)
        else:
            made.extend(at, tokens)
            positions |= {at + i: token for i, token in enumerate(tokens)}
        known = made.tokens.tolist()
        assert known == [positions.get(i) for i in range(len(known))]
