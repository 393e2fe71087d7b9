"""Save, restart, restore and compare, for a tiny model of every architecture: `make zoo`.

`python tests/zoo/run.py [--models DIR] [--only PATTERN] [--json FILE] [--markdown FILE]`. The exit code is 0 only if every
model with a memory is restored right; what that means is in docs/MODELS.md.
"""

import argparse
import fnmatch
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import build
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rows import NO_MEMORY, Row, complaints, row_of, summary

HERE = Path(__file__).parent
BEGIN, END = "<!-- zoo: begin -->", "<!-- zoo: end -->"
COLUMNS = (
    "model",
    "memory",
    "restored",
    "after an edit at 120",
    "states equal",
    "logits equal",
    "error, loaded",
    "error, live",
    "error, wrong",
)


class Ended(Exception):
    """A child didn't give an answer; why not is in the text."""


def main() -> None:
    parser = _parser()
    options = parser.parse_args()
    folder: Path = options.models or build.models(options.work)
    found = sorted(folder.glob("*.gguf"))
    chosen = [path for path in found if fnmatch.fnmatch(path.stem, options.only)]
    if not chosen:
        parser.error(f"no model in {folder} is named {options.only}")
    rows = _run(chosen, options.timeout)
    print()
    Console(width=None if sys.stdout.isatty() else 200).print(_table(rows))
    print(summary(rows))
    wrong = complaints(rows, complete=options.only == "*")
    if options.json is not None:
        answer = {"packages": _packages(), "complaints": wrong, "models": [asdict(row) for row in rows]}
        options.json.write_text(json.dumps(answer, indent=2) + "\n")
    if options.markdown is not None:
        _into(options.markdown, _markdown(rows))
    if wrong:
        sys.exit("\n".join(["", f"{len(wrong)} complaints:", *wrong]))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Restore a tiny model of every architecture after a restart.")
    parser.add_argument("--models", type=Path, metavar="DIR", help="GGUF files; by default llama.cpp's generator makes them")
    parser.add_argument("--work", type=Path, metavar="DIR", default=build.DEFAULT_WORK, help="where the generator is built")
    parser.add_argument("--only", default="*", metavar="PATTERN", help="models whose names match, such as 'gemma*'")
    parser.add_argument("--timeout", type=float, default=120.0, metavar="SECONDS", help="for one process; 120 by default")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="replace the table between its two marks there")
    return parser


def _run(paths: Sequence[Path], timeout: float) -> list[Row]:
    rows: list[Row] = []
    columns = (
        TextColumn("{task.description:24}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=len(paths))
        for path in paths:
            progress.update(task, description=path.stem)
            row = _model(path, timeout)
            for problem in row.problems:
                console.print(f"{row.file}: {problem}", markup=False, highlight=False)
            rows.append(row)
            progress.advance(task)
    return rows


def _model(path: Path, timeout: float) -> Row:
    """Both processes of one model."""
    saved: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="kvkeep-zoo-") as folder:
        try:
            saved = _child("save", path, folder, timeout)
            return row_of(path.stem, saved, _child("restart", path, folder, timeout))
        except Ended as error:
            # llama.cpp asserts, or crashes: that is a row of the table, and not the end of the others.
            return Row(path.stem, saved.get("arch", ""), saved.get("memory", ""), problems=[str(error)])


def _child(job: str, model: Path, folder: str, timeout: float) -> dict[str, Any]:
    """Do one job in a process of its own.

    Raises:
        Ended: it gave no answer.
    """
    # Nothing may reach the user's own cache folder.
    paths = os.pathsep.join(map(str, (HERE, HERE.parent / "support")))
    environment = os.environ | {"PYTHONPATH": paths, "KVKEEP_PATH": str(Path(folder) / "default-root")}
    command = [sys.executable, "-X", "faulthandler", str(HERE / "probe.py"), job, str(model), folder]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", env=environment, timeout=timeout)
    except subprocess.TimeoutExpired as error:
        raise Ended(f"{job}: no answer within {timeout:.0f} s") from error
    if done.returncode < 0:
        raise Ended(f"{job}: ended by {signal.Signals(-done.returncode).name}: {_last_words(done.stderr)}")
    if done.returncode:
        raise Ended(f"{job}: {_last_words(done.stderr)}")
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def _last_words(text: str) -> str:
    """The line that says most of what a process wrote before it ended."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    asserted = [line for line in lines if "GGML_ASSERT" in line]
    return (asserted or lines or ["without a word"])[-1]


def _table(rows: Sequence[Row]) -> Table:
    table = Table(*COLUMNS, "problems")
    for row in rows:
        mark = "[red]{}[/]" if row.problems else "{}"
        table.add_row(mark.format(row.file), *_cells(row), str(len(row.problems) or ""))
    return table


def _cells(row: Row) -> list[str]:
    memory = row.memory + (f" of {row.window}" if row.window else "")
    if row.restored == NO_MEMORY:
        return [memory, *[""] * 7]
    states, logits = f"{row.equal} of {row.states}", f"{row.exact} of {row.prompts}"
    return [memory, row.restored, str(row.edited), states, logits, _error(row.loaded), _error(row.live), _error(row.wrong)]


def _error(value: float) -> str:
    return "0" if value == 0.0 else f"{value:.0e}"


def _packages() -> dict[str, str]:
    return {package: version(package) for package in ("kvkeep", "llama-cpp-python")}


def _markdown(rows: Sequence[Row]) -> str:
    packages = " and ".join(f"{package} {number}" for package, number in _packages().items())
    lines = [f"Made with {packages}.", "", *summary(rows).splitlines(), ""]
    lines += ["| " + " | ".join(COLUMNS) + " |", "|---|---|---|--:|--:|--:|--:|--:|--:|"]
    lines += ["| " + " | ".join([row.file, *_cells(row)]) + " |" for row in rows]
    if problems := [f"* {row.file}: {problem}" for row in rows for problem in row.problems]:
        lines += ["", "Problems:", "", *problems]
    return "\n".join(lines)


def _into(path: Path, text: str) -> None:
    """Replace what stands between the two marks of a file."""
    old = path.read_text() if path.exists() else f"{BEGIN}\n{END}\n"
    if old.count(BEGIN) != 1 or old.count(END) != 1:
        sys.exit(f"{path} should have the lines {BEGIN} and {END} once each")
    head, rest = old.split(BEGIN)
    path.write_text(f"{head}{BEGIN}\n{text}\n{END}{rest.split(END)[1]}")


if __name__ == "__main__":
    main()
