"""Ranks that differ: a file per rank when it happens, and `python -m zc diff` to lay them side by side."""
