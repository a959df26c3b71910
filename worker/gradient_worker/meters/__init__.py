"""What the agent measures: builds by their cgroups, the host, its links, its processor."""
