"""`kvkeep export`: what is stored of some prefixes, in one file that another machine can import."""

import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvkeep.store.errors import UsageError
from kvkeep.tools.choice import chosen_spaces, short_ids
from kvkeep.tools.console import make_console
from kvkeep.tools.folder import nothing_there, opened
from kvkeep.tools.options import json_option, model_option, path_option, print_json, tokens_option
from kvkeep.tools.prefixes import Chosen, named_prefixes, pinned_prefixes
from kvkeep.tools.progress import bytes_progress
from kvkeep.tools.texts import texts
from kvkeep.tools.words import clean, plural, size

if TYPE_CHECKING:
    from rich.console import Console

    from kvkeep.cache.bundle import Exported
    from kvkeep.store.repository import Repository
    from kvkeep.tools.texts import Texts


@click.command()
@click.argument("ids", nargs=-1, metavar="[ID]...")
@click.option("--to", "to", metavar="FILE", required=True, help="The bundle that is written.")
@click.option("--pinned", is_flag=True, help="All pinned prefixes, instead of ids.")
@tokens_option
@path_option
@model_option
@click.option("--force", is_flag=True, help="Replace FILE if it is there.")
@json_option
def export(
    ids: tuple[str, ...],
    to: str,
    pinned: bool,
    n_tokens: int | None,
    path: Path,
    model: str | None,
    force: bool,
    as_json: bool,
) -> None:
    """Write prefixes into a file for another machine.

    They are named by the ids that kvkeep ls and kvkeep pin --list show, and are all of one model. There, kvkeep
    import makes the same model with the same settings warm. The file holds their tokens, which anybody who has the model
    can read, and nothing behind them.
    """
    if bool(ids) == pinned:
        raise UsageError("name the prefixes to export: ids (see kvkeep ls), or --pinned for all that are pinned")
    if model is not None and not pinned:
        raise UsageError("--model chooses among pinned prefixes; an id belongs to one model anyway")
    if n_tokens is not None and pinned:
        raise UsageError("--tokens is about prefixes that are named by ids; a pin has the tokens that it has")
    file = _target(to, force, path)
    with opened(path) as repository:
        if repository is None:
            raise UsageError(nothing_there(path))
        chosen = _pinned(repository, model) if pinned else named_prefixes(repository, ids, n_tokens, "exported")
        done = _export(repository, chosen, file)
        if as_json:
            print_json(_document(path, chosen, done))
        else:
            with texts(repository, None) as words:
                _show(make_console(), path, chosen, done, words)


def _target(to: str, force: bool, path: Path) -> Path:
    """The file, looked at before anything is read."""
    if not to:
        raise UsageError("--to names a file; an empty text is none")
    file = Path(to).expanduser().absolute()
    if file.resolve().is_relative_to(path.resolve()):
        raise UsageError(f"{file} is in the cache folder, whose files belong to kvkeep: name a file elsewhere")
    if os.path.lexists(file) and not force:
        raise UsageError(f"{file} exists; --force replaces it")
    return file


def _pinned(repository: "Repository", model: str | None) -> list[Chosen]:
    with repository.rows() as connection:
        wanted = {space.id for space in chosen_spaces(connection, model)}
    chosen = [
        Chosen(found.key, found.space, found.pin.tokens) for found in pinned_prefixes(repository) if found.space.id in wanted
    ]
    if not chosen:
        raise UsageError(
            "nothing is pinned" + ("" if model is None else f" of {clean(model)!r}") + "; kvkeep pin pins prefixes"
        )
    models = {found.space.fingerprint.hex()[:8]: clean(found.space.label) for found in chosen}
    if len(models) > 1:
        names = ", ".join(f"{label} ({digits})" for digits, label in models.items())
        raise UsageError(f"a bundle holds prefixes of one model, and pinned are some of: {names}; --model chooses one")
    return chosen


def _export(repository: "Repository", chosen: Sequence[Chosen], file: Path) -> "Exported":
    from kvkeep.cache import bundle

    prefixes = [(found.space, found.tokens) for found in chosen]
    total = bundle.stored_bytes(repository, prefixes)
    done = 0
    with bytes_progress("Writing") as report:

        def progress(n_bytes: int) -> None:
            nonlocal done
            done += n_bytes
            report(done, total)

        return bundle.export(repository, prefixes, file, progress)


def _document(path: Path, chosen: Sequence[Chosen], done: "Exported") -> dict[str, Any]:
    space = chosen[0].space
    return {
        "path": str(path),
        "file": str(done.file),
        "label": space.label,
        "fingerprint": space.fingerprint.hex(),
        "prefixes": [
            {"id": found.key.hex(), "tokens": found.n_tokens, "exported_tokens": reached}
            for found, reached in zip(chosen, done.reached, strict=True)
        ],
        "entries": done.entries,
        "bytes": done.n_bytes,
    }


def _show(console: "Console", path: Path, chosen: Sequence[Chosen], done: "Exported", words: "Texts") -> None:
    console.print(f"Cache folder: {path}", soft_wrap=True)
    console.print(f"Model: {clean(chosen[0].space.label)}", soft_wrap=True)
    ids = short_ids(found.key for found in chosen)
    for found, reached in zip(chosen, done.reached, strict=True):
        name = ids[found.key]
        figures = plural(found.n_tokens, "token")
        if reached < found.n_tokens:
            figures += f", of which only the first {reached:,} can be restored from it"
        line = words.text(found.space.fingerprint, found.tokens, max(0, console.width - len(name) - 4))
        console.print(f"  {name}  {line}", no_wrap=True, overflow="ellipsis")
        console.print(f"  {' ' * len(name)}  {figures}", soft_wrap=True)
    what = plural(len(chosen), "prefix", "prefixes")
    console.print(
        f"Exported {what} to {clean(str(done.file))}: {plural(done.entries, 'entry', 'entries')}, {size(done.n_bytes)}.",
        soft_wrap=True,
    )
    console.print("On the other machine:")
    console.print(f"   kvkeep import {shlex.quote(clean(done.file.name))}", soft_wrap=True)
