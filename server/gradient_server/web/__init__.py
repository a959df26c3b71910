"""HTTP: the API, the board, metrics."""
