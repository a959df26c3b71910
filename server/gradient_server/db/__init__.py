"""The database: schema, migrations, the runner that keeps it off the event loop, named queries."""
