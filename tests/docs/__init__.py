"""Pages of docs/ whose tables are made from the code, and the tests that hold them to it."""
