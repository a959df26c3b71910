"""Ranking of jobs for a worker, as columns. Pure."""
