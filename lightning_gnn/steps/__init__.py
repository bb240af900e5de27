"""Outputs of a step, combined over all ranks: losses, gradients, logged values, metrics and predictions."""
