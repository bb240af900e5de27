"""Messages of the backward pass that omit rows of zeros."""
