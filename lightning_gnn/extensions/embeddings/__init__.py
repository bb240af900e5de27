"""Learnable node embeddings, each stored on the owner of its node."""
