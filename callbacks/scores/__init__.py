"""Win rates and task scores measured during training."""
