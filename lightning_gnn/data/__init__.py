"""A graph as data: checked, cut into parts, and stored."""
