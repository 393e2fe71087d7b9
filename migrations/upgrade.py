"""Run Alembic on an open connection.

The caller owns the transaction: Alembic on SQLite leaves half of a failed revision behind unless the driver is in
manual mode and BEGIN was emitted by the caller, as `kvkeep.store.engine` does.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from alembic.command import downgrade as alembic_downgrade
from alembic.command import upgrade as alembic_upgrade
from alembic.config import Config
from alembic.script import Script, ScriptDirectory
from sqlalchemy import Connection

HERE = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Change:
    """One revision on the way from a schema to another.

    Attributes:
        revision: its name, that of the release that brought it.
        what: the first line of its docstring.
        undone: the way leads back: what it has brought goes.
    """

    revision: str
    what: str
    undone: bool


def _config(connection: Connection | None = None) -> Config:
    config = Config()
    # Alembic expands % in option values; a home folder may have one in its name.
    config.set_main_option("script_location", str(HERE).replace("%", "%%"))
    config.attributes["connection"] = connection
    return config


def _scripts() -> list[Script]:
    scripts = ScriptDirectory.from_config(_config())
    return list(reversed(list(scripts.walk_revisions())))


def revisions() -> list[str]:
    """Every revision that this version knows, oldest first."""
    return [script.revision for script in _scripts()]


def changes(found: str | None, wanted: str) -> list[Change]:
    """What lies between two schemas, in the order in which it is done or undone. Both must be known ones.

    Args:
        found: the revision of a database; None is an empty one.
        wanted: the one that it is to have.
    """
    between, undone = _between(found, wanted)
    return [Change(script.revision, script.doc.splitlines()[0], undone) for script in between]


def lost(connection: Connection, found: str | None, wanted: str) -> dict[str, int]:
    """What a way back takes away: how many of what, for people. Nothing on the way up.

    Args:
        connection: to the database.
        found: its revision.
        wanted: the one that it is to have.
    """
    between, undone = _between(found, wanted)
    counted = [item for script in between for item in script.module.LOST.items()] if undone else []
    return {noun: connection.exec_driver_sql(statement).scalar_one() for noun, statement in counted}


def _between(found: str | None, wanted: str) -> tuple[Sequence[Script], bool]:
    scripts = _scripts()
    known = [script.revision for script in scripts]
    first, last = known.index(found) + 1 if found is not None else 0, known.index(wanted) + 1
    return (scripts[first:last], False) if first <= last else (scripts[last:first][::-1], True)


def upgrade(connection: Connection, revision: str = "head") -> None:
    """Bring the schema up to `revision` inside the connection's running transaction."""
    alembic_upgrade(_config(connection), revision)


def migrate(connection: Connection, found: str | None, wanted: str) -> None:
    """Bring the schema from one revision to another, up or down, inside the connection's running transaction."""
    _, back = _between(found, wanted)
    (alembic_downgrade if back else alembic_upgrade)(_config(connection), wanted)
