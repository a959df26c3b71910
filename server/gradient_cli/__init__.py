"""The `gradient` command: submits work and asks what became of it, over HTTP alone."""
