"""What is stored, as people think of it: prefixes, and how they share what they begin with.

    run      nodes that follow each other without a fork, with what stands on them alone
    prefix   a run on which no other stands: the end of one chat, or of one prompt
    strays   entries that lead back to no beginning, because what came before them is gone or damaged

A model without nodes keeps whole states or recurrent tensors, each of which is a run of its own.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field

from kvkeep.cache.eviction import key_of
from kvkeep.cache.pinned import pinned_keys
from kvkeep.cache.radix import common_tokens
from kvkeep.store import namespaces, rows
from kvkeep.store.checkpoints import Checkpoint
from kvkeep.store.engine import Connection
from kvkeep.store.entry import Entry
from kvkeep.store.frame import TOKEN_BYTES, Kind
from kvkeep.store.hashing import PrefixHash
from kvkeep.store.namespaces import Namespace
from kvkeep.store.nodes import Node
from kvkeep.store.windows import Window


@dataclass(slots=True, eq=False)
class Run:
    """Nodes that follow each other without a fork.

    Attributes:
        space: whose they are.
        above: the run on which it stands, if it doesn't begin at position 0.
        start: position of its first token.
        tokens: its own tokens, little-endian int32.
        parts_at: the first position at which it differs from whatever stands beside it.
        entries: everything that goes when it goes: its nodes, and what stands on no other run.
        path_bytes: stored bytes of everything from position 0 to its end, whoever else uses it.
        hits: how often any of its own was restored, at least.
        pinned: some of its own is pinned.
        beyond: the runs that stand on it.
    """

    space: Namespace
    above: "Run | None"
    start: int
    tokens: bytes = b""
    parts_at: int = 0
    entries: list[Entry] = field(default_factory=list)
    path_bytes: int = 0
    hits: int = 0
    pinned: bool = False
    beyond: list["Run"] = field(default_factory=list)

    @property
    def key(self) -> PrefixHash:
        """The prefix hash at its end, which names it."""
        return key_of(self.entries[0])

    @property
    def end(self) -> int:
        return self.start + len(self.tokens) // TOKEN_BYTES

    @property
    def own_bytes(self) -> int:
        """Stored bytes of what goes when it goes."""
        return sum(entry.stored_bytes for entry in self.entries)

    @property
    def used(self) -> float:
        """When any of its own was last used."""
        return max(entry.used for entry in self.entries)

    @property
    def path(self) -> "list[Run]":
        """The runs from its beginning to itself."""
        line = [self]
        while line[-1].above is not None:
            line.append(line[-1].above)
        return line[::-1]

    @property
    def first_known(self) -> int:
        """The first position whose token is known: 0, but for states that are stored without the tokens before them."""
        return self.path[0].start

    def all_tokens(self) -> bytes:
        """The tokens from `first_known` to its end."""
        return b"".join(run.tokens for run in self.path)


@dataclass(frozen=True, slots=True)
class Listing:
    """Everything that is stored.

    Attributes:
        spaces: the models, most recently used first.
        trees: the runs that begin at position 0, and stored states without nodes.
        strays: entries that lead back to no beginning.
        shared: entries that stand on several runs; each with these.
    """

    spaces: list[Namespace]
    trees: list[Run]
    strays: list[Entry]
    shared: list[tuple[Entry, list[Run]]]

    def of(self, spaces: Collection[Namespace]) -> "Listing":
        """The same of some models only."""
        numbers = {space.id for space in spaces}
        return Listing(
            [space for space in self.spaces if space.id in numbers],
            [run for run in self.trees if run.space.id in numbers],
            [entry for entry in self.strays if entry.namespace_id in numbers],
            [(entry, holders) for entry, holders in self.shared if entry.namespace_id in numbers],
        )

    def runs(self) -> Iterator[Run]:
        """Every run, each before those that stand on it."""
        waiting = self.trees[::-1]
        while waiting:
            run = waiting.pop()
            yield run
            waiting += run.beyond[::-1]

    def prefixes(self) -> list[Run]:
        """Runs on which no other stands, most recently used first."""
        return sorted((run for run in self.runs() if not run.beyond), key=lambda run: run.used, reverse=True)

    def going_with(self, chosen: Collection[PrefixHash]) -> list[Entry]:
        """What nobody needs without the prefixes of these keys; what stands on something comes before that."""
        gone: dict[int, Run] = {}
        for run in reversed(list(self.runs())):
            if all(id(other) in gone for other in run.beyond) if run.beyond else run.key in chosen:
                gone[id(run)] = run
        entries = [entry for run in gone.values() for entry in run.entries]
        entries += [entry for entry, holders in self.shared if all(id(run) in gone for run in holders)]
        return sorted(entries, key=_standing_first)


def listing(connection: Connection) -> Listing:
    """Read everything that is stored.

    Args:
        connection: a read transaction.

    Raises:
        DamagedFile: a row can't be read at all. What merely doesn't fit together is a stray.
    """
    spaces = namespaces.every(connection)
    every = list(rows.every(connection))
    forest = _Forest(spaces, [entry for entry in every if isinstance(entry, Node)])
    forest.plant()
    for entry in every:
        if not isinstance(entry, Node):
            forest.stand(entry)
    found = Listing(spaces, forest.trees, forest.strays, forest.shared)
    _add_figures(connection, found)
    return found


class _Forest:
    """Runs in the making."""

    def __init__(self, spaces: Sequence[Namespace], all_nodes: Sequence[Node]) -> None:
        self.trees: list[Run] = []
        self.strays: list[Entry] = []
        self.shared: list[tuple[Entry, list[Run]]] = []
        self._spaces = {space.id: space for space in spaces}
        self._roots = {PrefixHash(space.fingerprint): space for space in spaces}
        self._nodes = sorted(all_nodes, key=lambda node: node.start)
        self._placed: dict[PrefixHash, Node] = {}
        self._children: dict[PrefixHash, list[Node]] = defaultdict(list)
        self._slots: dict[PrefixHash, _Slot] = defaultdict(_Slot)
        self._runs: dict[PrefixHash, Run] = {}
        self._first_slots: dict[Run, tuple[Node, Node]] = {}
        self._states: dict[tuple[int, PrefixHash], Run] = {}

    def plant(self) -> None:
        """Make runs of the nodes. Parents begin before their children, so one pass does it, and no circle gets in."""
        for node in self._nodes:
            if self._fits(node):
                self._placed[node.key] = node
                self._children[node.parent].append(node)
                self._slots[node.anchor].add(node)
            else:
                self.strays.append(node)
        for node in self._placed.values():
            self._join(node)
        for run, (first, deepest) in self._first_slots.items():
            border = first.start - _tokens_before(first)
            run.parts_at = max(run.start, border + self._in_common(first, deepest))

    def _fits(self, node: Node) -> bool:
        """Whether it begins where what it stands on ends. Only then can it ever be restored."""
        above = self._placed.get(node.parent)
        space = self._roots.get(node.parent)
        whole = 0 < node.n_tokens * TOKEN_BYTES <= len(node.path) and node.key not in self._roots
        if above is not None:
            begins = (above.start + above.n_tokens, above.namespace_id)
        elif space is not None:
            begins = (0, space.id)
        else:
            return False
        return whole and begins == (node.start, node.namespace_id)

    def _join(self, node: Node) -> None:
        """Put a node into the run of its parent, or into a new one where its parent isn't alone below it."""
        run = self._runs.get(node.parent)
        if run is None or len(self._children[node.parent]) > 1:
            run = self._new(self._spaces[node.namespace_id], run, node.start)
            self._first_slots[run] = (node, node)
        first, _ = self._first_slots[run]
        if node.anchor == first.anchor:
            self._first_slots[run] = (first, node)
        # The last node comes first: it names the run.
        run.entries.insert(0, node)
        run.tokens += node.tokens
        self._runs[node.key] = run

    def _in_common(self, first: Node, deepest: Node) -> int:
        """The most tokens from the border on that a run shares with one that goes another way.

        Args:
            first: the run's first node.
            deepest: its last one behind the same border.
        """
        above = self._lineage(first)
        slot = self._slots[first.anchor]

        def goes_another_way(other: Node) -> bool:
            return other.key not in above and first.key not in self._lineage(other)

        return max((common_tokens(deepest.path, found.path) for found in slot.nearest(deepest, goes_another_way)), default=0)

    def _lineage(self, node: Node) -> set[PrefixHash]:
        """Keys from a node down to the block border."""
        keys = {node.key}
        while (above := self._placed.get(node.parent)) is not None and above.anchor == node.anchor:
            node = above
            keys.add(node.key)
        return keys

    def _new(self, space: Namespace, above: Run | None, start: int) -> Run:
        run = Run(space, above, start, parts_at=start)
        (self.trees if above is None else above.beyond).append(run)
        return run

    def stand(self, entry: Window | Checkpoint) -> None:
        """Put a row of a window, or a checkpoint, with whatever it stands on."""
        holders = self._holders(entry)
        if len(holders) > 1:
            self.shared.append((entry, holders))
        elif holders:
            holders[0].entries.append(entry)
        elif isinstance(entry, Checkpoint) and entry.namespace_id in self._spaces:
            self._stand_alone(entry)
        else:
            self.strays.append(entry)

    def _holders(self, entry: Window | Checkpoint) -> list[Run]:
        """The runs without which it is of no use, as eviction sees it: see `kvkeep.cache.eviction`."""
        if isinstance(entry, Checkpoint) and entry.kind == Kind.OPAQUE:
            return []
        holding = self._slots[entry.anchor].holding(entry.path) if entry.anchor in self._slots else []
        if not holding and (border := self._placed.get(entry.anchor)) is not None:
            holding = [border]
        found = dict.fromkeys(self._runs[node.key] for node in holding)
        return [run for run in found if run.space.id == entry.namespace_id]

    def _stand_alone(self, point: Checkpoint) -> None:
        """A whole state, or recurrent tensors of a model that keeps nothing else, is as good as a prefix."""
        where = (point.namespace_id, point.prefix)
        if where not in self._states:
            run = self._new(self._spaces[point.namespace_id], None, point.pos - len(point.path) // TOKEN_BYTES)
            run.tokens = point.path
            self._states[where] = run
        self._states[where].entries.append(point)


class _Slot:
    """The nodes behind one anchor."""

    def __init__(self) -> None:
        self._nodes: list[Node] = []
        self._sorted = True

    def add(self, node: Node) -> None:
        self._nodes.append(node)
        self._sorted = False

    def _in_order(self) -> list[Node]:
        if not self._sorted:
            self._nodes.sort(key=_path)
            self._sorted = True
        return self._nodes

    def holding(self, path: bytes) -> list[Node]:
        """The nodes in whose own tokens a path ends. In byte order they stand behind it, next to each other."""
        all_nodes = self._in_order()
        found: list[Node] = []
        for i in range(bisect_left(all_nodes, path, key=_path), len(all_nodes) if path else 0):
            if not all_nodes[i].path.startswith(path):
                break
            if _tokens_before(all_nodes[i]) * TOKEN_BYTES < len(path):
                found.append(all_nodes[i])
        return found

    def nearest(self, node: Node, wanted: Callable[[Node], bool]) -> Iterator[Node]:
        """The next wanted ones on both sides, in byte order: one of them shares the most tokens with this one."""
        all_nodes = self._in_order()
        at = all_nodes.index(node, bisect_left(all_nodes, node.path, key=_path))
        for side in (reversed(all_nodes[:at]), all_nodes[at + 1 :]):
            found = next(filter(wanted, side), None)
            if found is not None:
                yield found


def _path(node: Node) -> bytes:
    return node.path


def _tokens_before(node: Node) -> int:
    """Tokens between the block border and its own."""
    return len(node.path) // TOKEN_BYTES - node.n_tokens


def _standing_first(entry: Entry) -> tuple[bool, int]:
    return (True, -entry.start) if isinstance(entry, Node) else (False, 0)


def _add_figures(connection: Connection, found: Listing) -> None:
    """Bytes, hits and pins of every run."""
    hits = rows.hits(connection)
    pinned = pinned_keys(connection)
    beside: dict[int, int] = defaultdict(int)
    for entry, holders in found.shared:
        for run in holders:
            beside[id(run)] += entry.stored_bytes
    for run in found.runs():
        below = 0 if run.above is None else run.above.path_bytes
        run.path_bytes = below + run.own_bytes + beside[id(run)]
        run.hits = max(hits.get((type(entry), entry.id), 0) for entry in run.entries)
        run.pinned = any(key_of(entry) in pinned for entry in run.entries)
