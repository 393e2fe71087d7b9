"""The same calls on llama-cpp-python's own caches and on those of the same name here: what code can see, line by line.

Where a line has one outcome, both must have it. Where it has two, the difference is deliberate, and the line says why.
llama-cpp-python 0.3.36 has no trie cache; a fork has one, and its column holds what is documented of it.
"""

import copy
import inspect
import logging
import pickle  # noqa: TID251 - to be pickled is what is tested
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from llama_cpp import LlamaState, llama_cache
from llamas import load, random_tokens

from kvkeep import cache as kvkeep_cache
from kvkeep.cache import BaseLlamaCache, LlamaCache, LlamaDiskCache, LlamaRAMCache, LlamaTrieCache

SYSTEM = random_tokens(40)
A = (*SYSTEM, *random_tokens(20, seed=1))
B = (*SYSTEM, *random_tokens(25, seed=2))
LONG_A = (*A, *random_tokens(30, seed=3))
OTHER = (2, *random_tokens(62, seed=4))
GONE = object()
"""The stock class doesn't have it."""


@pytest.fixture(scope="module")
def states(dense: str) -> dict[tuple[int, ...], LlamaState]:
    """Real states, by the tokens that they hold."""
    llm = load(dense, n_ctx=256)
    found = {}
    for tokens in (A, B, LONG_A, OTHER, tuple(SYSTEM)):
        llm.reset()
        llm.eval(list(tokens))
        found[tokens] = llm.save_state()
        # Without logits_all they are what that memory held before.
        found[tokens].scores[:] = 0
    llm.close()
    return found


class Calls:
    """Calls on one cache, with outcomes that can be compared."""

    def __init__(self, cache: Any, states: dict[tuple[int, ...], LlamaState]) -> None:
        self.cache = cache
        self.states = states

    def put(self, *keys: tuple[int, ...]) -> None:
        for key in keys:
            self.cache[key] = self.states[key]

    def get(self, key: Any) -> Any:
        """The tokens of what a key reads, or the error."""
        try:
            item = self.cache[key]
        except KeyError as error:
            return str(error.args[0])
        return tuple(item.input_ids[: item.n_tokens].tolist())


Outcome = Any


@dataclass(frozen=True)
class Line:
    """One behaviour.

    Attributes:
        name: what is looked at.
        calls: the calls; what it returns is the outcome.
        stock: the outcome of the stock class; that of the trie is as documented.
        ours: the outcome here, if it is another one on purpose.
        why: the reason for that.
        capacity: of the cache, or a function of the states.
    """

    name: str
    calls: Callable[[Calls], Outcome]
    stock: Outcome
    ours: Outcome = None
    why: str = ""
    capacity: Callable[[dict[tuple[int, ...], LlamaState]], int] = lambda states: 1 << 30

    @property
    def expected(self) -> Outcome:
        return self.ours if self.why else self.stock


def both(first: Callable[[Calls], Any], *then: Callable[[Calls], Any]) -> Callable[[Calls], Outcome]:
    """Several calls; the outcome is that of the last one."""

    def run(calls: Calls) -> Outcome:
        outcome = first(calls)
        for call in then:
            outcome = call(calls)
        return outcome

    return run


def put(*keys: tuple[int, ...]) -> Callable[[Calls], None]:
    return lambda calls: calls.put(*keys)


def get(key: Any) -> Callable[[Calls], Any]:
    return lambda calls: calls.get(key)


def holds(*keys: Any) -> Callable[[Calls], list[bool]]:
    return lambda calls: [key in calls.cache for key in keys]


def longest(key: tuple[int, ...]) -> Callable[[Calls], Any]:
    return lambda calls: calls.cache._find_longest_prefix_key(key)


def room_for_two(states: dict[tuple[int, ...], LlamaState]) -> int:
    """Of A, B and OTHER, or LONG_A and one of them."""
    return 3 * states[A].llama_state_size - 1


def changed_afterwards(calls: Calls) -> Outcome:
    """The caller goes on using the arrays of what it has stored."""
    state = calls.states[A]
    mine = LlamaState(
        state.input_ids.copy(), state.scores.copy(), state.n_tokens, state.llama_state, state.llama_state_size, state.seed
    )
    calls.cache[A] = mine
    mine.input_ids[:] = 7
    return calls.get(A) == A


def stale_numbers(calls: Calls) -> Outcome:
    """Behind n_tokens, `input_ids` of a context has what was there before."""
    state = calls.states[A]
    ids = state.input_ids.copy()
    ids[state.n_tokens :] = 5
    calls.cache[A] = LlamaState(ids, state.scores, state.n_tokens, state.llama_state, state.llama_state_size, state.seed)
    item = calls.cache[A]
    return len(item.input_ids), set(item.input_ids[item.n_tokens :].tolist())


def size_of(calls: Calls) -> str:
    """What of a state counts."""
    calls.put(A)
    bytes_of_state = calls.states[A].llama_state_size
    return (
        "the state" if calls.cache.cache_size == bytes_of_state else "all" if calls.cache.cache_size > bytes_of_state else "?"
    )


def twice(calls: Calls) -> Outcome:
    calls.put(A)
    once = calls.cache.cache_size
    calls.put(A)
    return calls.cache.cache_size == once


def smaller_now(calls: Calls) -> Outcome:
    calls.put(A, B)
    calls.cache.capacity_bytes = int(1.5 * calls.states[B].llama_state_size)
    calls.put(B)
    return [A[40:] == (calls.get(A) or "")[40:], calls.get(B)]


def tuple_or_list(calls: Calls) -> Outcome:
    calls.cache[list(A)] = calls.states[A]
    return [key in calls.cache for key in (np.asarray(A), A, list(A))]


SAME_FOR_ALL = [
    Line("empty: reading", get(A), "Key not found"),
    Line("empty: in", holds(A, ()), [False, False]),
    Line("empty: size", lambda calls: calls.cache.cache_size, 0),
    Line("empty: is used all the same", lambda calls: bool(calls.cache), True),
    Line("empty: longest key", longest(A), None),
    Line("the same key", both(put(A), get(A)), A),
    Line("a longer key", both(put(A), get(LONG_A)), A),
    Line("the longest of several", both(put(SYSTEM := tuple(SYSTEM), A, OTHER), get(LONG_A)), A),
    Line("nothing in common", both(put(A), get(OTHER)), "Key not found"),
    Line("in: a longer key, another one", both(put(A), holds(LONG_A, OTHER)), [True, False]),
    Line("longest key of a longer one", both(put(A), longest(LONG_A)), A),
    Line("a list and an array are keys as well", tuple_or_list, [True, True, True]),
    Line("the empty key, if it isn't stored", both(put(A), get(())), "Key not found"),
]

RAM = [
    *SAME_FOR_ALL,
    Line("a shorter key", both(put(LONG_A), get(A)), LONG_A),
    Line("a key that parts in the middle", both(put(A), get(B)), A),
    Line("in: a shorter key, one that parts", both(put(LONG_A), holds(A, B)), [True, True]),
    Line("longest key of one that parts", both(put(A), longest(B)), A),
    Line("reading twice", both(put(A), get(A), get(A)), A),
    Line(
        "the least recently used goes",
        both(put(A, OTHER), put(B), lambda calls: [calls.get(OTHER), calls.get(A)]),
        [OTHER, B],
        capacity=room_for_two,
    ),
    Line("reading is use", both(put(OTHER, A), get(OTHER), put(B), get(OTHER)), OTHER, capacity=room_for_two),
    Line("storing again is use", both(put(OTHER, A), put(OTHER), put(B), get(OTHER)), OTHER, capacity=room_for_two),
    Line("a capacity that was lowered", smaller_now, [False, B]),
    Line(
        "larger than everything",
        both(put(OTHER), put(LONG_A), holds(OTHER, LONG_A)),
        [False, False],
        [True, False],
        "it can't be kept; there is no reason to throw away what can",
        capacity=lambda states: states[LONG_A].llama_state_size - 1,
    ),
    Line("what counts", size_of, "the state", "all", "with n_vocab 150,000 the scores are twice as large as the state"),
    Line("replaced entries count once", twice, True),
    Line("several with as much in common", both(put(B, A), lambda calls: calls.get((*SYSTEM, 1))[:40]), tuple(SYSTEM)),
    Line(
        "several with as much in common, one of them no longer than that",
        both(put(A, SYSTEM), get(B)),
        A,
        SYSTEM,
        "its state needn't be cut back, which some memories can't",
    ),
    Line("the caller changes its arrays", changed_afterwards, False, True, "what is kept must stay what it was"),
    Line(
        "input_ids behind n_tokens",
        stale_numbers,
        (256, {5}),
        (256, {-1}),
        "stale numbers there match prompts that the state doesn't hold",
    ),
]

TRIE = [
    *(line for line in SAME_FOR_ALL if "Key not found" not in str(line.stock)),
    Line("empty: reading names the key", get((1, 2)), "Key (1, 2) not found"),
    Line("nothing in common", both(put(A), get((1, 2))), "Key (1, 2) not found"),
    Line("a shorter key", both(put(LONG_A), lambda calls: A in calls.cache), False),
    Line("a key that parts in the middle", both(put(A), lambda calls: B in calls.cache), False),
    Line("the empty key, if it is stored", lambda calls: _with_empty_key(calls), [True, 0]),
    Line(
        "the least recently used goes",
        both(put(A, OTHER), put(B), holds(A, OTHER, B)),
        [False, True, True],
        capacity=room_for_two,
    ),
    Line("reading is use", both(put(OTHER, A), get(OTHER), put(B), holds(OTHER, A)), [True, False], capacity=room_for_two),
    Line(
        "a branch that goes takes nothing along",
        both(put(A, LONG_A), put(OTHER), holds(LONG_A, A)),
        [True, False],
        capacity=room_for_two,
    ),
    Line("replaced entries count once", twice, True),
]


def _with_empty_key(calls: Calls) -> Outcome:
    calls.cache[()] = calls.states[A]
    found = [OTHER in calls.cache, len(calls.cache._find_longest_prefix_key(OTHER))]
    return found


DISK = [
    *(line for line in SAME_FOR_ALL if line.name not in ("empty: reading", "empty: size")),
    Line("empty: size", lambda calls: calls.cache.cache_size > 0, True, False, "the database's own pages count there"),
    Line("empty: reading", get(A), "Key not found", "Cache is empty", "says more, as the fork's does"),
    Line(
        "reading twice",
        both(put(A), get(A), get(A)),
        "Key not found",
        A,
        "reading removes the entry there, so that a second chat, or a crash before the answer, finds nothing",
    ),
    Line("a shorter key", both(put(LONG_A), get(A)), LONG_A, A, "what is beyond the key needn't be read, nor cut off again"),
    Line("a key that parts in the middle", both(put(A), get(B)), A, SYSTEM, "the same"),
    Line("in: a shorter key, one that parts", both(put(LONG_A), holds(A, B)), [True, True]),
    Line(
        "longest key of one that parts",
        both(put(A), longest(B)),
        A,
        SYSTEM,
        "each token is stored once, so there are no keys as such: any beginning is one",
    ),
    Line("the caller changes its arrays", changed_afterwards, True),
    Line("input_ids behind n_tokens", stale_numbers, (256, {5}), (256, {-1}), "as in memory"),
    Line("replaced entries count once", twice, True),
    Line(
        "under another key than its own tokens",
        lambda calls: (calls.cache.__setitem__(OTHER, calls.states[A]), calls.get(OTHER), OTHER in calls.cache)[1:],
        (A, False),
        ("Key not found", False),
        "it would come back for tokens that it doesn't hold",
    ),
]


def check(cache: Any, line: Line, states: dict[tuple[int, ...], LlamaState], expected: Outcome) -> None:
    assert line.calls(Calls(cache, states)) == expected, line.name


def ids(lines: list[Line]) -> list[Any]:
    return [pytest.param(line, id=line.name) for line in lines]


@pytest.mark.parametrize("line", ids(RAM))
def test_ram(line: Line, states: dict[tuple[int, ...], LlamaState]) -> None:
    check(llama_cache.LlamaRAMCache(line.capacity(states)), line, states, line.stock)
    check(LlamaRAMCache(line.capacity(states)), line, states, line.expected)


@pytest.mark.parametrize("line", ids(TRIE))
def test_trie(line: Line, states: dict[tuple[int, ...], LlamaState]) -> None:
    check(LlamaTrieCache(line.capacity(states)), line, states, line.expected)


@pytest.mark.parametrize("line", ids(DISK))
def test_disk(line: Line, states: dict[tuple[int, ...], LlamaState], root: Path, tmp_path: Path) -> None:
    stock = llama_cache.LlamaDiskCache(str(tmp_path / "stock"), line.capacity(states))
    check(stock, line, states, line.stock)
    stock.cache.close()
    ours = LlamaDiskCache(str(root), line.capacity(states))
    check(ours, line, states, line.expected)
    ours.close()


# -- what is no call -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["BaseLlamaCache", "LlamaRAMCache", "LlamaDiskCache"])
def test_constructors_take_what_the_stock_ones_take(name: str) -> None:
    stock = inspect.signature(getattr(llama_cache, name)).parameters
    ours = inspect.signature(getattr(kvkeep_cache, name)).parameters
    assert list(ours)[: len(stock)] == list(stock)
    for parameter in stock:
        assert ours[parameter].default == stock[parameter].default


def test_every_class_is_a_base_llama_cache_of_both() -> None:
    classes = [
        LlamaRAMCache,
        LlamaTrieCache,
        LlamaDiskCache,
        kvkeep_cache.PersistentLlamaCache,
        kvkeep_cache.HybridCheckpointCache,
    ]
    for found in classes:
        assert issubclass(found, BaseLlamaCache)
        assert issubclass(found, llama_cache.BaseLlamaCache)
        assert not hasattr(found, "__len__"), "a cache that is falsy while it is empty is never used"
    assert LlamaCache is LlamaTrieCache


def test_the_base_is_abstract_and_can_be_built_upon() -> None:
    with pytest.raises(TypeError, match="abstract"):
        BaseLlamaCache()  # type: ignore[abstract]

    class Mine(BaseLlamaCache):
        cache_size = 0

        def __getitem__(self, key: Any) -> Any:
            raise KeyError

        def __contains__(self, key: Any) -> bool:
            return False

        def __setitem__(self, key: Any, value: Any) -> None:
            pass

    assert Mine().capacity_bytes == 2 << 30
    assert Mine(5).capacity_bytes == 5


@pytest.fixture
def quiet(capfd: pytest.CaptureFixture[str]) -> Iterator[None]:
    yield
    assert capfd.readouterr() == ("", ""), "the stock disk cache prints three lines for each state"


@pytest.mark.usefixtures("quiet")
def test_nothing_is_printed_and_verbose_is_logged(
    states: dict[tuple[int, ...], LlamaState], root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caches = [LlamaRAMCache(verbose=True), LlamaRAMCache(), LlamaTrieCache(), LlamaDiskCache(root, verbose=True)]
    with caplog.at_level(logging.INFO, "kvkeep"):
        for cache in caches:
            Calls(cache, states).put(A)
            assert Calls(cache, states).get(LONG_A) == A
    assert len(caplog.records) == 2, "from the two that were asked to"
    caches[-1].close()  # type: ignore[attr-defined]


@pytest.mark.parametrize("make", [LlamaRAMCache, LlamaTrieCache])
def test_what_is_kept_is_whole_and_nobody_else_can_change_it(make: Any, dense: str) -> None:
    llm = load(dense, logits_all=True)
    llm.eval(list(A))
    state = llm.save_state()
    assert state.scores.any()
    cache = make()
    cache[A] = state
    item = cache[A]
    for name in ("input_ids", "scores", "n_tokens", "llama_state", "llama_state_size", "seed"):
        if name != "input_ids":
            assert np.array_equal(getattr(item, name), getattr(state, name)), name
    assert np.array_equal(item.input_ids[: len(A)], A)
    with pytest.raises(ValueError, match="read-only"):
        item.scores[0, 0] = 1
    item.input_ids[0] = 400
    assert cache[A].input_ids[0] == A[0]
    llm.load_state(cache[A])
    assert np.array_equal(llm.scores[: len(A)], state.scores)
    llm.close()


@pytest.mark.parametrize("make", [LlamaRAMCache, LlamaTrieCache, LlamaDiskCache])
@pytest.mark.parametrize("key", [("a", "b"), (1.5,), ((1, 2), (3, 4)), (2**40,)])
def test_a_key_that_is_no_tokens(make: Any, key: Any, states: dict[tuple[int, ...], LlamaState], root: Path) -> None:
    cache = make(root) if make is LlamaDiskCache else make()
    if make is LlamaDiskCache:
        # Every error is a miss there: it may be in somebody's way.
        assert Calls(cache, states).get(key) == "Cache is empty"
        cache.close()
        return
    with pytest.raises(ValueError, match="whole numbers of 32 bits"):
        cache[key]
    with pytest.raises(ValueError, match="whole numbers of 32 bits"):
        cache[key] = states[A]


@pytest.mark.parametrize("make", [LlamaRAMCache, LlamaTrieCache])
@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))])  # noqa: S301
def test_a_copy_has_the_same_and_goes_its_own_way(make: Any, copied: Any, states: dict[tuple[int, ...], LlamaState]) -> None:
    cache = make(room_for_two(states))
    Calls(cache, states).put(A, OTHER)
    other = copied(cache)
    assert (other.capacity_bytes, other.cache_size) == (cache.capacity_bytes, cache.cache_size)
    Calls(other, states).put(B)
    assert [Calls(other, states).get(key)[40:] for key in (OTHER, B)] == [OTHER[40:], B[40:]]
    assert Calls(cache, states).get(A) == A
    assert B[40:] not in [Calls(cache, states).get(key)[40:] for key in (A, OTHER)]


def test_scores_that_nobody_has_filled_are_no_trouble(states: dict[tuple[int, ...], LlamaState]) -> None:
    """Without logits_all they are whatever the memory held before; with signalling NaN a look at them warns."""
    state = states[A]
    scores = np.full(state.scores.shape, 0x7FA00001, np.uint32).view(np.single)
    cache = LlamaRAMCache()
    cache[A] = LlamaState(state.input_ids, scores, state.n_tokens, state.llama_state, state.llama_state_size, 0)
    assert cache[A].n_tokens == len(A)


def test_a_state_that_contradicts_itself(states: dict[tuple[int, ...], LlamaState]) -> None:
    state = states[A]
    bad = LlamaState(state.input_ids[:5], state.scores, 60, state.llama_state, state.llama_state_size, 0)
    cache = LlamaRAMCache()
    with pytest.raises(ValueError, match="60 tokens must name that many in input_ids, and names 5"):
        cache[A] = bad
    assert cache.cache_size == 0
