"""`kvkeep pin` and `kvkeep unpin`: what is never evicted, whether or not anybody uses it."""

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich import box
from rich.console import Console
from rich.table import Table

from kvkeep.store.errors import UsageError
from kvkeep.tools.choice import named, short_ids
from kvkeep.tools.console import make_console
from kvkeep.tools.folder import nothing_there, opened
from kvkeep.tools.options import json_option, path_option, print_json, tokens_option
from kvkeep.tools.prefixes import Pinned, named_prefixes, pinned_prefixes, stored_prefixes
from kvkeep.tools.texts import Texts, texts
from kvkeep.tools.words import clean, plural, size

if TYPE_CHECKING:
    from kvkeep.cache.listing import Run
    from kvkeep.store.hashing import PrefixHash
    from kvkeep.store.repository import Repository


# What all columns but the words take, and the least that is left for these.
_OTHER_COLUMNS, _MIN_WORDS = 32, 24


@click.command()
@click.argument("ids", nargs=-1, metavar="[ID]...")
@path_option
@tokens_option
@click.option("--list", "listed", is_flag=True, help="Show what is pinned.")
@json_option
def pin(ids: tuple[str, ...], path: Path, n_tokens: int | None, listed: bool, as_json: bool) -> None:
    """Pin prefixes: they are never evicted, and never too old.

    They are named by the ids that kvkeep ls and kvkeep pin --list show. At most half of the room for states can be
    pinned. What is saved of a pinned prefix later is kept, too.
    """
    if n_tokens is not None and not ids:
        raise UsageError("--tokens is about the prefixes that ids name")
    if bool(ids) == listed:
        raise UsageError("name ids to pin (see kvkeep ls), or --list to see what is pinned")
    with opened(path) as repository:
        if repository is None:
            _nothing(path, ids, as_json)
            return
        changed = _pin(repository, ids, n_tokens) if ids else []
        _say(path, repository, as_json, changed, "pinned" if ids else "")


@click.command()
@click.argument("ids", nargs=-1, metavar="ID...", required=True)
@path_option
@json_option
def unpin(ids: tuple[str, ...], path: Path, as_json: bool) -> None:
    """End pins.

    They are named by the ids that kvkeep pin --list shows, or those of the prefixes that they keep. What was kept stays
    until its time comes.
    """
    with opened(path) as repository:
        if repository is None:
            raise UsageError(nothing_there(path))
        _say(path, repository, as_json, _unpin(repository, ids), "unpinned")


def _nothing(path: Path, ids: Sequence[str], as_json: bool) -> None:
    if ids:
        raise UsageError(nothing_there(path))
    if as_json:
        print_json({"path": str(path), "exists": False, "changed": [], "pins": []})
    else:
        make_console().print(nothing_there(path), soft_wrap=True)


# -- doing -------------------------------------------------------------------------------------------------------------


def _pin(repository: "Repository", ids: Sequence[str], n_tokens: int | None) -> "list[PrefixHash]":
    """Pin prefixes; all are found before the first one is pinned. Returns those that weren't pinned before."""
    from kvkeep.cache.pinned import pin as pin_tokens

    chosen = named_prefixes(repository, ids, n_tokens, "pinned")
    with repository.writing() as writing:
        return [found.key for found in chosen if pin_tokens(writing, found.space, found.tokens)]


def _unpin(repository: "Repository", ids: Sequence[str]) -> "list[PrefixHash]":
    """End pins; all are found before the first one ends. Returns which."""
    from kvkeep.cache.pinned import unpin as unpin_tokens

    prefixes = stored_prefixes(repository)
    pins = pinned_prefixes(repository)
    known = {found.key for found in pins}
    keys = named(ids, {*prefixes, *known})
    ending = [found for found in pins if any(found.key == key or _keeps(found, prefixes.get(key)) for key in keys)]
    if not ending:
        raise UsageError(f"{', '.join(ids)} {'is' if len(ids) == 1 else 'are'} not pinned; kvkeep pin --list shows what is")
    with repository.writing() as writing:
        return [found.key for found in ending if unpin_tokens(writing, found.space, found.pin.tokens)]


def _keeps(found: Pinned, run: "Run | None") -> bool:
    """Whether a pin keeps some of what a prefix has for its own; `kvkeep ls` shows it as pinned then."""
    from kvkeep.cache.eviction import key_of

    return run is not None and any(key_of(entry) in found.kept for entry in run.entries)


# -- saying ------------------------------------------------------------------------------------------------------------


def _say(path: Path, repository: "Repository", as_json: bool, changed: "list[PrefixHash]", what: str) -> None:
    found = pinned_prefixes(repository)
    if as_json:
        keys = [key.hex() for key in changed]
        print_json({"path": str(path), "exists": True, "changed": keys, "pins": [_document(one) for one in found]})
        return
    console = make_console()
    console.print(f"Cache folder: {path}", soft_wrap=True)
    if what:
        console.print(f"{plural(len(changed), 'prefix', 'prefixes')} {what}." if changed else f"Already {what}.")
    elif found:
        with texts(repository, None) as words:
            console.print("", _table(console, found, words), sep="\n")
    else:
        console.print("Nothing is pinned.")


def _document(found: Pinned) -> dict[str, Any]:
    return {
        "id": found.key.hex(),
        "label": found.space.label,
        "fingerprint": found.space.fingerprint.hex(),
        "tokens": found.pin.n_tokens,
        "stored_bytes": found.stored_bytes,
        "created": datetime.fromtimestamp(found.pin.created, UTC).isoformat(),
    }


def _table(console: Console, found: list[Pinned], words: Texts) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), pad_edge=False)
    room = max(_MIN_WORDS, console.width - _OTHER_COLUMNS)
    table.add_column("Id\n", no_wrap=True)
    table.add_column("First words\nmodel", no_wrap=True, overflow="ellipsis", max_width=room)
    table.add_column("\nTokens", justify="right", no_wrap=True)
    table.add_column("\nStored", justify="right", no_wrap=True)
    ids = short_ids(one.key for one in found)
    for one in found:
        line = words.text(one.space.fingerprint, one.pin.tokens, room)
        table.add_row(ids[one.key], f"{line}\n{clean(one.space.label)}", f"{one.pin.n_tokens:,}", size(one.stored_bytes))
    return table
