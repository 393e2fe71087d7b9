"""`kvkeep migrate`: brings the index's schema up to date, or back to that of an older kvkeep."""

import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

from kvkeep.store.errors import DamagedFile, DiskFull, MigrationFailed, StoreError, TooNew, UsageError
from kvkeep.tools.console import confirm, make_console
from kvkeep.tools.folder import holds_a_store, nothing_there
from kvkeep.tools.options import json_option, path_option, print_json
from kvkeep.tools.progress import bytes_progress
from kvkeep.tools.words import size

if TYPE_CHECKING:
    from kvkeep.migrations.upgrade import Change
    from kvkeep.store.engine import Index


@dataclass(frozen=True, slots=True)
class Way:
    """From the schema of a folder to the one that it is to have.

    Attributes:
        found: the revision that was found; None in an empty index.
        wanted: the one that is wanted.
        ours: that of this kvkeep.
        refused: why it can't be changed, in a sentence: it is newer than all that this kvkeep knows.
        changes: what lies between them.
        lost: what the way back takes away, how many of what.
    """

    found: str | None
    wanted: str
    ours: str
    refused: str | None = None
    changes: "list[Change]" = field(default_factory=list)
    lost: dict[str, int] = field(default_factory=dict)

    @property
    def is_back(self) -> bool:
        return any(change.undone for change in self.changes)

    @property
    def state(self) -> str:
        if self.refused is not None:
            return "newer"
        return "needed" if self.changes else "current"

    @property
    def exit_code(self) -> int:
        """What `--check` ends with."""
        return {"newer": TooNew.exit_code, "needed": MigrationFailed.exit_code, "current": 0}[self.state]


@dataclass(slots=True)
class _Done:
    """What was done.

    Attributes:
        backup: the copy of the index as it was, if one was made.
        recovered: what was damaged and is mended, in sentences.
    """

    backup: Path | None = None
    recovered: list[str] = field(default_factory=list)


@click.command()
@path_option
@click.option("--check", is_flag=True, help="Change nothing; say what would be done. Exits with 21 if there is anything to do.")
@click.option(
    "--to", metavar="REVISION", help="Another schema than this kvkeep's: 0.2.0 for whoever goes back to kvkeep 0.2.0."
)
@click.option("--backup", metavar="FILE", help="Where to keep a copy of the index as it was, instead of in the folder.")
@click.option("--no-backup", is_flag=True, help="Keep no copy.")
@click.option("--yes", is_flag=True, help="Don't ask before anything is lost.")
@json_option
def migrate(path: Path, check: bool, to: str | None, backup: str | None, no_backup: bool, yes: bool, as_json: bool) -> None:
    """Bring the schema of the index up to date.

    Any program that opens the folder does so, too, as soon as nobody else has it open. This command keeps a copy of the
    index before, and can go back with --to, for an older kvkeep. All of it is done, or nothing. With --check it exits with
    0 if there is nothing to do, 21 if there is, and 22 if a newer kvkeep wrote the folder.
    """
    place = _place(path, backup, no_backup, check)
    wanted = _known(to)
    if not holds_a_store(path):
        _nothing(path, wanted, as_json)
        return
    way, done = _look(path, wanted), None
    console = make_console()
    if not check and way.refused is not None:
        raise TooNew(way.refused)
    if not as_json:
        _show_way(console, path, way)
    if not check and way.changes:
        if way.is_back and not yes:
            _ask(way)
        done = _migrate(path, way, place, not no_backup)
    if as_json:
        print_json(_document(path, way, done))
    elif done is not None:
        _show_done(console, path, way, done)
    elif way.changes:
        _show_needed(console, path, way)
    if check:
        click.get_current_context().exit(way.exit_code)


def _place(path: Path, backup: str | None, no_backup: bool, check: bool) -> Path | None:
    """Where somebody wants the backup."""
    if (backup is not None) + no_backup + check > 1:
        raise UsageError("--check, --backup and --no-backup exclude each other")
    if backup is None:
        return None
    place = Path(backup).expanduser().absolute()
    if not place.parent.is_dir():
        raise UsageError(f"--backup names a file in a folder that exists; {place.parent} is none")
    if place.resolve().is_relative_to(path.resolve()):
        raise UsageError(
            f"{place} is in the cache folder, where kvkeep gives the names: without --backup it finds one by itself"
        )
    if os.path.lexists(place):
        raise UsageError(f"{place} exists, and nothing is written over it: name another file")
    return place


def _known(to: str | None) -> str:
    """The revision that is wanted."""
    from kvkeep.migrations.upgrade import revisions
    from kvkeep.store.schema import REVISION

    if to is not None and to not in (known := revisions()):
        raise UsageError(f"--to names a schema that this kvkeep knows: {', '.join(known)}; not {to!r}")
    return REVISION if to is None else to


def _look(path: Path, wanted: str) -> Way:
    from kvkeep.migrations.upgrade import changes, lost
    from kvkeep.store.opening import index_of
    from kvkeep.store.schema import REVISION

    with index_of(path) as index:
        try:
            found = index.revision()
            index.is_current()
            with index.read() as connection:
                return Way(found, wanted, REVISION, None, changes(found, wanted), lost(connection, found, wanted))
        except TooNew as error:
            return Way(found, wanted, REVISION, str(error))
        except DamagedFile as error:
            raise DamagedFile(f"{error}. To mend it: kvkeep verify --repair --path {path}") from error


def _ask(way: Way) -> None:
    confirm(f"Go back from schema {way.found} to {way.wanted}?", "a way back takes away what the older schema can't hold")


# -- doing -------------------------------------------------------------------------------------------------------------


def _migrate(path: Path, way: Way, place: Path | None, backup: bool) -> _Done:
    from kvkeep.store.backup import free_name
    from kvkeep.store.opening import migrate_root

    done = _Done()

    def before(index: "Index") -> None:
        found = index.revision()
        if found != way.found:
            # What was said, and asked, was about another way.
            raise StoreError(f"{path} was brought to schema {found} meanwhile: nothing was done, try again")
        # There is nothing in an empty one.
        if backup and found is not None:
            done.backup = _backed_up(index, path, place or free_name(path, found))

    done.recovered = migrate_root(path, way.wanted, before)
    return done


def _backed_up(index: "Index", path: Path, target: Path) -> Path:
    from kvkeep.store.backup import back_up

    try:
        with bytes_progress("Copying the index") as report:
            back_up(index, target, report)
    except DiskFull as error:
        hint = f"kvkeep migrate --path {path} --backup FILE writes it to another disk, and --no-backup writes none"
        raise DiskFull(f"{error}. {hint}") from error
    return target


# -- saying ------------------------------------------------------------------------------------------------------------


def _nothing(path: Path, wanted: str, as_json: bool) -> None:
    from kvkeep.store.schema import REVISION

    if as_json:
        print_json(_document(path, Way(None, wanted, REVISION), None) | {"exists": False})
    else:
        make_console().print(nothing_there(path), soft_wrap=True)


def _document(path: Path, way: Way, done: _Done | None) -> dict[str, Any]:
    return {
        "path": str(path),
        "exists": True,
        "schema": way.found,
        "wanted": way.wanted,
        "ours": way.ours,
        "state": way.state,
        "changes": [asdict(change) for change in way.changes],
        "lost": way.lost,
        "migrated": done is not None,
        "backup": None if done is None or done.backup is None else str(done.backup),
        "recovered": [] if done is None else done.recovered,
    }


def _show_way(console: Console, path: Path, way: Way) -> None:
    console.print(f"Cache folder: {path}", soft_wrap=True)
    found = "none yet" if way.found is None else way.found
    if way.refused is not None:
        console.print(f"Newer: {way.refused}.", style="yellow", soft_wrap=True)
        return
    if not way.changes:
        console.print(f"Schema: {found}, as it is to be. There is nothing to do.", style="green")
        return
    console.print(f"Schema: {found}; this kvkeep's is {way.ours}.")
    console.print(f"To {'undo' if way.is_back else 'do'}, to get to {way.wanted}:")
    for change in way.changes:
        console.print(f"  {change.revision}  {change.what}", soft_wrap=True)
    if way.is_back:
        lost = [f"{noun} ({count:,})" for noun, count in way.lost.items() if count]
        console.print(f"Will be lost: {', '.join(lost) or 'nothing'}.", style="yellow" if lost else None, soft_wrap=True)


def _show_needed(console: Console, path: Path, way: Way) -> None:
    from kvkeep.store.releases import migrate_command

    if way.wanted == way.ours:
        console.print("The next program that opens the folder while nobody else has it open does so, or:")
    else:
        console.print("To do so:")
    console.print(f"   {migrate_command(path, way.wanted)}", soft_wrap=True)


def _show_done(console: Console, path: Path, way: Way, done: _Done) -> None:
    for sentence in done.recovered:
        console.print(f"Mended: {sentence}.", style="yellow", soft_wrap=True)
    console.print(f"Done: the schema is {way.wanted}.", style="green")
    if way.is_back:
        console.print(
            f"A kvkeep with schema {way.wanted} can open the folder now. Opening it with this kvkeep migrates it to "
            f"{way.ours} again.",
            soft_wrap=True,
        )
    if done.backup is not None:
        _show_backup(console, path, way, done.backup)


def _show_backup(console: Console, path: Path, way: Way, backup: Path) -> None:
    from kvkeep.store.engine import SUFFIXES
    from kvkeep.store.opening import INDEX_FILE
    from kvkeep.store.releases import migrate_command

    n_bytes = size(backup.stat().st_size)
    console.print(f"Backup of the index as it was, {n_bytes}:")
    console.print(f"   {backup}", soft_wrap=True)
    console.print(
        "The budget doesn't count it, and nobody but you deletes it. It has the tokens of all chats, also of those that are "
        "removed later.",
        soft_wrap=True,
    )
    if not way.is_back and way.found is not None:
        console.print("To go back, before an older kvkeep opens the folder:")
        console.print(f"   {migrate_command(path, way.found)}", soft_wrap=True)
    beside = " and ".join(INDEX_FILE + suffix for suffix in SUFFIXES[1:])
    console.print(
        f"{'To go back' if way.is_back else 'Or'} by the backup, without what was stored since, and without anything if the "
        f"folder was compacted since: end all programs that use the folder, delete {beside} there, and put the backup in the "
        f"place of {path / INDEX_FILE}.",
        soft_wrap=True,
    )
