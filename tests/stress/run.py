"""Try to break a store: `python tests/stress/run.py [NAME ...] [--quick] [--json FILE] [--folder DIR]`.

Ends with an error if any target is missed. docs/RELIABILITY.md has the results of a whole run; `make test` runs the quick
one of each.
"""

import sys
from pathlib import Path

# The stress tests share the tests' models and contexts.
sys.path.append(str(Path(__file__).parent.parent / "support"))

import runner

STRESSES = ("kills", "powercuts", "writeerrors", "flips", "processes", "budget", "throughput", "compaction")


def main() -> None:
    parser = runner.parser("Try to break a kvkeep store.", STRESSES)
    options = parser.parse_args()
    found = runner.measure_all(parser, options, STRESSES)
    missed = [f"{name}: {figure.name}" for name, figures in found.items() for figure in figures if figure.met is False]
    if missed:
        sys.exit("missed: " + "; ".join(missed))


if __name__ == "__main__":
    main()
