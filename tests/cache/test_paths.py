"""Which folder is meant."""

from pathlib import Path
from typing import Any

import pytest

from kvkeep.cache.paths import VARIABLE, default_root, resolve_root
from kvkeep.store.errors import UsageError


def test_the_variable_names_the_default(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "named"))
    assert default_root() == resolve_root(None) == tmp_path / "named"


@pytest.mark.parametrize("value", [None, ""])
def test_without_the_variable_it_is_the_users_cache_folder(monkeypatch: pytest.MonkeyPatch, value: str | None) -> None:
    if value is None:
        monkeypatch.delenv(VARIABLE)
    else:
        monkeypatch.setenv(VARIABLE, value)
    assert default_root().name == "kvkeep"
    assert default_root().is_absolute()


def test_home_is_expanded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv(VARIABLE, "~/named")
    assert default_root() == tmp_path / "named"
    assert resolve_root("~/given") == tmp_path / "given"


def test_an_argument_wins(tmp_path: Path) -> None:
    assert resolve_root(tmp_path) == tmp_path
    assert resolve_root(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("path", ["", 5, b"bytes", ["list"], True])
def test_what_names_no_folder_is_a_usage_error(path: Any) -> None:
    with pytest.raises(UsageError, match="path names a folder"):
        resolve_root(path)
