"""The worker agent: it runs evaluations and builds on one host."""
