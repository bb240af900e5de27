"""Who sends what when over which links, and what it costs; most of it runs without ranks."""
