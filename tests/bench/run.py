"""Run the benches: `python tests/bench/run.py [NAME ...] [--quick] [--json FILE] [--markdown] [--folder DIR]`.

Nothing here is a test: figures depend on the machine and on what else it does. Times are medians of alternated
repetitions, compared inside one run.
"""

import importlib
import sys
from pathlib import Path

# The benches share the tests' models and contexts.
sys.path.append(str(Path(__file__).parent.parent / "support"))

import runner

BENCHES = (
    "restore",
    "first_token",
    "save_cost",
    "background",
    "match",
    "memory",
    "opening",
    "checkpoints",
    "growth",
    "compare",
    "lookup",
)


def main() -> None:
    parser = runner.parser("Measure kvkeep on this machine.", BENCHES)
    parser.add_argument("--markdown", action="store_true", help="print the comparison as a Markdown table, too")
    options = parser.parse_args()
    found = runner.measure_all(parser, options, BENCHES)
    if options.markdown and "compare" in found:
        print(importlib.import_module("compare").markdown(found["compare"]))


if __name__ == "__main__":
    main()
