"""`kvkeep ls`: what is stored, chat by chat."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich import box
from rich.console import Console
from rich.table import Table

from kvkeep.tools.choice import chosen_spaces, short_ids
from kvkeep.tools.console import make_console
from kvkeep.tools.folder import nothing_there, opened
from kvkeep.tools.ls_tree import make_tree
from kvkeep.tools.options import gguf_file, json_option, model_option, path_option, print_json
from kvkeep.tools.texts import Texts, texts
from kvkeep.tools.words import ago, clean, plural, size

if TYPE_CHECKING:
    from kvkeep.cache.listing import Listing, Run
    from kvkeep.store.repository import Repository

_DEFAULT_LIMIT = 20
# What all columns but the words take, and the least that is left for these.
_OTHER_COLUMNS, _MIN_WORDS = 49, 24
# Characters of words in JSON, where no terminal says how many there is room for.
_JSON_WORDS = 200


@dataclass(frozen=True, slots=True)
class _View:
    """What is to be shown.

    Attributes:
        found: everything that is stored of the chosen models.
        prefixes: of its prefixes, the most recently used ones.
        total: how many there are.
        words: reads tokens.
    """

    found: "Listing"
    prefixes: "list[Run]"
    total: int
    words: Texts


@click.command("ls")
@path_option
@model_option
@click.option("--tree", is_flag=True, help="Show how prefixes share what they begin with.")
@click.option(
    "--limit", type=click.IntRange(min=0), help=f"Only the N last used; 0 is all.  [default: {_DEFAULT_LIMIT}; with --json all]"
)
@click.option("--words", "words_file", metavar="FILE.gguf", help="Take the vocabulary from this file, to show tokens as text.")
@json_option
def ls(path: Path, model: str | None, tree: bool, limit: int | None, words_file: str | None, as_json: bool) -> None:
    """List what is stored: prompts and chats, the last used first.

    Each row is a prefix: the longest that is stored of one chat. It shows how the chat begins, and behind a "|" how it
    goes on where it parts from others. Below the bytes that only this one needs stand those of all of it, shared ones
    included. kvkeep rm and kvkeep pin take the ids of the first column, or enough of their first digits.
    """
    file = None if words_file is None else gguf_file("--words", words_file)
    shown = limit if limit is not None else 0 if as_json else _DEFAULT_LIMIT
    with opened(path) as repository:
        if repository is None:
            _show_nothing(path, as_json)
            return
        with texts(repository, file) as words:
            view = _look(repository, model, shown, words)
            if as_json:
                print_json(_document(path, view, tree))
            else:
                _show(make_console(), path, view, tree)


def _look(repository: "Repository", model: str | None, limit: int, words: Texts) -> _View:
    from kvkeep.cache.listing import listing

    with repository.rows() as connection:
        found = listing(connection).of(chosen_spaces(connection, model))
    prefixes = found.prefixes()
    return _View(found, prefixes[:limit] if limit else prefixes, len(prefixes), words)


def _show_nothing(path: Path, as_json: bool) -> None:
    if as_json:
        print_json({"path": str(path), "exists": False, "total": 0, "prefixes": [], "strays": {"entries": 0, "bytes": 0}})
    else:
        make_console().print(nothing_there(path), soft_wrap=True)


# -- JSON --------------------------------------------------------------------------------------------------------------


def _document(path: Path, view: _View, tree: bool) -> dict[str, Any]:
    document: dict[str, Any] = {
        "path": str(path),
        "exists": True,
        "total": view.total,
        "prefixes": [_prefix_document(run, view.words) for run in view.prefixes],
        "strays": {"entries": len(view.found.strays), "bytes": sum(entry.stored_bytes for entry in view.found.strays)},
    }
    if tree:
        document["runs"] = [_run_document(run, view.words) for run in view.found.runs()]
    return document


def _prefix_document(run: "Run", words: Texts) -> dict[str, Any]:
    return {
        "id": run.key.hex(),
        "label": run.space.label,
        "fingerprint": run.space.fingerprint.hex(),
        "words": words.line(run, _JSON_WORDS),
        "tokens": run.end,
        "parts_at": run.parts_at,
        "own_bytes": run.own_bytes,
        "path_bytes": run.path_bytes,
        "used": datetime.fromtimestamp(run.used, UTC).isoformat(),
        "hits": run.hits,
        "pinned": run.pinned,
    }


def _run_document(run: "Run", words: Texts) -> dict[str, Any]:
    """A run of the tree. Flat, because chats of thousands of turns nest deeper than JSON may."""
    return {
        "id": run.key.hex(),
        "above": None if run.above is None else run.above.key.hex(),
        "fingerprint": run.space.fingerprint.hex(),
        "words": words.own(run, _JSON_WORDS),
        "start": run.start,
        "tokens": run.end - run.start,
        "own_bytes": run.own_bytes,
        "pinned": run.pinned,
    }


# -- text --------------------------------------------------------------------------------------------------------------


def _show(console: Console, path: Path, view: _View, tree: bool) -> None:
    console.print(f"Cache folder: {path}", soft_wrap=True)
    if not view.total:
        console.print("Nothing is stored there." if not view.found.strays else "No prefix is stored there.")
    elif tree:
        console.print("", *make_tree(view.found, view.prefixes, view.words, console.width), sep="\n")
    else:
        if len(view.found.spaces) == 1:
            console.print(f"Model: {clean(view.found.spaces[0].label)}", soft_wrap=True)
        console.print("", _table(console, view), sep="\n")
    if len(view.prefixes) < view.total:
        console.print(f"\n{len(view.prefixes)} of {plural(view.total, 'prefix', 'prefixes')}; --limit 0 shows all.")
    if view.found.strays:
        count = plural(len(view.found.strays), "entry", "entries")
        lost = size(sum(entry.stored_bytes for entry in view.found.strays))
        console.print(f"\n{count} ({lost}) of which the beginning is gone: used again once that is saved again, else evicted.")


def _table(console: Console, view: _View) -> Table:
    """All in 80 columns: what is long stands in two lines."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("Id\n", no_wrap=True)
    room = max(_MIN_WORDS, console.width - _OTHER_COLUMNS)
    table.add_column("First words\n| where it parts from others", no_wrap=True, overflow="ellipsis", max_width=room)
    table.add_column("\nTokens", justify="right", no_wrap=True)
    table.add_column("Own bytes\nof all", justify="right", no_wrap=True)
    table.add_column("\nLast used", justify="right", no_wrap=True)
    table.add_column("\nHits", justify="right", no_wrap=True)
    ids = short_ids(run.key for run in view.found.prefixes())
    now = time.time()
    several = len(view.found.spaces) > 1
    labels = [space.label for space in view.found.spaces]
    for run in view.prefixes:
        first, rest = view.words.lines(run, room - 2)
        table.add_row(
            f"{ids[run.key]}\n{'pinned' if run.pinned else ''}",
            f"{first}\n{'| ' if rest else ''}{rest}" + (f"\n{_model(run, labels)}" if several else ""),
            f"{run.end:,}",
            f"{size(run.own_bytes)}\nof {size(run.path_bytes)}",
            ago(run.used, now),
            f"{run.hits:,}",
        )
    return table


def _model(run: "Run", labels: Sequence[str]) -> str:
    """Whose prefix it is; with the beginning of the fingerprint, where one model has several settings."""
    label = clean(run.space.label)
    return label if labels.count(run.space.label) < 2 else f"{label} ({run.space.fingerprint.hex()[:8]})"
