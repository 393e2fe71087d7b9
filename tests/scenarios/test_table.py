"""docs/SCENARIOS.md and the tests beside this file speak of the same scenarios."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

_HERE = Path(__file__).parent
_DOC = _HERE.parents[1] / "docs" / "SCENARIOS.md"
# A cell of the first column: a letter and a number.
_ROW = re.compile(r"^\| ([A-G]\d+) \|(.*)\|$")
_TEST = re.compile(r"`(test_[a-z]\d+_\w*)(\*?)`")


def _rows() -> dict[str, str]:
    found = [match.groups() for line in _DOC.read_text().splitlines() if (match := _ROW.match(line))]
    assert len(found) == len({name for name, _ in found}), "a scenario stands in the table twice"
    return dict(found)


def _tests() -> Iterator[str]:
    for file in _HERE.glob("test_*.py"):
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                yield node.name


def _id_of(test: str) -> str | None:
    match = re.match(r"test_([a-g]\d+)_", test)
    return match[1].upper() if match else None


@pytest.mark.parametrize("scenario", sorted(_rows()))
def test_every_row_names_tests_that_there_are(scenario: str) -> None:
    own = {test for test in _tests() if _id_of(test) == scenario}
    assert own, f"no test is named after {scenario}"
    for name, is_prefix in _TEST.findall(_rows()[scenario]):
        assert any(test.startswith(name) if is_prefix else test == name for test in own), f"there is no test {name}{is_prefix}"


def test_every_test_stands_in_the_table() -> None:
    named = {_id_of(test) for test in _tests()} - {None}
    assert named == set(_rows())
