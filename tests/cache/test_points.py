"""Checkpoints in memory: where they are taken, which are kept, and which of them the store has."""

from itertools import pairwise
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvkeep.cache.points import MAX_POINTS, NEWEST, Point, Points, schedule, surplus


def point(pos: int, size: int = 1) -> Point:
    return Point(pos, np.full(size, pos % 256, np.uint8))


def points_at(*positions: int, max_points: int = 100, max_bytes: int = 1 << 20) -> Points:
    points = Points(max_points, max_bytes)
    for pos in positions:
        points.add(point(pos))
    return points


# -- surplus -----------------------------------------------------------------------------------------------------------

ascending = st.lists(st.integers(1, 10_000), min_size=1, max_size=60, unique=True).map(sorted)


@given(positions=ascending, max_count=st.integers(1, 40), max_bytes=st.integers(1, 5000), seed=st.integers(0, 99))
@settings(deadline=None, max_examples=300)
def test_surplus_keeps_the_bounds_and_the_newest(positions: list[int], max_count: int, max_bytes: int, seed: int) -> None:
    rng = Random(seed)
    sizes = [rng.randint(1, 300) for _ in positions]
    drop = surplus(positions, sizes, max_count, max_bytes)
    assert drop == sorted(set(drop))
    kept = [i for i in range(len(positions)) if i not in drop]
    # One always stays, however large it is.
    assert len(kept) <= max_count
    assert sum(sizes[i] for i in kept) <= max_bytes or len(kept) == 1
    newest = list(range(len(positions)))[-min(len(kept), NEWEST) :]
    assert kept[-len(newest) :] == newest


@given(positions=ascending, max_count=st.integers(1, 40))
@settings(deadline=None, max_examples=200)
def test_surplus_drops_no_more_than_it_must(positions: list[int], max_count: int) -> None:
    drop = surplus(positions, [1] * len(positions), max_count, 1 << 40)
    assert len(drop) == max(0, len(positions) - max_count)


def largest_gap(positions: list[int]) -> int:
    return max(b - a for a, b in pairwise([0, *positions]))


@pytest.mark.parametrize(("count", "max_count"), [(40, 32), (64, 32), (100, 32), (1000, 32), (500, 8)])
def test_surplus_leaves_a_spread_over_the_whole_length(count: int, max_count: int) -> None:
    positions = [256 * (i + 1) for i in range(count)]
    drop = set(surplus(positions, [1] * count, max_count, 1 << 40))
    kept = [pos for i, pos in enumerate(positions) if i not in drop]
    ideal = positions[-NEWEST] / (max_count - NEWEST + 1)
    # Gaps are halved or not; they can't be made to measure.
    assert largest_gap(kept) <= 2 * ideal + 256


@pytest.mark.parametrize("seed", range(5))
def test_points_that_come_one_after_the_other_stay_spread(seed: int) -> None:
    rng = Random(seed)
    points = Points(max_points=MAX_POINTS)
    pos = 0
    for _ in range(1000):
        pos += rng.randint(1, 100)
        points.add(point(pos))
        assert len(points) <= MAX_POINTS
    ideal = pos / (MAX_POINTS - NEWEST + 1)
    assert largest_gap(points.positions) <= 2.5 * ideal
    assert points.positions[-1] == pos


# -- schedule ----------------------------------------------------------------------------------------------------------


@given(start=st.integers(0, 500), length=st.integers(1, 3000), turn=st.none() | st.integers(0, 4000), step=st.integers(1, 600))
@settings(deadline=None, max_examples=300)
def test_schedule_leaves_no_edit_further_from_a_checkpoint_than_a_step(
    start: int, length: int, turn: int | None, step: int
) -> None:
    end = start + length
    positions = schedule(start, end, turn, step)
    assert positions == sorted(set(positions))
    assert all(start < at < end for at in positions)
    if end - 1 > start:
        assert positions[-1] == end - 1, "the last token is decoded again when the prompt comes again"
    if turn is not None and start < turn < end:
        assert turn in positions
    # One that lies close to a fixed one is left out.
    assert all(b - a <= step + max(1, step // 4) for a, b in pairwise([start, *positions]))


@given(start=st.integers(0, 500), length=st.integers(1, 3000), turn=st.none() | st.integers(0, 4000), step=st.integers(8, 600))
@settings(deadline=None, max_examples=200)
def test_schedule_takes_nothing_twice_at_nearly_the_same_place(start: int, length: int, turn: int | None, step: int) -> None:
    end = start + length
    fixed = {end - 1, turn}
    positions = schedule(start, end, turn, step)
    close = [(a, b) for a, b in pairwise(positions) if b - a < step // 4]
    assert all({a, b} <= fixed for a, b in close)
    assert len(positions) <= length // step + 2


def test_schedule_of_one_token_is_empty() -> None:
    assert schedule(10, 11, None, 256) == []
    assert schedule(10, 11, 10, 256) == []
    assert schedule(0, 0, None, 256) == []


def test_schedule_of_a_long_prompt() -> None:
    assert schedule(0, 1000, 700, 256) == [256, 512, 700, 768, 999]
    assert schedule(0, 1000, 760, 256) == [256, 512, 760, 999]
    assert schedule(600, 1000, 500, 256) == [856, 999]


# -- points ------------------------------------------------------------------------------------------------------------


def test_points_are_ordered_and_the_deepest_that_fits_is_the_best() -> None:
    points = points_at(30, 10, 20)
    assert points.positions == [10, 20, 30]
    for length, expected in ((9, None), (10, 10), (19, 10), (20, 20), (29, 20), (30, 30), (99, 30)):
        best = points.best(length)
        assert (best and best.pos) == expected
    assert Points().best(100) is None


def test_what_comes_behind_a_cut_is_gone() -> None:
    points = points_at(10, 20, 30)
    points.cut(20)
    assert points.positions == [10, 20]
    points.cut(19)
    assert points.positions == [10]
    points.cut(0)
    assert len(points) == 0


def test_what_was_saved_is_not_saved_again() -> None:
    points = points_at(10, 20)
    first = points.unsaved()
    assert [found.pos for found in first] == [10, 20]
    points.add(point(30))
    points.saved(first)
    assert [found.pos for found in points.unsaved()] == [30]
    points.saved(points.unsaved())
    assert points.unsaved() == []
    assert points.positions == [10, 20, 30]


def test_what_somebody_is_about_to_store_is_not_new_and_not_saved_yet() -> None:
    points = points_at(10, 20)
    assert points.has_new
    first = points.unsaved()
    points.handed_over(first)
    assert not points.has_new
    assert points.unsaved() == first, "nobody knows yet what becomes of it"
    points.add(point(30))
    assert points.has_new
    points.saved(first)
    assert [found.pos for found in points.unsaved()] == [30]
    # Of another at the same position nothing was stored.
    points.add(point(20, size=3))
    points.saved(first)
    assert [found.pos for found in points.unsaved()] == [20, 30]


def test_what_was_handed_over_and_cut_is_forgotten() -> None:
    points = points_at(10, 20)
    points.handed_over(points.unsaved())
    points.cut(10)
    assert [found.pos for found in points.unsaved()] == [10]
    points.cut(5)
    assert (points.unsaved(), points.has_new) == ([], False)


def test_another_at_the_same_position_takes_its_place_and_is_new() -> None:
    points = points_at(10, 20)
    points.saved(points.unsaved())
    other = point(20, size=7)
    points.add(other)
    assert points.positions == [10, 20]
    assert points.best(20) is other
    assert points.unsaved() == [other]


def test_a_position_that_comes_again_behind_a_cut_is_new() -> None:
    points = points_at(10, 20)
    points.saved(points.unsaved())
    points.cut(10)
    points.add(point(20))
    assert [found.pos for found in points.unsaved()] == [20]


def test_one_that_was_dropped_is_not_to_be_saved() -> None:
    points = points_at(*range(10, 200, 10), max_points=4)
    assert [found.pos for found in points.unsaved()] == points.positions
    assert len(points) == 4


def test_bytes_are_bounded_too() -> None:
    points = Points(max_points=100, max_bytes=1000)
    for pos in range(1, 50):
        points.add(point(pos, size=300))
        assert sum(found.data.nbytes for found in points.unsaved()) <= 1000
    assert points.positions[-NEWEST:] == [47, 48, 49]
    points.add(point(50, size=999))
    assert points.positions == [50]


@given(st.lists(st.tuples(st.sampled_from(["add", "cut", "save"]), st.integers(1, 40), st.integers(1, 50)), max_size=40))
@settings(deadline=None, max_examples=200)
def test_points_keep_their_bounds_whatever_happens(steps: list[tuple[str, int, int]]) -> None:
    points = Points(max_points=5, max_bytes=120)
    saved: dict[int, Point] = {}
    for what, pos, size in steps:
        if what == "add":
            points.add(point(pos, size))
            saved.pop(pos, None)
        elif what == "cut":
            points.cut(pos)
            saved = {at: old for at, old in saved.items() if at <= pos}
        else:
            saved |= {found.pos: found for found in points.unsaved()}
            points.saved(points.unsaved())
        assert points.positions == sorted(set(points.positions))
        assert len(points) <= 5
        kept = [points.best(at) for at in points.positions]
        assert sum(found.data.nbytes for found in kept if found is not None) <= 120
        assert {found.pos for found in points.unsaved()} == set(points.positions) - set(saved)
