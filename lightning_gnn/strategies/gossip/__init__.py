"""Workers that train independently and average in pairs: the pool of batches, the pairing, and what carries them out."""
