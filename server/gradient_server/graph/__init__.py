"""The job graph: ingest of evaluations, promotion, retries, cascades, reports."""
