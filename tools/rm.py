"""`kvkeep rm`: removes prefixes, with whatever nobody else needs of them."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

from kvkeep.store.errors import UsageError
from kvkeep.tools.choice import chosen_spaces, named, short_ids
from kvkeep.tools.console import confirm, make_console
from kvkeep.tools.folder import nothing_there, opened
from kvkeep.tools.options import dry_run_option, json_option, model_option, path_option, print_json
from kvkeep.tools.texts import Texts, texts
from kvkeep.tools.words import ago, clean, parse_duration, plural, size

if TYPE_CHECKING:
    from kvkeep.cache.listing import Listing, Run
    from kvkeep.store.engine import Connection
    from kvkeep.store.entry import Entry
    from kvkeep.store.hashing import PrefixHash
    from kvkeep.store.pins import Pin
    from kvkeep.store.repository import Repository

# Lines of a plan that are shown; --json has all.
_SHOWN = 20


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a person asks for.

    Attributes:
        ids: of prefixes, or none.
        model: only of this one.
        older_than: only what nobody has used for so many seconds.
        force: pinned ones, too.
    """

    ids: Sequence[str]
    model: str | None
    older_than: int | None
    force: bool

    @property
    def everything(self) -> bool:
        """Whether all of the models goes, strays included."""
        return not self.ids and self.older_than is None


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be removed.

    Attributes:
        prefixes: the chosen ones.
        entries: what nobody needs without them.
        spared: pinned ones that stay.
        pins: those that go, too: where everything of a model goes by force, nothing may be left of its tokens.
        ids: of all prefixes, as they are shown.
    """

    prefixes: "list[Run]"
    entries: "list[Entry]"
    spared: int
    pins: "list[Pin]"
    ids: "dict[PrefixHash, str]"

    @property
    def n_bytes(self) -> int:
        return sum(entry.stored_bytes for entry in self.entries)


@click.command("rm")
@click.argument("ids", nargs=-1, metavar="[ID]...")
@path_option
@model_option
@click.option("--all", "everything", is_flag=True, help="Everything, of all models.")
@click.option("--older-than", metavar="AGE", help="What nobody has used for longer than AGE: 45s, 10min, 12h, 30d, 2w.")
@click.option("--force", is_flag=True, help="Pinned ones, too.")
@dry_run_option
@click.option("--yes", is_flag=True, help="Don't ask.")
@json_option
def rm(
    ids: tuple[str, ...],
    path: Path,
    model: str | None,
    everything: bool,
    older_than: str | None,
    force: bool,
    dry_run: bool,
    yes: bool,
    as_json: bool,
) -> None:
    """Remove prefixes, one by one or many at once.

    They are named by the ids that kvkeep ls shows. A prefix goes with what no other one begins with; what others share
    stays. Pinned ones stay unless --force is given; with --model or --all that also ends the pins themselves. May be used
    beside assistants: they decode anew what they miss. Until kvkeep compact has run, the removed bytes are still on the disk.
    """
    wanted = _wanted(ids, model, everything, older_than, force)
    with opened(path) as repository:
        if repository is None:
            _nothing(path, wanted, as_json)
            return
        plan = _plan(repository, wanted)
        console = make_console()
        if not as_json:
            with texts(repository, None) as words:
                _show_plan(console, path, plan, words)
        if not dry_run and (plan.entries or plan.pins) and not ids and not yes:
            _ask(plan)
        removed = [] if dry_run else _remove(repository, plan)
    if as_json:
        print_json(_document(path, plan, removed))
    elif not dry_run:
        _show_removed(console, path, plan, removed)


def _wanted(ids: tuple[str, ...], model: str | None, everything: bool, older_than: str | None, force: bool) -> Wanted:
    if sum((bool(ids), everything, model is not None or older_than is not None)) != 1:
        raise UsageError("name what is to be removed: ids (see kvkeep ls), or --model and --older-than, or --all")
    return Wanted(ids, model, None if older_than is None else parse_duration(older_than), force)


def _nothing(path: Path, wanted: Wanted, as_json: bool) -> None:
    if wanted.ids or wanted.model is not None:
        raise UsageError(nothing_there(path))
    if as_json:
        print_json(
            {
                "path": str(path),
                "exists": False,
                **_figures([]),
                "prefixes": [],
                "spared": 0,
                "pins": 0,
                "removed": _figures([]),
            }
        )
    else:
        make_console().print(nothing_there(path), soft_wrap=True)


# -- planning ----------------------------------------------------------------------------------------------------------


def _plan(repository: "Repository", wanted: Wanted) -> Plan:
    from kvkeep.cache.listing import listing
    from kvkeep.store import pins

    with repository.rows() as connection:
        every = listing(connection)
        spaces = chosen_spaces(connection, wanted.model)
        found = every.of(spaces)
        ending = (
            [pin for space in spaces for pin in pins.of(connection, space.id)] if wanted.force and wanted.everything else []
        )
    ids = {run.key: name for run, name in _with_names(every)}
    chosen = _chosen(found, wanted)
    if wanted.ids and not wanted.force and (pinned := [ids[run.key] for run in chosen if run.pinned]):
        raise UsageError(f"pinned: {', '.join(pinned)}; kvkeep unpin ends that, and --force removes pinned ones all the same")
    going = [run for run in chosen if wanted.force or not run.pinned]
    entries = found.going_with({run.key for run in going})
    entries += found.strays if wanted.everything else []
    return Plan(going, entries, len(chosen) - len(going), ending, ids)


def _with_names(every: "Listing") -> "list[tuple[Run, str]]":
    prefixes = every.prefixes()
    ids = short_ids(run.key for run in prefixes)
    return [(run, ids[run.key]) for run in prefixes]


def _chosen(found: "Listing", wanted: Wanted) -> "list[Run]":
    prefixes = found.prefixes()
    if wanted.ids:
        keys = set(named(wanted.ids, [run.key for run in prefixes]))
        return [run for run in prefixes if run.key in keys]
    if wanted.older_than is not None:
        before = time.time() - wanted.older_than
        return [run for run in prefixes if run.used < before]
    return prefixes


def _ask(plan: Plan) -> None:
    question = f"Remove {plural(len(plan.prefixes), 'prefix', 'prefixes')}, {size(plan.n_bytes)}?"
    confirm(question, "so many are removed at once")


# -- doing -------------------------------------------------------------------------------------------------------------


def _remove(repository: "Repository", plan: Plan) -> "list[Entry]":
    """Remove what was planned, and is still needed by nobody. Returns what was removed."""
    from kvkeep.store import pins

    with repository.writing() as writing:
        with writing.index.read() as connection:
            entries = _still_going(connection, plan)
        with writing.index.write() as connection:
            pins.remove(connection, plan.pins)
        writing.remove(entries)
    return entries


def _still_going(connection: "Connection", plan: Plan) -> "list[Entry]":
    """What of a plan still goes: chats may have gone on since, and ids of rows are used again."""
    from kvkeep.cache.listing import listing

    now = listing(connection)
    planned = {run.key: run.pinned for run in plan.prefixes}
    # Not what was pinned since.
    keys = {run.key for run in now.prefixes() if run.key in planned and (planned[run.key] or not run.pinned)}
    going = {_row(entry) for entry in (*now.strays, *now.going_with(keys))}
    return [entry for entry in plan.entries if _row(entry) in going]


def _row(entry: "Entry") -> tuple[type, int, bytes]:
    return type(entry), entry.id, entry.blob


# -- saying ------------------------------------------------------------------------------------------------------------


def _figures(entries: "Sequence[Entry]") -> dict[str, int]:
    return {"entries": len(entries), "bytes": sum(entry.stored_bytes for entry in entries)}


def _document(path: Path, plan: Plan, removed: "Sequence[Entry]") -> dict[str, Any]:
    prefixes = [
        {"id": run.key.hex(), "label": run.space.label, "tokens": run.end, "own_bytes": run.own_bytes, "pinned": run.pinned}
        for run in plan.prefixes
    ]
    return {
        "path": str(path),
        "exists": True,
        **_figures(plan.entries),
        "prefixes": prefixes,
        "spared": plan.spared,
        "pins": len(plan.pins),
        "removed": _figures(removed),
    }


def _show_plan(console: Console, path: Path, plan: Plan, words: Texts) -> None:
    console.print(f"Cache folder: {path}", soft_wrap=True)
    now = time.time()
    for run in plan.prefixes[:_SHOWN]:
        name = plan.ids[run.key]
        figures = f"{plural(run.end, 'token')}, {size(run.own_bytes)} of its own, last used {ago(run.used, now)}"
        console.print(f"  {name}  {words.line(run, console.width - len(name) - 4)}", no_wrap=True, overflow="ellipsis")
        console.print(f"  {' ' * len(name)}  {clean(run.space.label)}: {figures}", soft_wrap=True)
    if len(plan.prefixes) > _SHOWN:
        console.print(f"  and {len(plan.prefixes) - _SHOWN:,} more (--json prints all)")
    if plan.spared:
        console.print(f"Pinned, and therefore to stay: {plural(plan.spared, 'prefix', 'prefixes')}. --force removes them, too.")
    if plan.pins:
        console.print(f"To be ended: {plural(len(plan.pins), 'pin')}.")
    figures = f"{plural(len(plan.entries), 'entry', 'entries')}, {size(plan.n_bytes)}"
    console.print(f"To be removed: {plural(len(plan.prefixes), 'prefix', 'prefixes')}, {figures}.")


def _show_removed(console: Console, path: Path, plan: Plan, removed: "Sequence[Entry]") -> None:
    figures = _figures(removed)
    console.print(f"Removed {plural(figures['entries'], 'entry', 'entries')}, {size(figures['bytes'])}.")
    if len(removed) < len(plan.entries):
        console.print("The rest was in use by others meanwhile, or gone already.")
    if removed:
        console.print("kvkeep fills the room anew. To give it back to the disk:")
        console.print(f"   kvkeep compact --path {path}", soft_wrap=True)
