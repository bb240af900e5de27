"""Workers that train apart and average in pairs: the pool of batches, the pairing, and what carries them out."""
