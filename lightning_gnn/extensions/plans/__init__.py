"""Communication plans over the links between ranks, and their costs; most of the code runs without ranks."""
