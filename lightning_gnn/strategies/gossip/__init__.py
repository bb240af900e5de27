"""Workers that train independently and average in pairs: pool of batches, pairing, and their execution between processes."""
