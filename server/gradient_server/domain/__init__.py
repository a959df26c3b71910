"""The words of the server: jobs, assignments, workers, outcomes. Pure."""
