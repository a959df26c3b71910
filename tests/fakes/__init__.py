"""Stand-ins for one side of the system, for tests and benchmarks."""
