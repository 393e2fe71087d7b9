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
from synthetic import SMALL, fingerprint_of, identity, state_of

from kvkeep.cache.prefix_cache import PrefixCache
from kvkeep.cache.radix import common_tokens
from kvkeep.store import nodes
from kvkeep.store.check import Trouble, check
from kvkeep.store.nodes import Node
from kvkeep.store.registry import close_root, open_root

B = 4
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


class CacheLife(RuleBasedStateMachine):
    """Saves, restores, removals, damage and restarts in any order.

    What a prefix must look like is a function of its tokens. How much of a prompt must be found is read from the rows
    themselves, by following parents instead of searching.
    """

    @initialize()
    def begin(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="kvkeep-model-"))
        shutil.copytree(_empty_root(), self.path, dirs_exist_ok=True)
        self.open()
        self.known: list[list[int]] = [[]]

    def open(self) -> None:
        self.repository = open_root(self.path)
        self.cache = PrefixCache(self.repository, identity(), block_tokens=B)

    def teardown(self) -> None:
        if hasattr(self, "repository"):
            close_root(self.repository)
            shutil.rmtree(self.path)

    def rows(self) -> list[Node]:
        with self.repository.rows() as connection:
            return list(nodes.every(connection))

    def reachable(self) -> list[list[int]]:
        """All tokens of every node that has all its parents."""
        rows = {node.key: node for node in self.rows()}
        found: list[list[int]] = []
        for node in rows.values():
            tokens, parent = node.tokens, node.parent
            while parent in rows:
                tokens, parent = rows[parent].tokens + tokens, rows[parent].parent
            if parent == fingerprint_of("model"):
                found.append(np.frombuffer(tokens, "<i4").tolist())
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
        expected = state_of(SMALL, prompt[: restored.length]) if restored.length else np.empty(0, np.uint8)
        assert np.array_equal(restored.state, expected)
        assert bool(restored.damaged) == (restored.length < match.length)
        self.cache.quarantine(restored.damaged)
        return restored.length

    @rule(data=st.data())
    def save(self, data: st.DataObject) -> None:
        chat = self.prompt(data)
        saved = self.cache.save(chat, state_of(SMALL, chat))
        self.known.append(chat)
        assert (saved.tokens, saved.evicted, saved.opaque) == (len(chat), 0, False)
        assert self.cache.match(chat).length == len(chat)
        assert self.cache.save(chat, state_of(SMALL, chat)).written == 0

    @rule(data=st.data())
    def restore(self, data: st.DataObject) -> None:
        prompt = self.prompt(data)
        tokens = np.asarray(prompt, "<i4").tobytes()
        stored = [common_tokens(np.asarray(chat, "<i4").tobytes(), tokens) for chat in self.reachable()]
        assert self.cache.match(prompt).length == max(stored, default=0)
        self.restored(prompt)

    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        rows = self.rows()
        chosen = data.draw(st.lists(st.sampled_from(rows), max_size=3, unique_by=lambda node: node.id)) if rows else []
        assert self.cache.remove(chosen) == len(chosen)
        assert {node.id for node in self.rows()} == {node.id for node in rows} - {node.id for node in chosen}

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
        assert victim.key not in {node.key for node in self.rows()}

    def leads_to(self, chat: Sequence[int], node: Node) -> bool:
        return any(step.key == node.key for step, _ in self.cache.match(chat).plan)

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
    deadline=None, max_examples=40, stateful_step_count=25, suppress_health_check=[HealthCheck.too_slow]
)
TestCacheLife = CacheLife.TestCase
