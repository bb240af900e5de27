"""Graph data: validation, partitioning and storage."""
