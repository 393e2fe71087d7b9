"""The schema comes from Alembic alone, and agrees with the tables that the code uses."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa
from alembic import op
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory

from kvkeep.migrations import upgrade as migrations
from kvkeep.store.engine import Index
from kvkeep.store.errors import MigrationFailed
from kvkeep.store.registry import close_root, open_root
from kvkeep.store.schema import REVISION, metadata


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
