"""Ranks of one machine that share less memory than they need together, and compute in turns."""
