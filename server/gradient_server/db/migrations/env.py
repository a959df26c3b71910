"""What Alembic runs for every command: on the connection that `gradient_server.db.migrate` gives it."""

from alembic import context

from gradient_server.db.tables import metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    # The caller's transaction is the only one, on SQLite too.
    transactional_ddl=True,
    render_as_batch=True,
    compare_type=True,
)
context.run_migrations()
