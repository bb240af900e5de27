"""Graphs in files, cut and sorted in memory that does not grow with their edges."""
