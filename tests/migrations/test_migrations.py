"""The schema comes from Alembic alone, and agrees with the tables that the code uses."""

import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import sqlalchemy as sa
from alembic import op
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from synthetic import HYBRID, SMALL, identity, random_tokens, state_of, window_model

from kvkeep.cache.memory import MemoryKind
from kvkeep.cache.prefix_cache import PrefixCache
from kvkeep.migrations import upgrade as migrations
from kvkeep.store.check import check
from kvkeep.store.engine import Index
from kvkeep.store.errors import MigrationFailed
from kvkeep.store.registry import close_root, open_root
from kvkeep.store.schema import REVISION, metadata

WINDOW = window_model(20)


@pytest.fixture
def index(tmp_path: Path) -> Iterator[Index]:
    """An empty database."""
    opened = Index(tmp_path / "index.sqlite3")
    yield opened
    opened.close()


def test_migrated_schema_is_the_one_that_the_code_uses(index: Index) -> None:
    index.upgrade()
    with index.read() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True, "compare_server_default": True})
        assert compare_metadata(context, metadata) == []


def test_migrated_constraints_and_indexes_have_their_names(index: Index) -> None:
    # A later migration must name what it drops; autogenerate doesn't compare names of everything.
    index.upgrade()
    with index.read() as connection:
        found = sa.inspect(connection)
        for table in metadata.sorted_tables:
            assert found.get_pk_constraint(table.name)["name"] == table.primary_key.name
            wanted = {str(key.name) for key in table.foreign_key_constraints}
            assert {str(key["name"]) for key in found.get_foreign_keys(table.name)} == wanted
            wanted = {str(key.name) for key in table.constraints if isinstance(key, sa.UniqueConstraint)}
            assert {str(key["name"]) for key in found.get_unique_constraints(table.name)} == wanted


def test_revision_in_the_code_is_alembics_head() -> None:
    scripts = ScriptDirectory.from_config(migrations._config())
    assert scripts.get_heads() == [REVISION]
    assert migrations.revisions()[-1] == REVISION


def test_every_revision_is_reached_from_nothing() -> None:
    scripts = ScriptDirectory.from_config(migrations._config())
    assert len(migrations.revisions()) == len(list(Path(migrations.HERE, "versions").glob("v*.py")))
    assert scripts.get_base() == migrations.revisions()[0]


def test_upgrading_twice_changes_nothing(index: Index) -> None:
    index.upgrade()
    with index.write() as connection:
        connection.execute(sa.text("INSERT INTO setting VALUES ('a', 1)"))
    index.upgrade()
    with index.read() as connection:
        assert connection.execute(sa.text("SELECT name FROM setting")).scalars().all() == ["a"]
    assert index.revision() == REVISION


def fail_after(monkeypatch: pytest.MonkeyPatch, statement: int) -> None:
    """The revision's `statement`-th table is its last."""
    original = op.create_table
    count = iter(range(100))

    def create_table(*args: object, **kwargs: object) -> object:
        if next(count) == statement:
            raise RuntimeError("the power went")
        return original(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(op, "create_table", create_table)


@pytest.mark.parametrize("statement", [0, 1, 4])
def test_failing_migration_leaves_nothing_behind(index: Index, monkeypatch: pytest.MonkeyPatch, statement: int) -> None:
    with monkeypatch.context() as patch:
        fail_after(patch, statement)
        with pytest.raises(MigrationFailed, match="the power went"):
            index.upgrade()
    with index.read() as connection:
        assert sa.inspect(connection).get_table_names() == []
    assert index.revision() is None
    index.upgrade()
    assert index.is_current()


def test_root_whose_migration_failed_opens_the_next_time(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        fail_after(patch, 2)
        with pytest.raises(MigrationFailed):
            open_root(root)
    repository = open_root(root)
    assert repository.index.is_current()
    close_root(repository)


def modules_after_opening(root: Path) -> set[str]:
    script = (
        "import sys; from pathlib import Path\n"
        "from kvkeep.store.registry import close_root, open_root\n"
        "close_root(open_root(Path(sys.argv[1])))\n"
        "print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script, str(root)], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_only_a_root_that_needs_it_pays_for_alembic(root: Path) -> None:
    assert "alembic" in modules_after_opening(root)
    assert "alembic" not in modules_after_opening(root)


def test_migrations_import_nothing_of_the_code_that_changes() -> None:
    script = "import sys, kvkeep.migrations.upgrade as u; u.revisions(); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    found = {name for name in done.stdout.split() if name.startswith("kvkeep.")}
    assert {name for name in found if not name.startswith("kvkeep.migrations")} == set()


def test_home_folder_with_a_percent_sign_is_no_template(tmp_path: Path) -> None:
    root = tmp_path / "50%(here)s"
    close_root(open_root(root))
    assert (root / "index.sqlite3").exists()


# -- from one release to the next ----------------------------------------------------------------------------------------


def as_it_was_in_0_1_0(path: Path) -> None:
    """Take the index back to the schema of 0.1.0; what the entries say was the same then."""
    with closing(sqlite3.connect(path / "index.sqlite3")) as connection, connection:
        connection.execute("DROP TABLE pin")
        connection.execute("DROP TABLE window")
        connection.execute("DROP INDEX ix_checkpoint_anchor_path")
        connection.execute("CREATE INDEX ix_checkpoint_anchor ON checkpoint (anchor)")
        connection.execute("UPDATE alembic_version SET version_num = '0.1.0'")


def schema(path: Path) -> set[str]:
    with closing(sqlite3.connect(path)) as connection:
        found = connection.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL AND name NOT LIKE 'alembic%'")
        return {" ".join(sql.split()) for (sql,) in found}


def test_the_way_back_leads_to_what_0_1_0_had(root: Path, tmp_path: Path) -> None:
    """Or the test below would upgrade something that never was."""
    close_root(open_root(root))
    as_it_was_in_0_1_0(root)
    old = tmp_path / "old.sqlite3"
    engine = sa.create_engine(f"sqlite:///{old}")
    with engine.begin() as connection:
        migrations.upgrade(connection, "0.1.0")
    engine.dispose()
    assert schema(root / "index.sqlite3") == schema(old)


def test_a_store_of_0_1_0_is_upgraded_and_everything_in_it_is_found(root: Path) -> None:
    chat, whole = random_tokens(50), np.arange(999, dtype=np.uint8)
    dense, hybrid = identity("dense"), identity("hybrid", MemoryKind.HYBRID)
    repository = open_root(root, 64 << 20)
    for length in (20, 50):
        PrefixCache(repository, dense, block_tokens=16).save(chat[:length], state_of(SMALL, chat[:length]))
    # Models with recurrent tensors had whole states only.
    for length in (16, 30):
        PrefixCache(repository, hybrid, block_tokens=16).save(chat[:length], whole[length:])
    PrefixCache(repository, dense).measured(100.0, 5e8)
    close_root(repository)
    as_it_was_in_0_1_0(root)

    repository = open_root(root)
    assert repository.index.revision() == REVISION
    assert repository.capacity_bytes == 64 << 20
    assert check(repository) == []
    old = PrefixCache(repository, dense)
    for length in range(1, 51):
        assert old.match(chat[:length]).length == length
    assert np.array_equal(old.restore(old.match(chat), chat).state, state_of(SMALL, chat))
    assert old.namespace is not None
    assert (old.namespace.prefill_rate, old.namespace.restore_rate) == (100.0, 5e8)
    states = PrefixCache(repository, hybrid)
    for length, expected in ((15, 0), (16, 16), (29, 16), (30, 30), (50, 30)):
        assert states.match(chat[:length]).length == expected
    assert np.array_equal(states.restore(states.match(chat), chat).state, whole[30:])

    # What is new goes in beside it.
    PrefixCache(repository, HYBRID.identity("hybrid"), block_tokens=16).save(chat[:40], HYBRID.state(chat[:40]))
    window = PrefixCache(repository, WINDOW.identity("window"), block_tokens=16)
    window.save(chat, WINDOW.state(chat))
    assert [states.match(chat[:length]).length for length in (35, 40)] == [30, 40]
    assert window.match(chat).length == 50
    close_root(repository)
