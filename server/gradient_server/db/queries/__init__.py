"""Named queries, one module a concern. Each takes a connection and commits nothing itself."""
