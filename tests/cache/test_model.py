"""A random life of a cache, beside a model of what it must give back."""

import shutil
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from synthetic import ATTENTION, HYBRID, RECURRENT, Made, fingerprint_of, window_model

from kvkeep.cache import budget
from kvkeep.cache.eviction import key_of
from kvkeep.cache.prefix_cache import PrefixCache, token_bytes
from kvkeep.cache.radix import common_tokens
from kvkeep.cache.state import Form
from kvkeep.store import checkpoints, nodes, windows
from kvkeep.store.check import ROWS_ONLY, Trouble, check
from kvkeep.store.checkpoints import Checkpoint
from kvkeep.store.compact import compact
from kvkeep.store.entry import Entry
from kvkeep.store.hashing import PrefixHash, chain
from kvkeep.store.nodes import Node
from kvkeep.store.registry import close_root, open_root
from kvkeep.store.windows import Window

B = 4
ROOT = PrefixHash(fingerprint_of("model"))
# A window that is kept in full: what has been saved can be restored at any position, as long as nothing is removed.
WINDOW = window_model(6, full=True)
# Few different tokens: chats share beginnings, part, and meet again.
chats = st.lists(st.integers(0, 2), min_size=1, max_size=14)


@cache
def _empty_root() -> Path:
    """A migrated empty store: copying it is quicker than making one."""
    path = Path(tempfile.mkdtemp(prefix="kvkeep-model-"))
    close_root(open_root(path, 32 << 20))
    return path


def teardown_module() -> None:
    shutil.rmtree(_empty_root(), ignore_errors=True)
    _empty_root.cache_clear()


def numbers(tokens: bytes) -> list[int]:
    found: list[int] = np.frombuffer(tokens, "<i4").tolist()
    return found


def common(one: Sequence[int], other: Sequence[int]) -> int:
    return common_tokens(token_bytes(one), token_bytes(other))


class CacheLife(RuleBasedStateMachine):
    """Saves, restores, removals, damage and restarts in any order.

    What a prefix must look like is a function of its tokens. How much of a prompt must be found is read from the rows
    themselves, by following parents instead of searching, and by trying every position.
    """

    @initialize(made=st.sampled_from([ATTENTION, WINDOW, HYBRID, RECURRENT]))
    def begin(self, made: Made) -> None:
        self.made = made
        self.path = Path(tempfile.mkdtemp(prefix="kvkeep-model-"))
        shutil.copytree(_empty_root(), self.path, dirs_exist_ok=True)
        self.open()
        self.known: list[list[int]] = [[]]
        self.pinned: list[list[int]] = []

    def open(self) -> None:
        self.repository = open_root(self.path)
        self.cache = PrefixCache(self.repository, self.made.identity(), block_tokens=B)

    def teardown(self) -> None:
        if hasattr(self, "repository"):
            close_root(self.repository)
            shutil.rmtree(self.path)

    def rows(self) -> list[Entry]:
        with self.repository.rows() as connection:
            return [*nodes.every(connection), *windows.every(connection), *checkpoints.every(connection)]

    def reachable(self) -> list[list[int]]:
        """All tokens of every node that has all its parents."""
        rows = {node.key: node for node in self.rows() if isinstance(node, Node)}
        found: list[list[int]] = []
        for node in rows.values():
            tokens, parent = node.tokens, node.parent
            while parent in rows:
                tokens, parent = rows[parent].tokens + tokens, rows[parent].parent
            if parent == ROOT:
                found.append(numbers(tokens))
        return found

    def expected(self, prompt: Sequence[int]) -> int:
        """How much of a prompt can be restored."""
        memory = self.made.memory
        length = len(prompt)
        if memory.has_attention:
            length = max((common(chat, prompt) for chat in self.reachable()), default=0)
        below = self.below_borders()
        whole = {(below[row.anchor], row.path): row for row in self.rows() if not isinstance(row, Node)}
        taken = {(*before, *numbers(path)) for (before, path), row in whole.items() if isinstance(row, Checkpoint)}
        kept = [(row.start, (*before, *numbers(path))) for (before, path), row in whole.items() if isinstance(row, Window)]

        def is_there(at: int) -> bool:
            return any(start <= at < len(tokens) and tokens[: at + 1] == tuple(prompt[: at + 1]) for start, tokens in kept)

        for pos in range(length, 0, -1):
            if memory.is_recurrent and tuple(prompt[:pos]) not in taken:
                continue
            first = pos if memory.window is None else min(memory.window.first_needed(pos), pos - 1)
            if all(is_there(at) for at in range(first, pos)):
                return pos
        return 0

    def below_borders(self) -> dict[PrefixHash, tuple[int, ...]]:
        """The tokens before every block border of everything that was ever saved."""
        found: dict[PrefixHash, tuple[int, ...]] = {ROOT: ()}
        for chat in self.known:
            for number, key in enumerate(chain(fingerprint_of("model"), token_bytes(chat), B * 4), 1):
                found[key] = tuple(chat[: number * B])
        return found

    def prompt(self, data: st.DataObject) -> list[int]:
        """The beginning of a known chat, and something new."""
        trunk = data.draw(st.sampled_from(self.known))
        return trunk[: data.draw(st.integers(0, len(trunk)))] + data.draw(chats)

    def restored(self, prompt: Sequence[int]) -> int:
        """How much of a prompt comes back, after its bytes were compared."""
        match = self.cache.match(prompt)
        restored = self.cache.restore(match, prompt)
        assert restored.length <= match.length <= len(prompt)
        beginning = prompt[: restored.length]
        expected = self.made.state(beginning, first=self.first(restored.length)) if beginning else np.empty(0, np.uint8)
        assert np.array_equal(restored.state, expected)
        assert restored.damaged or restored.length == match.length
        # Another row may have the same part of a window.
        assert restored.length < match.length or not restored.damaged or self.made.window is not None
        self.cache.quarantine(restored.damaged)
        return restored.length

    def first(self, length: int) -> int:
        """The lowest position that a restored window has."""
        window = self.made.memory.window
        return 0 if window is None else window.first_written(length)

    @rule(data=st.data(), form=st.sampled_from(Form))
    def save(self, data: st.DataObject, form: Form) -> None:
        chat = self.prompt(data)
        taken = data.draw(st.sets(st.integers(1, len(chat) - 1), max_size=2)) if len(chat) > 1 else set()
        points = [self.made.point(chat[:pos]) for pos in taken if self.made.memory.is_recurrent]
        saved = self.cache.save(chat, self.made.state(chat, form), form, points=points)
        self.known.append(chat)
        assert (saved.tokens, saved.evicted, saved.opaque) == (len(chat), 0, False)
        for pos in [*(point.pos for point in points), len(chat)]:
            assert self.cache.match(chat[:pos]).length == pos
        assert self.cache.save(chat, self.made.state(chat, form), form, points=points).written == 0

    @rule(data=st.data())
    def restore(self, data: st.DataObject) -> None:
        prompt = self.prompt(data)
        assert self.cache.match(prompt).length == self.expected(prompt)
        self.restored(prompt)

    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        rows = self.rows()
        chosen = data.draw(st.lists(st.sampled_from(rows), max_size=3, unique=True)) if rows else []
        assert self.cache.remove(chosen) == len(chosen)
        assert set(self.rows()) == set(rows) - set(chosen)

    @rule(data=st.data(), at=st.integers(0, 10_000))
    def damage(self, data: st.DataObject, at: int) -> None:
        rows = self.rows()
        if not rows:
            return
        victim = data.draw(st.sampled_from(rows))
        with self.repository.snapshot() as snapshot:
            value = bytearray(snapshot.blobs.get(victim.blob) or b"")
        # Three bytes of a value's header mean nothing.
        at %= len(value)
        value[at if at not in (5, 6, 7) else 0] ^= 1
        self.repository.blobs.put([(victim.blob, bytes(value))])
        tokens = next((chat for chat in self.known if self.leads_to(chat, victim)), None)
        if tokens is not None:
            self.restored(tokens)
        with self.repository.writing() as writing:
            writing.remove_damaged(self.rows())
        assert victim not in self.rows()

    def leads_to(self, chat: Sequence[int], entry: Entry) -> bool:
        return entry in self.cache.match(chat).entries

    @rule(n_bytes=st.integers(1, 60_000))
    def evict(self, n_bytes: int) -> None:
        before = self.rows()
        was_whole = self.unreachable() == 0
        with self.repository.writing() as writing:
            gone = budget.evict(writing, n_bytes)
        assert set(before) - set(self.rows()) == set(gone)
        enough = sum(budget.footprint(entry.stored_bytes) for entry in gone) >= n_bytes
        pinned = self.pinned_rows()
        kept = [*pinned, *self.sharing_with_pinned()]
        # Either it was enough, or nothing is left but what is pinned and what that stands on.
        assert enough or {key_of(entry) for entry in self.rows()} <= {key_of(entry) for entry in kept} | self.below(kept)
        assert not set(gone) & set(pinned)
        if was_whole:
            assert self.unreachable() == 0, "leaves go first"

    def below(self, entries: Sequence[Entry]) -> set[PrefixHash]:
        """Keys of the nodes that others stand on."""
        rows = {node.key: node for node in self.rows() if isinstance(node, Node)}
        found: set[PrefixHash] = set()
        for entry in entries:
            at = entry.parent if isinstance(entry, Node) else entry.anchor
            while at in rows and at not in found:
                found.add(at)
                at = rows[at].parent
        return found

    def unreachable(self) -> int:
        return sum(finding.trouble is Trouble.UNREACHABLE for finding in check(self.repository, ROWS_ONLY))

    def pinned_rows(self) -> list[Entry]:
        """What is stored of the pinned prefixes, told without the index: by comparing tokens."""
        prefixes = [tuple(prefix) for prefix in self.pinned]
        borders = self.below_borders()
        found = []
        for row in self.rows():
            if row.anchor not in borders:
                continue
            before, end = borders[row.anchor], (*borders[row.anchor], *numbers(row.path))
            if isinstance(row, Checkpoint):
                wanted = any(prefix[: len(end)] == end for prefix in prefixes)
            else:
                start = row.start if isinstance(row, Node) else len(before)
                wanted = any(
                    len(prefix) > start and (prefix[: len(end)] == end or end[: len(prefix)] == prefix) for prefix in prefixes
                )
            if wanted and self.is_reachable(row):
                found.append(row)
        return found

    def sharing_with_pinned(self) -> list[Node]:
        """Nodes of other chats that begin as a pinned prefix does: its first tokens may come from there."""
        borders = self.below_borders()
        return [
            row
            for row in self.rows()
            if isinstance(row, Node) and row.anchor in borders
            if any(common((*borders[row.anchor], *numbers(row.path)), prefix) > row.start for prefix in self.pinned)
        ]

    def is_reachable(self, row: Entry) -> bool:
        rows = {node.key: node for node in self.rows() if isinstance(node, Node)}
        at = row.key if isinstance(row, Node) else None
        while at in rows:
            at = rows[at].parent
        return at in (None, ROOT)

    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        prefix = data.draw(st.sampled_from(self.known))
        if prefix:
            assert self.cache.pin(prefix) is (prefix not in self.pinned)
            self.pinned += [prefix] if prefix not in self.pinned else []

    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        prefix = data.draw(st.sampled_from(self.known))
        assert self.cache.unpin(prefix) is (prefix in self.pinned)
        self.pinned = [other for other in self.pinned if other != prefix]

    @rule()
    def compact(self) -> None:
        before = self.rows()
        generation = self.repository.blobs.folder
        done = compact(self.repository)
        assert done.after_bytes <= done.before_bytes + (64 << 10)
        assert self.rows() == before
        assert self.repository.blobs.folder != generation

    @rule()
    def clear(self) -> None:
        count = len(self.rows())
        assert self.cache.clear() == count
        assert self.rows() == []
        self.pinned = []

    @rule()
    def die(self) -> None:
        """As if the process had been killed: who comes next looks at everything."""
        self.repository.report_damage("the test says so")
        close_root(self.repository)
        self.open()
        assert self.repository.recovered == []

    @rule()
    def reopen(self) -> None:
        self.repository.flush_touched()
        close_root(self.repository)
        self.open()

    @invariant()
    def sound(self) -> None:
        if hasattr(self, "repository"):
            # What stood on a removed node is unreachable, and nothing is worse than that.
            assert {finding.trouble for finding in check(self.repository)} <= {Trouble.UNREACHABLE}


CacheLife.TestCase.settings = settings(
    deadline=None, max_examples=60, stateful_step_count=25, suppress_health_check=[HealthCheck.too_slow]
)
TestCacheLife = CacheLife.TestCase
