"""`kvkeep check`: does everything in the cache folder fit together?"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

from kvkeep.store.errors import IntegrityError
from kvkeep.tools.console import make_console
from kvkeep.tools.folder import nothing_there, opened
from kvkeep.tools.options import json_option, path_option, print_json
from kvkeep.tools.words import plural

if TYPE_CHECKING:
    from kvkeep.store.check import Finding
    from kvkeep.store.repository import Repository

_SHOWN = 5

# By `Trouble.value`: what it means, and what becomes of it.
_MEANINGS = {
    "damage": "Damaged: never used for an answer; removed when met, and saved anew by the next request that needs it.",
    "unreachable": "Unreachable: sound, but what comes before is gone. Used again once that is saved again, else evicted.",
    "garbage": "Garbage: bytes that nothing names, left by a process that died while saving. Harmless; swept later.",
}


@click.command()
@path_option
@json_option
@click.option("--index-only", is_flag=True, help="Compare names only; don't read and hash the stored bytes. Much quicker.")
def check(path: Path, as_json: bool, index_only: bool) -> None:
    """Read everything in the cache folder, and say what is damaged.

    Changes nothing, and may run beside assistants that use the folder. Damage costs time, never a wrong answer: what
    doesn't verify is decoded anew. Exits with 30 if there is damage, else with 0.
    """
    with opened(path) as repository:
        findings = None if repository is None else _findings(repository, data=not index_only)
    if as_json:
        print_json(_document(path, findings, data=not index_only))
    else:
        _show(make_console(), path, findings, data=not index_only)
    if _grouped(findings or [])["damage"]:
        click.get_current_context().exit(IntegrityError.exit_code)


def _findings(repository: "Repository", *, data: bool) -> "list[Finding]":
    from kvkeep.store.check import check as check_store

    console = make_console(stderr=True)
    if not console.is_terminal:
        return check_store(repository, data=data)
    with console.status(f"Reading {repository.path} ..."):
        return check_store(repository, data=data)


def _grouped(findings: "list[Finding]") -> "dict[str, list[Finding]]":
    """Findings of each kind, the worst first; every kind is there."""
    return {kind: [finding for finding in findings if finding.trouble.value == kind] for kind in _MEANINGS}


def _document(path: Path, findings: "list[Finding] | None", *, data: bool) -> dict[str, Any]:
    groups = _grouped(findings or [])
    return {
        "path": str(path),
        "exists": findings is not None,
        "data_checked": data and findings is not None,
        "sound": not groups["damage"],
        "counts": {kind: len(group) for kind, group in groups.items()},
        "findings": [{"trouble": kind, "message": found.message} for kind, group in groups.items() for found in group],
    }


def _show(console: Console, path: Path, findings: "list[Finding] | None", *, data: bool) -> None:
    if findings is None:
        console.print(nothing_there(path), soft_wrap=True)
        return
    console.print(f"Cache folder: {path}", soft_wrap=True)
    if not findings:
        what = "every byte is what its name says" if data else "no stored bytes were read"
        console.print(f"Sound: every row has its blob, every blob its row, and {what}.", style="green")
    for kind, group in _grouped(findings).items():
        if group:
            _show_group(console, kind, group)


def _show_group(console: Console, kind: str, group: "list[Finding]") -> None:
    console.print()
    console.print(_MEANINGS[kind], style="red" if kind == "damage" else "yellow")
    for finding in group[:_SHOWN]:
        console.print(f"  {finding.message}", soft_wrap=True)
    if len(group) > _SHOWN:
        console.print(f"  and {len(group) - _SHOWN:,} more (--json prints all)")
    console.print(f"  {plural(len(group), 'finding')} of this kind")
