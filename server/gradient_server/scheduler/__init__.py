"""Who works on what: the tracker of pending jobs, the pool, offers, selection, dispatch."""
