"""Build history and instance windows."""
