"""Where a worker keeps the paths that builds need and make."""
