"""A prefix cache of a model that doesn't exist."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from synthetic import identity

from kvkeep.cache.prefix_cache import PrefixCache
from kvkeep.store.registry import close_root, open_root
from kvkeep.store.repository import Repository


@pytest.fixture
def repository(root: Path) -> Iterator[Repository]:
    """An empty store of 256 MiB, checked when the test ends."""
    opened = open_root(root, 256 << 20)
    yield opened
    close_root(opened)


@pytest.fixture
def cache(repository: Repository) -> PrefixCache:
    """Blocks of 16 tokens: the borders of a prompt are soon reached."""
    return PrefixCache(repository, identity(), block_tokens=16)
