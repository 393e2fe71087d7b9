"""Runs measurements by name and shows their figures: what `make bench` and `make stress` have in common."""

import argparse
import importlib
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from figures import Figure, Run
from rich.console import Console
from rich.table import Table

_VERDICTS = {True: "[green]yes[/]", False: "[red]no[/]", None: ""}
_PACKAGES: Sequence[str] = ("kvkeep", "llama-cpp-python", "lmdb", "zstandard", "blake3", "numpy", "sqlalchemy")


class Failed(Exception):
    """A measurement couldn't be made; the text says why. The others go on."""


def parser(description: str, names: Sequence[str]) -> argparse.ArgumentParser:
    """Arguments that every set of measurements takes."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(names)}; all if none")
    made.add_argument("--quick", action="store_true", help="fewer repetitions, to see that it works")
    made.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    made.add_argument("--folder", type=Path, help="where stores are made, by default where temporary files are")
    return made


def measure_all(made: argparse.ArgumentParser, options: argparse.Namespace, names: Sequence[str]) -> dict[str, list[Figure]]:
    """Measure what was asked for, and show it.

    Raises:
        SystemExit: a name is unknown, or a measurement failed.
    """
    if unknown := set(options.names) - set(names):
        made.error(f"there is no {', '.join(sorted(unknown))}: choose of {', '.join(names)}")
    found: dict[str, list[Figure]] = {}
    failed: list[str] = []
    with tempfile.TemporaryDirectory(prefix="kvkeep-measure-", dir=options.folder) as folder:
        for name in options.names or names:
            try:
                found[name] = measure(name, Path(folder), options.quick)
            except Failed as error:
                # Minutes of other measurements shouldn't be lost for it.
                failed.append(f"{name}: {error}")
    Console(width=None if sys.stdout.isatty() else 200).print(_table(found))
    if options.json is not None:
        options.json.write_text(json.dumps(_as_json(found, options.quick), indent=2) + "\n")
    if failed:
        sys.exit("\n".join(failed))
    return found


def measure(name: str, folder: Path, quick: bool) -> list[Figure]:
    """The figures of the module with this name."""
    # Lines and no spinner: a spinner's thread would take time from what is measured.
    console = Console(stderr=True, log_path=False)
    own = folder / name
    own.mkdir()
    began = time.monotonic()
    run = Run(quick, own, lambda text: console.log(f"{name}: {text}"))
    found: list[Figure] = importlib.import_module(name).measure(run)
    # Other programs on the machine are the commonest reason for an odd figure.
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else float("nan")
    console.log(f"{name}: done in {time.monotonic() - began:.0f} s, load average {load:.1f} on {os.cpu_count()} cores")
    return found


def _table(found: dict[str, list[Figure]]) -> Table:
    table = Table("of", "what", "figure", "target", "met?", "how it came about")
    for name, figures in found.items():
        for figure in figures:
            value = f"{figure.value:,.0f}" if figure.unit != "x" and figure.value >= 10 else f"{figure.value:.3f}"
            target = "" if figure.target is None else str(figure.target)
            table.add_row(name, figure.name, f"{value} {figure.unit}", target, _VERDICTS[figure.met], figure.detail)
        table.add_section()
    return table


def _as_json(found: dict[str, list[Figure]], quick: bool) -> dict[str, object]:
    return {
        "quick": quick,
        "machine": {"cores": os.cpu_count(), "system": platform.platform(), "python": platform.python_version()},
        "packages": {package: version(package) for package in _PACKAGES},
        "figures": {name: [figure.as_json() for figure in figures] for name, figures in found.items()},
    }
