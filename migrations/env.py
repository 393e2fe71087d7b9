"""Alembic's entry point. kvkeep hands it a connection with a running transaction; nothing else is supported."""

from alembic import context

context.configure(connection=context.config.attributes["connection"], transactional_ddl=False)
context.run_migrations()
