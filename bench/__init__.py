"""Benchmarks: `python -m bench.NAME`, one JSON line a case, units in the keys."""
