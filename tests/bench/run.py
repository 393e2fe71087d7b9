"""Run the benches: `python tests/bench/run.py [NAME ...] [--quick] [--json FILE] [--markdown] [--folder DIR]`.

Nothing here is a test: figures depend on the machine and on what else it does. Times are medians of alternated
repetitions, compared inside one run.
"""

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

from children import ChildFailed
from figures import Figure, Run
from rich.console import Console
from rich.table import Table

BENCHES = ("restore", "save_cost", "background", "checkpoints", "growth", "compare")
_VERDICTS = {True: "[green]yes[/]", False: "[red]no[/]", None: ""}


def main() -> None:
    parser = _parser()
    options = parser.parse_args()
    if unknown := set(options.names) - set(BENCHES):
        parser.error(f"there is no bench {', '.join(sorted(unknown))}: choose of {', '.join(BENCHES)}")
    # The benches share the tests' models and contexts.
    sys.path.append(str(Path(__file__).parent.parent / "support"))
    found: dict[str, list[Figure]] = {}
    failed: list[str] = []
    with tempfile.TemporaryDirectory(prefix="kvkeep-bench-", dir=options.folder) as folder:
        for name in options.names or BENCHES:
            try:
                found[name] = _measure(name, Path(folder), options.quick)
            except ChildFailed as error:
                # Minutes of other benches shouldn't be lost for it.
                failed.append(f"{name}: {error}")
    Console(width=None if sys.stdout.isatty() else 200).print(_table(found))
    if options.markdown and "compare" in found:
        print(importlib.import_module("compare").markdown(found["compare"]))
    if options.json is not None:
        options.json.write_text(json.dumps(_as_json(found, options.quick), indent=2) + "\n")
    if failed:
        sys.exit("\n".join(failed))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Measure kvkeep on this machine.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(BENCHES)}; all if none")
    parser.add_argument("--quick", action="store_true", help="fewer repetitions: noisy, but done in three minutes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    parser.add_argument("--markdown", action="store_true", help="print the comparison as a Markdown table, too")
    parser.add_argument("--folder", type=Path, help="where stores are made, by default where temporary files are")
    return parser


def _measure(name: str, folder: Path, quick: bool) -> list[Figure]:
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
    table = Table("bench", "what", "figure", "target", "met?", "how it came about")
    for name, figures in found.items():
        for figure in figures:
            value = f"{figure.value:.0f}" if figure.unit == "tokens" else f"{figure.value:.3f}"
            target = "" if figure.target is None else str(figure.target)
            table.add_row(name, figure.name, f"{value} {figure.unit}", target, _VERDICTS[figure.met], figure.detail)
        table.add_section()
    return table


def _as_json(found: dict[str, list[Figure]], quick: bool) -> dict[str, object]:
    packages: Sequence[str] = ("kvkeep", "llama-cpp-python", "lmdb", "zstandard", "blake3", "numpy")
    return {
        "quick": quick,
        "machine": {"cores": os.cpu_count(), "system": platform.platform(), "python": platform.python_version()},
        "packages": {package: version(package) for package in packages},
        "benches": {name: [figure.as_json() for figure in figures] for name, figures in found.items()},
    }


if __name__ == "__main__":
    main()
