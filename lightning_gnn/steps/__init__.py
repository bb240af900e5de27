"""What a step gives on every rank, made that of all ranks: losses, gradients, logged values, metrics, predictions."""
