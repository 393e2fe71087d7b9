"""What scenarios of several files share: a model of each kind of memory, and models that see."""

import pytest
import vision

KINDS = ("dense", "window", "hybrid", "recurrent")
"""A model of each kind of memory: fixtures of `tests/conftest.py`."""


@pytest.fixture(params=KINDS)
def each_kind(request: pytest.FixtureRequest) -> str:
    """One model of each kind of memory, after the other."""
    path: str = request.getfixturevalue(request.param)
    return path


@pytest.fixture(scope="session")
def seeing_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, str]]:
    """A model and its projector of each kind, as paths."""
    folder = tmp_path_factory.mktemp("seeing")
    return {kind: vision.build(folder, kind) for kind in ("dense", "mrope", "window", "hybrid")}
