"""fedlight: federated fine-tuning of language models inside PyTorch Lightning."""

__version__ = "0.1.0"
