"""`gradient demo`: a server and three workers in one command, from nothing."""
