"""A short version of each stress test; `make stress` runs the long ones."""

from pathlib import Path

import pytest
import runner
from run import STRESSES


@pytest.mark.parametrize("name", STRESSES)
def test_nothing_breaks(name: str, tmp_path: Path) -> None:
    figures = runner.measure(name, tmp_path, quick=True)
    assert figures
    missed = [f"{figure.name}: {figure.value:g} {figure.unit} ({figure.detail})" for figure in figures if figure.met is False]
    assert missed == []
