"""Graphs in files, partitioned and sorted in memory that does not grow with the number of edges."""
