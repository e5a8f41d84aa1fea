"""Actions beside the training."""
