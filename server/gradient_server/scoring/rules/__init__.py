"""The rules of the scoring policies, one module an area. Pure."""
