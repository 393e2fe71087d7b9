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
from kvkeep.store.releases import release_number
from kvkeep.store.schema import REVISION, metadata


@pytest.fixture
def index(tmp_path: Path) -> Iterator[Index]:
    """An empty database."""
    opened = Index(tmp_path / "index.sqlite3")
    yield opened
    opened.close()


def assert_same_as_code(index: Index) -> None:
    with index.read() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True, "compare_server_default": True})
        assert compare_metadata(context, metadata) == []


def test_migrated_schema_is_the_one_that_the_code_uses(index: Index) -> None:
    index.upgrade()
    assert_same_as_code(index)


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


# -- back to an earlier release; tests/golden has the stores of those -------------------------------------------------------


def schema(index: Index) -> set[str]:
    """What the database consists of, as SQL."""
    with index.read() as connection:
        found = connection.exec_driver_sql("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL AND name NOT LIKE 'alembic%'")
        return {" ".join(sql.split()) for (sql,) in found}


@pytest.mark.parametrize("revision", migrations.revisions())
def test_every_way_back_leads_to_what_the_way_up_came_by(index: Index, revision: str) -> None:
    index.migrate(revision)
    before = schema(index)
    index.upgrade()
    index.migrate(revision)
    assert (index.revision(), schema(index)) == (revision, before)


def test_schema_that_went_back_and_up_again_is_the_one_that_the_code_uses(index: Index) -> None:
    index.upgrade()
    fresh = schema(index)
    for revision in (*reversed(migrations.revisions()), *migrations.revisions()):
        index.migrate(revision)
    assert_same_as_code(index)
    assert schema(index) == fresh


def test_what_lies_between_two_schemas() -> None:
    def between(found: str | None, wanted: str) -> list[tuple[str, bool]]:
        return [(change.revision, change.undone) for change in migrations.changes(found, wanted)]

    first, *rest = migrations.revisions()
    last = rest[-1]
    assert between(None, first) == [(first, False)]
    assert between(first, last) == [(revision, False) for revision in rest]
    assert between(last, first) == [(revision, True) for revision in reversed(rest)]
    assert between(last, last) == []
    [pins] = migrations.changes("0.2.0", "0.3.0")
    assert pins.what == "Pins: beginnings of prompts that are never evicted."


def test_every_revision_says_what_its_way_back_takes_away(index: Index) -> None:
    index.upgrade()
    first, *_, last = migrations.revisions()
    with index.read() as connection:
        found = migrations.lost(connection, last, first)
        assert migrations.lost(connection, first, last) == {}
    assert set(found.values()) == {0}
    assert len(found) >= len(migrations.revisions()) - 1


@pytest.mark.parametrize("failing", ["drop_table", "create_index", "execute"])
def test_failing_way_back_changes_nothing(index: Index, monkeypatch: pytest.MonkeyPatch, failing: str) -> None:
    index.upgrade()
    before = schema(index)

    def fail(*_arguments: object, **_options: object) -> None:
        raise RuntimeError("the power went")

    with monkeypatch.context() as patch:
        patch.setattr(op, failing, fail)
        with pytest.raises(MigrationFailed, match="is unchanged: the power went") as caught:
            index.migrate("0.1.0")
    assert f"kvkeep migrate --to 0.1.0 --path {index.path.parent}" in str(caught.value)
    assert (index.revision(), schema(index)) == (REVISION, before)
    with index.read() as connection:
        assert connection.exec_driver_sql("PRAGMA user_version").scalar_one() == release_number(REVISION)
