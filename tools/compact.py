"""`kvkeep compact`: gives the disk back what is free in the files. Also `python -m kvkeep.tools.compact`."""

import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

from kvkeep.store.errors import DiskFull
from kvkeep.tools.console import make_console
from kvkeep.tools.folder import nothing_there, opened
from kvkeep.tools.options import dry_run_option, json_option, path_option, print_json
from kvkeep.tools.progress import Report, bytes_progress
from kvkeep.tools.words import plural, size

if TYPE_CHECKING:
    from kvkeep.store.compact import Compacted, Plan
    from kvkeep.store.repository import Repository


@dataclass(frozen=True, slots=True)
class _Done:
    """What was done: how many entries went before, and then the bytes."""

    evicted: int
    compacted: "Compacted"


@click.command()
@path_option
@dry_run_option
@click.option(
    "--evict", is_flag=True, help="If the disk can't hold the copy: remove what was least recently used until it can."
)
@json_option
def compact(path: Path, dry_run: bool, evict: bool, as_json: bool) -> None:
    """Give unused room back to the disk.

    Worth it after kvkeep rm, or with a smaller budget. What is in use is copied into a new file, and the old one goes:
    until then both take room. Assistants may use the folder meanwhile. Ctrl-C leaves everything as it was. If the
    budget has become smaller, what was least recently used goes first, until the rest fits.
    """
    with opened(path) as repository:
        if repository is None:
            _nothing(path, as_json)
            return
        planned = _plan(repository)
        done = None if dry_run else _compact(repository, evict)
    if as_json:
        print_json(_document(path, planned, done))
    else:
        _show(make_console(), path, planned, done)


def _nothing(path: Path, as_json: bool) -> None:
    if as_json:
        print_json({"path": str(path), "exists": False, "plan": None, "result": None})
    else:
        make_console().print(nothing_there(path), soft_wrap=True)


def _plan(repository: "Repository") -> "Plan":
    from kvkeep.store.compact import plan

    return plan(repository)


def _compact(repository: "Repository", evict: bool) -> _Done:
    from kvkeep.cache import budget, upkeep
    from kvkeep.store.compact import compact as compact_store

    # The budget, and the time that entries are kept, may have become smaller.
    with repository.writing() as writing:
        evicted = len(budget.expire(writing)) + len(budget.make_room(writing, 0))
    if evict:
        evicted += upkeep.evict_until_copy_fits(repository)
    try:
        with bytes_progress("Copying") as report:
            return _Done(evicted, compact_store(repository, _adding(report, _plan(repository).live_bytes)))
    except DiskFull as error:
        raise DiskFull(f"{error}. --evict removes what was least recently used until it does") from error


def _adding(report: Report, total: int) -> Callable[[int], None]:
    """Progress in pieces as progress so far."""
    done = 0

    def add(n_bytes: int) -> None:
        nonlocal done
        done += n_bytes
        report(min(done, total), total)

    return add


def _document(path: Path, planned: "Plan", done: _Done | None) -> dict[str, Any]:
    derived = {name: getattr(planned, name) for name in ("needed_bytes", "gained_bytes", "fits")}
    return {
        "path": str(path),
        "exists": True,
        "plan": asdict(planned) | derived,
        "result": None if done is None else {"evicted": done.evicted, **asdict(done.compacted)},
    }


def _show(console: Console, path: Path, planned: "Plan", done: _Done | None) -> None:
    console.print(f"Cache folder: {path}", soft_wrap=True)
    if done is None:
        _show_plan(console, planned)
        return
    if done.evicted:
        console.print(f"Removed {plural(done.evicted, 'entry', 'entries')} that had no room, or were too old.")
    before, after = done.compacted.before_bytes, done.compacted.after_bytes
    console.print(f"On disk: {size(before)} before, {size(after)} now: {size(max(0, before - after))} given back.")


def _show_plan(console: Console, planned: "Plan") -> None:
    garbage = plural(planned.garbage_blobs, "blob") + " that nothing names"
    console.print(f"In use:  {size(planned.live_bytes)} in {plural(planned.blobs, 'blob')}; besides, {garbage}.")
    console.print(f"File:    {size(planned.file_bytes)}, and {size(planned.index_free_bytes)} of the index are free.")
    console.print(f"Brings:  about {size(planned.gained_bytes)}.")
    console.print(
        f"Needs:   {size(planned.needed_bytes)} until the old file is gone; the disk has {size(planned.free_bytes)} to give."
    )
    if not planned.fits:
        console.print("The copy doesn't fit: --evict removes what was least recently used until it does.", style="yellow")


def _as_program() -> None:
    from kvkeep.tools.main import main

    main(["compact", *sys.argv[1:]], prog_name="kvkeep")


if __name__ == "__main__":
    _as_program()
