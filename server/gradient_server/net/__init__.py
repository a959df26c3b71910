"""Sessions with workers: listening, authentication, liveness, handlers."""
