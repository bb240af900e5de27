"""Learnable rows for nodes, each on the rank that owns its node."""
