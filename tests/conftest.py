"""Fixtures: models, an empty root that is checked when its test ends, and no cache folder of the user's."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import models
import pytest

from kvkeep.store.check import check
from kvkeep.store.registry import close_root, open_root


@pytest.fixture(autouse=True)
def _not_the_users_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVKEEP_PATH", str(tmp_path / "default-root"))


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    """A folder for a store. Whatever the test did, the store must be sound afterwards."""
    path = tmp_path / "root"
    yield path
    if path.is_dir():
        assert_sound(path)


def assert_sound(path: Path) -> None:
    """Every row has its blob, every blob its row, and every byte is what its name says."""
    repository = open_root(path)
    try:
        assert [finding.message for finding in check(repository)] == []
    finally:
        close_root(repository)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="session")
def dense(model_folder: Path) -> str:
    """A tiny model with plain attention."""
    return models.build(model_folder / "dense.gguf", models.DENSE)


@pytest.fixture(scope="session")
def other_dense(model_folder: Path) -> str:
    """The same architecture and size with other weights."""
    return models.build(model_folder / "other-dense.gguf", replace(models.DENSE, seed=1))


@pytest.fixture(scope="session")
def mrope(model_folder: Path) -> str:
    """A tiny model whose cells carry extensions."""
    return models.build(model_folder / "mrope.gguf", models.MROPE)


@pytest.fixture(scope="session")
def window(model_folder: Path) -> str:
    """A tiny model with a sliding window of 64."""
    return models.build(model_folder / "window.gguf", models.WINDOW)


@pytest.fixture(scope="session")
def hybrid(model_folder: Path) -> str:
    """A tiny model with attention and short convolutions."""
    return models.build(model_folder / "hybrid.gguf", models.HYBRID)


@pytest.fixture(scope="session")
def hybrid_window(model_folder: Path) -> str:
    """The same with a sliding window of 64."""
    return models.build(model_folder / "hybrid-window.gguf", models.HYBRID_WINDOW)


@pytest.fixture(scope="session")
def recurrent(model_folder: Path) -> str:
    """A tiny model with nothing but a recurrent state."""
    return models.build(model_folder / "recurrent.gguf", models.RECURRENT)


@pytest.fixture(scope="session")
def falcon_h1(model_folder: Path) -> str:
    """A tiny model with attention and a recurrent state in every layer."""
    return models.build(model_folder / "falcon-h1.gguf", models.FALCON_H1)


@pytest.fixture(scope="session")
def mla(model_folder: Path) -> str:
    """A tiny model that keeps keys and no values."""
    return models.build(model_folder / "mla.gguf", models.MLA)


@pytest.fixture(scope="session")
def two_caches(model_folder: Path) -> str:
    """A tiny model with a second cache, of keys by which cells are picked."""
    return models.build(model_folder / "two-caches.gguf", models.TWO_CACHES)


@pytest.fixture(scope="session")
def opaque(model_folder: Path) -> str:
    """A tiny model with a memory that only its own architecture has."""
    return models.build(model_folder / "opaque.gguf", models.OPAQUE)


@pytest.fixture(scope="session")
def smollm2() -> str:
    return models.smollm2()
