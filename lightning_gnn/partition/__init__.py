"""Partitioners, partition quality, and shards: pure functions of a graph, without ranks."""
