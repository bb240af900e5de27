"""Training steps as captured graphs of a device: what a step reads and runs, capture, replay."""
