"""Who owns what: partitioners, their quality, and the shards that follow; pure functions of a graph, without ranks."""
