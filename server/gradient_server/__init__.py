"""The server: it knows the jobs, ranks them and hands them out."""
