"""PyTorch Lightning strategies for training PyTorch Geometric models on one large graph over many devices."""
