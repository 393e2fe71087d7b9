"""Brings the index's schema up to date. The one home of the alembic package.

Imports nothing of kvkeep: a revision must do next year what it does today, whatever the live code has become.
"""
