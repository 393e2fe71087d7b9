"""A store that any earlier release has written is migrated and used, and can go back to the schema that it had."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import click.testing
import faults
import numpy as np
import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext

from kvkeep.cache.prefix_cache import PrefixCache
from kvkeep.migrations.upgrade import revisions
from kvkeep.store import steps
from kvkeep.store.check import check
from kvkeep.store.engine import Index
from kvkeep.store.errors import DiskFull
from kvkeep.store.opening import index_of, migrate_root
from kvkeep.store.releases import release_number
from kvkeep.store.schema import REVISION, metadata
from kvkeep.store.steps import Step
from kvkeep.tools.main import main

from .goldens import MADE, MODELS, Golden, names, opened, revision_of, schema, use

REVISIONS = revisions()
OLDER = REVISIONS[:-1]
# What 0.1.0 can't hold of later ones: everything of memories that aren't kept whole.
PARTS = ("hybrid", "window", "recurrent")


@pytest.fixture
def golden(revision: str, tmp_path: Path) -> Golden:
    return Golden(revision, tmp_path)


def migrate(golden: Golden, *arguments: str) -> None:
    result = click.testing.CliRunner().invoke(main, ["migrate", "--path", str(golden.root), *arguments])
    assert result.exit_code == 0, result.output


def user_version(root: Path) -> int:
    with index_of(root) as index, index.read() as connection:
        return int(connection.exec_driver_sql("PRAGMA user_version").scalar_one())


def test_every_revision_has_a_golden_store() -> None:
    assert names() == set(REVISIONS), "python tests/golden/make.py makes that of this version"


@pytest.mark.parametrize("revision", REVISIONS)
def test_a_golden_store_is_what_its_release_had(golden: Golden, revision: str, tmp_path: Path) -> None:
    assert revision_of(golden.index) == golden.expected["revision"] == revision
    fresh = Index(tmp_path / "fresh.sqlite3")
    fresh.migrate(revision)
    fresh.close()
    assert schema(fresh.path) == schema(golden.index)


@pytest.mark.parametrize("revision", REVISIONS)
def test_a_store_of_any_revision_opens_and_everything_in_it_is_used(golden: Golden) -> None:
    use(golden)


@pytest.mark.parametrize("revision", REVISIONS)
def test_a_migrated_store_has_the_tables_that_the_code_uses(golden: Golden) -> None:
    migrate(golden)
    with index_of(golden.root) as index, index.read() as connection:
        options = {"compare_type": True, "compare_server_default": True}
        assert compare_metadata(MigrationContext.configure(connection, opts=options), metadata) == []


@pytest.mark.parametrize("revision", REVISIONS)
def test_up_by_the_command_and_back_and_up_again(golden: Golden, revision: str) -> None:
    before = schema(golden.index)
    migrate(golden)
    assert revision_of(golden.index) == REVISION
    migrate(golden, "--to", revision, "--yes")
    assert (revision_of(golden.index), schema(golden.index)) == (revision, before)
    assert user_version(golden.root) == release_number(revision)
    migrate(golden)
    assert user_version(golden.root) == release_number(REVISION)
    use(golden)


@pytest.mark.parametrize("revision", [REVISION])
@pytest.mark.parametrize("older", OLDER)
def test_the_newest_goes_back_to_what_an_older_release_had(golden: Golden, older: str, tmp_path: Path) -> None:
    (tmp_path / "older").mkdir()
    migrate(golden, "--to", older, "--yes")
    assert schema(golden.index) == schema(Golden(older, tmp_path / "older").index)
    # What only the lost rows named is swept, and what the older schema can hold is all there.
    use(golden, without=PARTS if older == "0.1.0" else (), pinned=False)


@pytest.mark.parametrize("revision", [REVISION])
def test_a_way_back_in_two_steps_ends_where_one_step_does(golden: Golden, tmp_path: Path) -> None:
    for older in reversed(OLDER):
        migrate(golden, "--to", older, "--yes")
    for later in REVISIONS[1:]:
        migrate(golden, "--to", later)
    use(golden, without=PARTS, pinned=False)


@pytest.mark.parametrize("revision", ["0.1.0"])
def test_whole_states_of_0_1_0_are_found_and_parts_go_in_beside_them(golden: Golden) -> None:
    with opened(golden.root) as repository:
        caches = {name: PrefixCache(repository, model) for name, model in MODELS.items()}
        chats = {
            name: max((chat["tokens"] for chat in golden.expected["chats"] if chat["model"] == name), key=len)
            for name in caches
        }
        dense = chats["dense"]
        assert [caches["dense"].match(dense[:n]).length for n in range(1, len(dense) + 1)] == [*range(1, len(dense) + 1)]
        for name in PARTS:
            chat = [*chats[name], *range(20)]
            assert [caches[name].match(chat[:n]).length for n in (15, 16, 29, 30, 50)] == [0, 16, 16, 30, 30]
            caches[name].save(chat[:40], MADE[name].state(chat[:40]))
            assert [caches[name].match(chat[:n]).length for n in (16, 40, 50)] == [16, 40, 40]
            assert np.array_equal(caches[name].restore(caches[name].match(chat), chat).state, MADE[name].state(chat[:40]))


# -- a full disk, and killed in the middle ------------------------------------------------------------------------------

_KILLED_AT = """
import os, signal, sys
from kvkeep.store import steps
from kvkeep.tools import migrate
from kvkeep.tools.main import main

def killed(*_):
    os.kill(os.getpid(), signal.SIGKILL)

def at(step):
    if step.value == sys.argv[1]:
        killed()

steps.on_step = at
if sys.argv[1] == "copying":
    migrate.bytes_progress = lambda what: __import__("contextlib").nullcontext(killed)
main(["migrate", *sys.argv[2:]])
"""


@pytest.mark.parametrize("revision", ["0.1.0"])
def test_a_disk_that_fills_up_in_the_middle_leaves_the_old_schema_and_nothing_else(golden: Golden, tmp_path: Path) -> None:
    """First within the copy, then within the migration behind it."""
    before, files = schema(golden.index), set(os.listdir(golden.root))
    for arguments, fail_at in (([], 10), (["--no-backup"], 20)):
        command = ["-m", "kvkeep.tools", "migrate", "--path", str(golden.root), *arguments]
        done = faults.run(command, golden.root, fail_at=fail_at, fail_count=0)
        assert done.returncode == DiskFull.exit_code, done.stderr
        assert (revision_of(golden.index), schema(golden.index)) == ("0.1.0", before)
        assert set(os.listdir(golden.root)) - {"in-use"} == files
    use(golden)


def killed_at(moment: str, golden: Golden, *arguments: str) -> None:
    command = [sys.executable, "-c", _KILLED_AT, moment, "--path", str(golden.root), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == -signal.SIGKILL, done.stderr


STEPS = [Step.MIGRATE_LOCKED, Step.MIGRATE_CHANGED, Step.MIGRATE_COMMITTED]


@pytest.mark.parametrize("revision", ["0.1.0"])
@pytest.mark.parametrize("moment", [step.value for step in STEPS] + ["copying"])
def test_killed_on_the_way_up_either_schema_is_whole(golden: Golden, moment: str) -> None:
    before = schema(golden.index)
    killed_at(moment, golden)
    if moment == Step.MIGRATE_COMMITTED.value:
        assert revision_of(golden.index) == REVISION
    else:
        assert (revision_of(golden.index), schema(golden.index)) == ("0.1.0", before)
    migrate(golden)
    assert [name for name in os.listdir(golden.root) if name.endswith(".copying")] == []
    use(golden)


@pytest.mark.parametrize("revision", [REVISION])
@pytest.mark.parametrize("moment", [step.value for step in STEPS])
def test_killed_on_the_way_back_either_schema_is_whole(golden: Golden, moment: str, tmp_path: Path) -> None:
    before = schema(golden.index)
    killed_at(moment, golden, "--to", "0.1.0", "--yes")
    if moment == Step.MIGRATE_COMMITTED.value:
        (tmp_path / "older").mkdir()
        assert schema(golden.index) == schema(Golden("0.1.0", tmp_path / "older").index)
        use(golden, without=PARTS, pinned=False)
    else:
        assert (revision_of(golden.index), schema(golden.index)) == (REVISION, before)
        use(golden)


@pytest.mark.parametrize("revision", [REVISION])
@pytest.mark.parametrize("moment", [Step.MIGRATE_CHANGED, Step.MIGRATE_COMMITTED])
def test_ctrl_c_leaves_no_blob_that_nobody_sweeps(golden: Golden, moment: Step, monkeypatch: pytest.MonkeyPatch) -> None:
    """A way back takes rows away. Whoever opens next must look at what they named, also behind an interrupt."""

    def interrupt(step: Step) -> None:
        if step is moment:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(steps, "on_step", interrupt)
        with pytest.raises(KeyboardInterrupt):
            migrate_root(golden.root, OLDER[0])
    with opened(golden.root) as repository:
        assert [finding.message for finding in check(repository)] == []
