"""An open repository for the tests of the store."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvkeep.store.registry import close_root, open_root
from kvkeep.store.repository import Repository


@pytest.fixture
def repository(root: Path) -> Iterator[Repository]:
    """An empty store of 64 MiB, checked when the test ends."""
    opened = open_root(root, 64 << 20)
    yield opened
    close_root(opened)


@pytest.fixture
def loose(tmp_path: Path) -> Iterator[Repository]:
    """A store that the test may leave damaged."""
    opened = open_root(tmp_path / "loose", 64 << 20)
    yield opened
    close_root(opened)
