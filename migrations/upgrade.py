"""Run Alembic on an open connection.

The caller owns the transaction: Alembic on SQLite leaves half of a failed revision behind unless the driver is in
manual mode and BEGIN was emitted by the caller, as `kvkeep.store.engine` does.
"""

from pathlib import Path

from alembic.command import upgrade as alembic_upgrade
from alembic.config import Config
from alembic.script import ScriptDirectory
from sqlalchemy import Connection

HERE = Path(__file__).parent


def _config(connection: Connection | None = None) -> Config:
    config = Config()
    # Alembic expands % in option values; a home folder may have one in its name.
    config.set_main_option("script_location", str(HERE).replace("%", "%%"))
    config.attributes["connection"] = connection
    return config


def revisions() -> list[str]:
    """Every revision that this version knows, oldest first."""
    scripts = ScriptDirectory.from_config(_config())
    return [script.revision for script in reversed(list(scripts.walk_revisions()))]


def upgrade(connection: Connection, revision: str = "head") -> None:
    """Bring the schema to `revision` inside the connection's running transaction."""
    alembic_upgrade(_config(connection), revision)
