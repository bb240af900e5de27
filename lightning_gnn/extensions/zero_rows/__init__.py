"""Messages of the backward pass without rows of zeros."""
