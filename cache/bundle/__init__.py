"""Bundles: what is stored of some prefixes, in one file that can be carried to another machine.

export   rows of the prefixes --cut to their tokens--> records with verified values --> a file
take     a file --every byte verified, every row computed anew--> entries --> another store

format.py    its bytes
rows.py      the rows that follow from its prefixes
writing.py   a file from a store
taking.py    into a store from a file
"""

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from kvkeep.cache.bundle import taking
from kvkeep.cache.bundle.format import MAGIC, VERSION, BundleFile, Record
from kvkeep.cache.bundle.rows import check_order, check_value, row_of, unique
from kvkeep.cache.bundle.taking import Item, Taken
from kvkeep.cache.bundle.writing import Exported, Prefixes, Progress, export, stored_bytes
from kvkeep.cache.restore_point import Prompt
from kvkeep.store.errors import BadFrame, IntegrityError, LayoutError, StoreError
from kvkeep.store.hashing import PrefixHash
from kvkeep.store.nodes import NewNode
from kvkeep.store.repository import Repository
from kvkeep.store.rows import NewRow

__all__ = ["Bundle", "Exported", "Prefixes", "Progress", "Taken", "export", "is_bundle", "stored_bytes"]


def is_bundle(path: Path) -> bool:
    """Whether a file begins as a bundle does. False where there is none.

    Raises:
        StoreError: it can't be read.
    """
    if not path.is_file():
        return False
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError as error:
        raise StoreError(f"{path} can't be read: {error.strerror or error}") from error


class Bundle:
    """A bundle, open for reading. Its head is whole; its entries are only looked at by `verify` and `take`.

    Attributes:
        path: the file.
        version: of its format.
        fingerprint: of the model whose states these are.
        label: the model's own name, for people.
        ingredients: what went into the fingerprint, for people.
        block_tokens: tokens of a block.
        prefixes: the tokens of each prefix, little-endian int32.
        n_entries: how many entries it has.
        n_bytes: the size of the file.
    """

    def __init__(self, path: Path) -> None:
        self._file = BundleFile(path)
        head = self._file.head
        self.path = path
        self.version = VERSION
        self.fingerprint = head.fingerprint
        self.label = head.label
        self.ingredients = head.ingredients
        self.block_tokens = head.block_tokens
        self.prefixes = head.prefixes
        self.n_entries = head.n_entries
        self.n_bytes = self._file.size
        self._prompts = [Prompt.of(self.fingerprint, tokens, self.block_tokens) for tokens in self.prefixes]
        self._items: list[Item] | None = None

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open a bundle, and read its head.

        Raises:
            UsageError: there is no such file.
            BadBundle: it is none, is cut off, or its head is damaged.
            TooNew: a newer kvkeep wrote it.
            StoreError: it can't be read.
        """
        return cls(path)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Closing twice does nothing."""
        self._file.close()

    def verify(self, progress: Progress = lambda n_bytes: None) -> None:
        """Read every byte: is each entry what its name says, and does it belong to the tokens of a prefix?

        Finds damage, not malice: whoever makes a bundle can put any keys and values into it.

        Args:
            progress: see `Progress`; all bytes together are `n_bytes`.

        Raises:
            BadBundle: something is wrong.
            StoreError: the file can't be read.
        """
        self._items = None
        items: list[Item] = []
        before: dict[PrefixHash, NewNode] = {}
        names: set[tuple[object, ...]] = set()
        progress(self.n_bytes - self._file.head.entries_bytes)
        for number, (record, at, value) in enumerate(self._file.entries()):
            try:
                row = _checked(record, memoryview(value), self._prompts, before)
            except (IntegrityError, LayoutError) as error:
                raise self._file.bad(f"its entry {number} is damaged: {error}") from error
            if unique(row) in names:
                raise self._file.bad(f"its entry {number} is in it twice")
            names.add(unique(row))
            if isinstance(row, NewNode):
                before[row.key] = row
            items.append(Item(row, at))
            progress(record.n_bytes)
        self._items = items

    def missing_bytes(self, repository: Repository) -> int:
        """What `take` would need in a store at most; 0 if everything is there. It is verified first, unless it was.

        Raises:
            BadBundle: see `verify`.
            UsageError: this model is stored there in blocks of another length.
        """
        if self._items is None:
            self.verify()
        assert self._items is not None
        return taking.missing_bytes(repository, self._file.head, self._items)

    def take(self, repository: Repository, *, pin: bool = False, progress: Progress = lambda n_bytes: None) -> Taken:
        """Store what of it isn't stored yet: all of it or nothing. What is there stays as it is.

        Until it returns nobody else writes into the store. Something that would have to go for it, and isn't pinned, goes.

        Args:
            repository: where to.
            pin: also pin its prefixes.
            progress: see `Progress`; all bytes together are those of the entries, and `n_bytes` before them if it
                wasn't verified yet.

        Raises:
            BadBundle: see `verify`. Nothing was stored.
            UsageError: this model is stored there in blocks of another length.
            CapacityError: there is no room for it. Nothing was stored.
            StoreLocked: another process writes. Nothing was stored.
            StoreError: a file can't be read or written. What was new is gone again.
        """
        if self._items is None:
            self.verify(progress)
        assert self._items is not None
        return taking.take(repository, self._file, self._items, self._prompts, pin=pin, progress=progress)


def _checked(record: Record, value: memoryview, prompts: Sequence[Prompt], before: dict[PrefixHash, NewNode]) -> NewRow:
    """The row of a record, after everything about it has been checked.

    Raises:
        IntegrityError, LayoutError: something about it is wrong.
    """
    if record.prefix >= len(prompts):
        raise BadFrame(f"it belongs to prefix {record.prefix}, and there are {len(prompts)}")
    prompt = prompts[record.prefix]
    row = row_of(record, prompt)
    check_order(row, before, prompts)
    check_value(value, row, record, prompt)
    return row
