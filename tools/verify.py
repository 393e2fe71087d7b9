"""`kvkeep verify`: does everything in the cache folder fit together? And `--repair`, where it doesn't."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

from kvkeep.store.errors import IntegrityError, UsageError
from kvkeep.tools.console import make_console
from kvkeep.tools.folder import nothing_there, opened
from kvkeep.tools.options import json_option, path_option, print_json
from kvkeep.tools.progress import bytes_progress
from kvkeep.tools.words import plural

if TYPE_CHECKING:
    from kvkeep.store.check import Extent, Finding, Repaired
    from kvkeep.store.repository import Repository

_SHOWN = 5
# What is in the files themselves is mended first, and only then single entries can be looked at.
_ROUNDS = 2

# By `Trouble.value`: what it means, and what becomes of it.
_MEANINGS = {
    "structure": "A file itself is damaged: mended by the next program that has the folder alone, or by --repair.",
    "damage": "Damaged: never used for an answer; removed when met, and saved anew by the next request that needs it.",
    "unreachable": "Unreachable: sound, but what comes before is gone. Used again once that is saved again, else evicted.",
    "garbage": "Garbage: bytes that nothing names, left by a process that died while saving. Harmless; swept later.",
}
# The kinds that make a folder unsound.
_UNSOUND = ("structure", "damage")


@dataclass(slots=True)
class _Report:
    """What was found and done.

    Attributes:
        share: of the stored bytes, how much was read.
        exists: there is a store.
        findings: what doesn't fit, after all repairs.
        recovered: what was mended in the files themselves, in sentences.
        repaired: what `--repair` did, if it was asked for.
    """

    share: float
    exists: bool = False
    findings: "list[Finding]" = field(default_factory=list)
    recovered: list[str] = field(default_factory=list)
    repaired: "list[Repaired] | None" = None

    @property
    def groups(self) -> "dict[str, list[Finding]]":
        """Findings of each kind, the worst first; every kind is there."""
        return {kind: [found for found in self.findings if found.trouble.value == kind] for kind in _MEANINGS}

    @property
    def sound(self) -> bool:
        return not any(self.groups[kind] for kind in _UNSOUND)

    def did(self, name: str) -> int:
        """How many of something the repairs have done away with."""
        return sum(getattr(done, name) for done in self.repaired or ())


@click.command()
@path_option
@click.option("--index-only", is_flag=True, help="Compare names only; don't read and hash the stored bytes. Much quicker.")
@click.option(
    "--fraction", metavar="F", type=float, help="Read only this share of the stored bytes, drawn by lot; 0.1 is a tenth."
)
@click.option("--repair", is_flag=True, help="Remove what is damaged, mend what can be mended, and look again.")
@json_option
def verify(path: Path, index_only: bool, fraction: float | None, repair: bool, as_json: bool) -> None:
    """Read everything in the cache folder, and say what is damaged.

    May run beside assistants that use the folder. Damage costs time, never a wrong answer: what doesn't verify is
    decoded anew. Without --repair nothing is removed; but a folder that was found damaged before is mended by whoever
    opens it alone, this command too, and it says so. Exits with 30 if there is damage, else with 0.
    """
    report = _Report(_share(index_only, fraction))
    with opened(path) as repository:
        if repository is not None:
            _examine(repository, report, repair)
    if as_json:
        print_json(_document(path, report))
    else:
        _show(make_console(), path, report)
    if not report.sound:
        click.get_current_context().exit(IntegrityError.exit_code)


def _share(index_only: bool, fraction: float | None) -> float:
    """The share of the stored bytes that is to be read."""
    if index_only and fraction is not None:
        raise UsageError("--index-only reads none of the stored bytes, and --fraction some: name one of them")
    if fraction is not None and not 0.0 < fraction <= 1.0:
        raise UsageError(f"--fraction is more than 0 and at most 1, not {fraction}")
    return 0.0 if index_only else 1.0 if fraction is None else fraction


def _examine(repository: "Repository", report: _Report, repair: bool) -> None:
    from kvkeep.store.check import Extent
    from kvkeep.store.check import repair as repair_store

    extent = Extent(data=report.share)
    report.exists = True
    report.recovered = list(repository.recovered)
    report.findings = _findings(repository, extent)
    if not repair:
        return
    report.repaired = []
    for _ in range(_ROUNDS):
        if not report.findings:
            break
        done = repair_store(repository, report.findings)
        report.repaired.append(done)
        report.recovered += [sentence for sentence in done.recovered if sentence not in report.recovered]
        report.findings = _findings(repository, extent)
        if report.sound:
            break


def _findings(repository: "Repository", extent: "Extent") -> "list[Finding]":
    from kvkeep.store.check import check

    with bytes_progress("Reading") as progress:
        return check(repository, extent, progress)


def _document(path: Path, report: _Report) -> dict[str, Any]:
    return {
        "path": str(path),
        "exists": report.exists,
        "fraction_read": report.share if report.exists else 0.0,
        "sound": report.sound,
        "recovered": report.recovered,
        "repaired": None if report.repaired is None else {name: report.did(name) for name in ("removed", "swept")},
        "counts": {kind: len(group) for kind, group in report.groups.items()},
        "findings": [{"trouble": kind, "message": found.message} for kind, group in report.groups.items() for found in group],
    }


def _show(console: Console, path: Path, report: _Report) -> None:
    if not report.exists:
        console.print(nothing_there(path), soft_wrap=True)
        return
    console.print(f"Cache folder: {path}", soft_wrap=True)
    for sentence in report.recovered:
        console.print(f"Mended: {sentence}.", style="yellow", soft_wrap=True)
    if report.repaired is not None:
        removed, swept = plural(report.did("removed"), "damaged entry", "damaged entries"), plural(report.did("swept"), "blob")
        console.print(f"Repaired: removed {removed}, and {swept} that nothing names.", soft_wrap=True)
    if not report.findings:
        console.print(f"Sound: every row has its blob, every blob its row, and {_read(report.share)}.", style="green")
    for kind, group in report.groups.items():
        if group:
            _show_group(console, kind, group)


def _read(share: float) -> str:
    if share == 0.0:
        return "no stored bytes were read"
    return "every byte is what its name says" if share == 1.0 else f"so is every byte of the {share:.1%} that were read"


def _show_group(console: Console, kind: str, group: "list[Finding]") -> None:
    console.print()
    console.print(_MEANINGS[kind], style="red" if kind in _UNSOUND else "yellow")
    for finding in group[:_SHOWN]:
        console.print(f"  {finding.message}", soft_wrap=True)
    if len(group) > _SHOWN:
        console.print(f"  and {len(group) - _SHOWN:,} more (--json prints all)")
    console.print(f"  {plural(len(group), 'finding')} of this kind")
