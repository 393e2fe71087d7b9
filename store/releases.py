"""Revisions of the schema, which are named after the releases that brought them."""

from pathlib import Path

from kvkeep.store.schema import REVISION


def migrate_command(root: Path, wanted: str, *, to: bool = False) -> str:
    """What people type to bring a root to a schema; with `--to` where that isn't this version's, or `to` says so."""
    return f"kvkeep migrate {f'--to {wanted} ' if to or wanted != REVISION else ''}--path {root}"


def release_number(revision: str) -> int:
    """A release as one number, 1002003 for 1.2.3, or -1 if it is none."""
    parts = revision.split(".")
    if len(parts) != 3 or not all(part.isdecimal() and part.isascii() and len(part) <= 3 for part in parts):
        return -1
    major, minor, patch = (int(part) for part in parts)
    return (major * 1000 + minor) * 1000 + patch


def known_revisions() -> list[str]:
    """Every revision that this version knows, oldest first."""
    from kvkeep.migrations.upgrade import revisions  # alembic takes 0.2 s to import, and is rarely needed

    return revisions()
