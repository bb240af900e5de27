"""Mesh of ranks: samples of node features on one graph, divided among data ranks and graph ranks."""
