"""Alembic's revisions of the schema. `python -m gradient_server.db.migrations "what changes"` adds one."""
