"""The first words of what is stored: text where the model's vocabulary can be had, token ids elsewhere."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from kvkeep.store.errors import KvkeepError
from kvkeep.tools.words import clean, shortened

if TYPE_CHECKING:
    from kvkeep.cache.adapters.vocabulary import Vocabulary
    from kvkeep.cache.listing import Run
    from kvkeep.store.hashing import Fingerprint
    from kvkeep.store.repository import Repository

_TOKEN_BYTES = 4
# Between how a prefix begins, and how it goes on where it parts from others.
_PARTING = " | "
# Characters of the beginning that are shown however little room there is.
_MIN_FIRST = 12
# Tokens that are looked at for one line of text. Control tokens and spaces among them aren't shown.
_AT_MOST = 200
_HINT = (
    "Tokens are shown as numbers where no vocabulary could be read: kvkeep ls --words FILE.gguf, the model's own, gives text."
)
# Whatever can be wrong with a model file, or with what is remembered of it: words are never worth an error.
_UNREADABLE = (KvkeepError, OSError, ValueError)


class Texts:
    """Tokens as text, for any model of a store.

    Args:
        repository: where it is remembered which files the models were.
        file: take the vocabulary from here instead.
    """

    def __init__(self, repository: "Repository", file: Path | None) -> None:
        self._repository = repository
        self._file = file
        self._open = ExitStack()
        self._loaded: dict[str, Vocabulary | None] = {}
        self._of: dict[Fingerprint, Vocabulary | None] = {}
        self._ingredients: dict[Fingerprint, dict[str, str]] = {}
        self._missing = False

    def line(self, run: "Run", room: int) -> str:
        """One line about a prefix: how it begins, and how it goes on where it parts from others."""
        first, rest = self.lines(run, room)
        if not rest:
            return first
        first = shortened(first, max(_MIN_FIRST, room * 2 // 5))
        return f"{first}{_PARTING}{shortened(rest, room - len(first) - len(_PARTING))}"

    def lines(self, run: "Run", room: int) -> tuple[str, str]:
        """The same in two lines; the second one is empty where it parts from nothing."""
        fingerprint, tokens = run.space.fingerprint, run.all_tokens()
        before = (run.parts_at - run.first_known) * _TOKEN_BYTES
        if before <= 0:
            return self.text(fingerprint, tokens, room, cut=run.first_known > 0), ""
        return self.text(fingerprint, tokens[:before], room), self.text(fingerprint, tokens[before:], room)

    def own(self, run: "Run", room: int) -> str:
        """One line about a run: its own words, from where it parts from what stands beside it."""
        before = run.parts_at - run.start
        own = run.tokens[before * _TOKEN_BYTES :]
        return self.text(run.space.fingerprint, own, room, cut=run.start > 0 or before > 0)

    def text(self, fingerprint: "Fingerprint", tokens: bytes, room: int, *, cut: bool = False) -> str:
        """Tokens as one line of text.

        Args:
            fingerprint: of the model whose tokens they are.
            tokens: little-endian int32.
            room: characters that there is room for.
            cut: something comes before them.
        """
        vocabulary = self._vocabulary(fingerprint)
        some = tokens[: _AT_MOST * _TOKEN_BYTES]
        if vocabulary is None:
            some_ids = (int.from_bytes(some[i : i + _TOKEN_BYTES], "little") for i in range(0, len(some), _TOKEN_BYTES))
            text = " ".join(f"#{number}" for number in some_ids)
        else:
            text = clean(vocabulary.text(some))
        return shortened(f"... {text}" if cut else text, room)

    def _vocabulary(self, fingerprint: "Fingerprint") -> "Vocabulary | None":
        if fingerprint not in self._of:
            self._of[fingerprint] = self._found(fingerprint)
            self._missing |= self._of[fingerprint] is None
        return self._of[fingerprint]

    def _found(self, fingerprint: "Fingerprint") -> "Vocabulary | None":
        try:
            path = self._path_for(fingerprint) if self._file is None else str(self._file)
        except _UNREADABLE:
            return None
        if path is None:
            return None
        if path not in self._loaded:
            self._loaded[path] = self._load(path)
        return self._loaded[path]

    def _path_for(self, fingerprint: "Fingerprint") -> str | None:
        from kvkeep.cache.adapters.vocabulary import find_file
        from kvkeep.store.namespaces import ingredients

        with self._repository.rows() as connection:
            self._ingredients = self._ingredients or ingredients(connection)
            return find_file(connection, fingerprint, self._ingredients.get(fingerprint, {}))

    def _load(self, path: str) -> "Vocabulary | None":
        from kvkeep.cache.adapters.vocabulary import Vocabulary

        try:
            return self._open.enter_context(Vocabulary(path))
        except _UNREADABLE:
            return None

    def close(self) -> None:
        """Give back what was loaded, and say it if some text couldn't be had."""
        self._open.close()
        if self._missing:
            click.echo(_HINT, err=True)


@contextmanager
def texts(repository: "Repository", file: Path | None) -> Iterator[Texts]:
    """`Texts` for as long as the block runs."""
    opened = Texts(repository, file)
    try:
        yield opened
    finally:
        opened.close()
