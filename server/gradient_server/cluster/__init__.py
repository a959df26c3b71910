"""Cluster jobs: joint start on distinct workers, one verdict."""
