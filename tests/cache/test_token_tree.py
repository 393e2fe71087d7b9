"""The radix tree in memory against a dictionary and a loop over all keys."""

from itertools import takewhile

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from kvkeep.cache.token_tree import TokenTree, _Node

Key = tuple[int, ...]
# Few different tokens, so that keys share beginnings.
KEYS = st.lists(st.integers(0, 2), max_size=7).map(tuple)


def array(key: Key) -> np.typing.NDArray[np.int32]:
    return np.asarray(key, np.int32)


def common(a: Key, b: Key) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


def nodes(tree: TokenTree[Key]) -> list[_Node[Key]]:
    found = [tree._root]
    for node in found:
        found += node.children.values()
    return found


def assert_tidy(tree: TokenTree[Key]) -> None:
    """No node that neither branches nor holds anything, each under its first token, and right about its parent."""
    for node in nodes(tree)[1:]:
        assert node.tokens.size > 0
        assert node.value is not None or len(node.children) > 1
        assert node.parent is not None
        assert node.parent.children[int(node.tokens[0])] is node


@given(st.lists(st.tuples(st.sampled_from(["put", "put", "remove"]), KEYS), max_size=30), st.lists(KEYS, max_size=6))
@settings(deadline=None)
def test_it_finds_what_a_loop_finds(steps: list[tuple[str, Key]], asked: list[Key]) -> None:
    tree: TokenTree[Key] = TokenTree()
    model: dict[Key, Key] = {}
    for what, key in steps:
        if what == "put":
            assert tree.put(array(key), key) == model.get(key)
            model[key] = key
        else:
            assert tree.remove(array(key)) == model.pop(key, None)
        assert_tidy(tree)
        for wanted in (*asked, key):
            prefixes = [stored for stored in model if wanted[: len(stored)] == stored]
            assert tree.longest_prefix(array(wanted)) == max(prefixes, key=len, default=None)
            longest = max((common(stored, wanted) for stored in model), default=0)
            length, found = tree.longest_common(array(wanted))
            assert length == longest
            if longest == 0:
                assert found is None
            else:
                assert found in model
                assert common(found, wanted) == longest
                if wanted[:longest] in model:
                    assert found == wanted[:longest], "the one that ends right there"
    assert len(nodes(tree)) <= 2 * len(model) + 1


def test_empty_key_is_the_shortest_prefix_and_shares_nothing() -> None:
    tree: TokenTree[str] = TokenTree()
    tree.put(array(()), "nothing")
    assert tree.longest_prefix(array((1, 2))) == "nothing"
    assert tree.longest_prefix(array(())) == "nothing"
    assert tree.longest_common(array((1, 2))) == (0, None)
    assert tree.remove(array(())) == "nothing"
    assert tree.longest_prefix(array((1, 2))) is None


@pytest.mark.parametrize("count", [10, 300])
def test_a_look_up_visits_as_many_nodes_however_many_chats_there_are(count: int) -> None:
    """Each chat begins as all do, and has turns of its own: the way to one of them leads past the others."""
    tree: TokenTree[int] = TokenTree()
    system = np.arange(1000, dtype=np.int32)
    rng = np.random.default_rng(0)
    # Each with a first token of its own behind the system prompt.
    chats = [np.concatenate([system, [number], rng.integers(0, 50_000, 2999)]).astype(np.int32) for number in range(count)]
    for number, chat in enumerate(chats):
        for end in (2000, 3000, 4000):
            tree.put(chat[:end], number)
    for number, chat in enumerate(chats):
        assert len(list(tree._walk(chat))) == 4
        assert tree.longest_common(chat) == (4000, number)
    assert len(nodes(tree)) <= 3 * count + 2
