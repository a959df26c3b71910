"""The NAR store, its admission of uploads, logs, transfers."""
