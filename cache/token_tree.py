"""A radix tree in memory: values under runs of tokens, found in time proportional to the run that is asked for.

An edge holds as many tokens as nothing branches off from, as a view of the key that brought them: a trie with one object a
token needs a hundred times the memory. (`kvkeep.cache.radix` walks the tree that the store's index holds.)
"""

from collections.abc import Iterator
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int32]
Value = TypeVar("Value")

_NO_TOKENS: Tokens = np.empty(0, np.int32)


class _Node(Generic[Value]):
    """A position at which a key ends, or at which several part.

    Attributes:
        tokens: those between the node above and this one; none at the root only.
        parent: the node above; None at the root.
        children: by the first of their tokens.
        value: what is stored under the key that ends here, or None.
    """

    __slots__ = ("children", "parent", "tokens", "value")

    def __init__(self, tokens: Tokens, parent: "_Node[Value] | None") -> None:
        self.tokens = tokens
        self.parent = parent
        self.children: dict[int, _Node[Value]] = {}
        self.value: Value | None = None


class TokenTree(Generic[Value]):
    """Values under runs of tokens. Keys are int32 arrays of shape (n,) that don't change any more; n may be 0."""

    def __init__(self) -> None:
        self._root: _Node[Value] = _Node(_NO_TOKENS, None)

    def put(self, key: Tokens, value: Value) -> Value | None:
        """Store a value. Returns the one whose place it takes, if there is one."""
        node, at = self._root, 0
        while at < key.size:
            child = node.children.get(int(key[at]))
            if child is None:
                child = _Node(key[at:], node)
                node.children[int(key[at])] = child
            elif (shared := _common(child.tokens, key[at:])) < child.tokens.size:
                child = _split(child, shared)
            node, at = child, at + child.tokens.size
        before, node.value = node.value, value
        return before

    def remove(self, key: Tokens) -> Value | None:
        """Remove what is stored under exactly this key, and the branch that leads to nothing else. Returns it."""
        node, at = self._root, 0
        while at < key.size:
            child = node.children.get(int(key[at]))
            if child is None or _common(child.tokens, key[at:]) < child.tokens.size:
                return None
            node, at = child, at + child.tokens.size
        before, node.value = node.value, None
        _tidy(node)
        return before

    def longest_prefix(self, key: Tokens) -> Value | None:
        """The value of the longest stored key that `key` begins with; the empty key is the shortest."""
        found = self._root.value
        for node, shared in self._walk(key):
            if shared == node.tokens.size and node.value is not None:
                found = node.value
        return found

    def longest_common(self, key: Tokens) -> tuple[int, Value | None]:
        """A value whose key shares the longest beginning with `key`, and how many tokens that is.

        Among several the one whose key ends right there, else any. No value where no token is shared.
        """
        length, deepest = 0, None
        for node, shared in self._walk(key):
            length, deepest = length + shared, node
        return length, None if deepest is None else _any_value(deepest)

    def _walk(self, key: Tokens) -> Iterator[tuple[_Node[Value], int]]:
        """The nodes along a key, each with how many of its own tokens fit: all of them, but for the last one's."""
        node, at = self._root, 0
        while at < key.size:
            child = node.children.get(int(key[at]))
            if child is None:
                return
            shared = _common(child.tokens, key[at:])
            yield child, shared
            if shared < child.tokens.size:
                return
            node, at = child, at + shared


def _common(a: Tokens, b: Tokens) -> int:
    """How many of the first tokens are the same."""
    length = min(a.size, b.size)
    differing = a[:length] != b[:length]
    first = int(differing.argmax()) if length else 0
    return first if length and differing[first] else length


def _split(node: _Node[Value], at: int) -> _Node[Value]:
    """Put a node in the middle of the edge that leads to `node`, behind `at` of its tokens."""
    parent = node.parent
    assert parent is not None
    middle: _Node[Value] = _Node(node.tokens[:at], parent)
    parent.children[int(node.tokens[0])] = middle
    node.tokens, node.parent = node.tokens[at:], middle
    middle.children[int(node.tokens[0])] = node
    return middle


def _tidy(node: _Node[Value]) -> None:
    """Take away nodes that neither hold a value nor branch, from `node` up."""
    while node.value is None and node.parent is not None and len(node.children) < 2:
        parent = node.parent
        if node.children:
            (child,) = node.children.values()
            # A copy: the views are parts of two keys.
            child.tokens, child.parent = np.concatenate([node.tokens, child.tokens]), parent
            parent.children[int(child.tokens[0])] = child
            return
        del parent.children[int(node.tokens[0])]
        node = parent


def _any_value(node: _Node[Value]) -> Value | None:
    """The value of a node, else one below it: wherever a branch ends there is one."""
    while node.value is None and node.children:
        node = next(iter(node.children.values()))
    return node.value
