"""Training that continues without lost ranks."""
