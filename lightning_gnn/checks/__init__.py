"""Whether a model gives the numbers of one device."""
