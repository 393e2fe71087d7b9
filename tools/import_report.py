"""What `kvkeep import` says: a line for each state, the totals, and the same as a document."""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from kvkeep.store.errors import KvkeepError
from kvkeep.tools.words import clean, plural, size


@dataclass(slots=True)
class Result:
    """What became of one state or bundle.

    Attributes:
        name: of what it was read from.
        n_bytes: what there was to be read.
        tokens: tokens whose state is stored now, or would be.
        written_bytes: bytes of what was stored for it.
        evicted: entries that had to go for it.
        is_new: something had to be stored for it, or would have to be.
        gone: it was stored, and had to go again for what came after it.
        error: why it wasn't taken.
        exit_code: that of the error.
    """

    name: str
    n_bytes: int = 0
    tokens: int = 0
    written_bytes: int = 0
    evicted: int = 0
    is_new: bool = False
    gone: bool = False
    error: str | None = None
    exit_code: int = 0

    def fail(self, error: KvkeepError) -> None:
        """Note why it wasn't taken."""
        self.error, self.exit_code = str(error), error.exit_code


@dataclass(slots=True)
class Report:
    """What became of everything, in the order in which it was tried.

    Attributes:
        path: the cache folder.
        dry_run: nothing was stored.
        results: one for each state and bundle.
        others: files in folders that are nothing of the kind.
        not_tried: how many were left when an error ended it.
        ended_by: the exit code of that error.
        warning: a sentence about the budget; may be empty.
    """

    path: Path
    dry_run: bool
    results: list[Result] = field(default_factory=list)
    others: int = 0
    not_tried: int = 0
    ended_by: int = 0
    warning: str = ""

    @property
    def taken(self) -> list[Result]:
        return [result for result in self.results if result.error is None]

    @property
    def exit_code(self) -> int:
        return self.ended_by or next((result.exit_code for result in self.results if result.error is not None), 0)


def show(console: Console, result: Result, dry_run: bool) -> None:
    """One line about one item."""
    name = clean(result.name)
    if result.error is not None:
        console.print(f"  {name}: {clean(result.error)}", style="red", soft_wrap=True)
        return
    if not result.is_new:
        told = "already stored"
    elif dry_run:
        told = "can be imported"
    else:
        told = f"{size(result.written_bytes)} new"
    console.print(f"  {name}: {plural(result.tokens, 'token')}, {told}", soft_wrap=True)


def show_end(console: Console, report: Report) -> None:
    """The totals, and what else is worth knowing."""
    taken = report.taken
    failed = len(report.results) - len(taken)
    verb = "Could be imported" if report.dry_run else "Imported"
    new = sum(result.is_new for result in taken)
    written = "" if report.dry_run else f", {size(sum(result.written_bytes for result in taken))}"
    console.print(f"{verb}: {new:,}{written}. Already stored: {len(taken) - new:,}. Refused: {failed:,}.", soft_wrap=True)
    if evicted := sum(result.evicted for result in taken):
        console.print(f"{plural(evicted, 'entry', 'entries')} had to go for that.")
    if report.others:
        console.print(f"{plural(report.others, 'file')} in these folders {'is' if report.others == 1 else 'are'} no state.")
    if report.not_tried:
        console.print(f"Not tried any more: {report.not_tried:,}.", style="yellow")
    if report.warning:
        console.print(report.warning, style="yellow", soft_wrap=True)


def document(report: Report) -> dict[str, Any]:
    """All of it for `--json`."""
    totals = {name: sum(getattr(one, name) for one in report.taken) for name in ("tokens", "written_bytes", "evicted")}
    return {
        "path": str(report.path),
        "dry_run": report.dry_run,
        "items": [asdict(result) for result in report.results],
        "totals": {
            "imported": sum(result.is_new for result in report.taken),
            "already_stored": sum(not result.is_new for result in report.taken),
            "refused": len(report.results) - len(report.taken),
            "not_tried": report.not_tried,
            "other_files": report.others,
            **totals,
        },
        "warning": report.warning,
    }
