"""Runs assigned jobs, from the acceptance to the final report."""
