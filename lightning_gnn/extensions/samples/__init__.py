"""Many samples on one graph: datasets whose items have one row per node, in batches of a rank's rows."""
