"""What can be imported, and what an import costs."""

import importlib
import subprocess
import sys

import pytest

import kvkeep.cache

# Each takes a good part of a second to import, and llama_cpp may not be installed at all.
EXPENSIVE = {"llama_cpp", "alembic"}


def imported_by(statement: str) -> set[str]:
    """Names of all modules that a fresh interpreter has loaded behind this statement."""
    script = f"import sys\n{statement}\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize("name", kvkeep.cache.__all__)
def test_every_public_name_can_be_imported(name: str) -> None:
    # The name of any cache is that of the trie one, as in llama-cpp-python's fork.
    assert getattr(kvkeep.cache, name).__name__ == {"LlamaCache": "LlamaTrieCache"}.get(name, name)


def test_every_public_name_is_shown() -> None:
    assert dir(kvkeep.cache) == kvkeep.cache.__all__ == sorted(kvkeep.cache.__all__)


def test_every_public_name_has_a_home() -> None:
    assert set(kvkeep.cache._HOMES) == set(kvkeep.cache.__all__)


def test_other_names_are_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="no attribute 'attack'"):
        _ = kvkeep.cache.attack
    assert not hasattr(kvkeep.cache, "nothing")


@pytest.mark.parametrize(
    "module",
    [
        "kvkeep.cache",
        "kvkeep.cache.prefix_cache",
        "kvkeep.cache.writer",
        "kvkeep.cache.fingerprint",
        "kvkeep.store",
        "kvkeep.store.registry",
        "kvkeep.store.check",
    ],
)
def test_looking_after_a_store_imports_nothing_expensive(module: str) -> None:
    assert imported_by(f"import {module}") & EXPENSIVE == set()


def test_public_value_types_come_without_llama_cpp() -> None:
    assert imported_by("from kvkeep.cache import Match, Reason, Source") & EXPENSIVE == set()


def test_the_package_itself_imports_almost_nothing() -> None:
    heavy = {"numpy", "sqlalchemy", "lmdb", "zstandard", "blake3"}
    assert imported_by("import kvkeep.cache") & heavy == set()


def test_both_copies_of_a_class_are_one() -> None:
    # `import store` from the repository's root would make a second copy of every class.
    assert importlib.import_module("kvkeep.cache.match").Match is kvkeep.cache.Match
    assert {"store", "cache", "migrations"} & {name for name in sys.modules if "." not in name} == set()
