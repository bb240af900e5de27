"""Training steps as captured graphs of a device: code and values of a step, capture, replay."""
