"""LightningCLI with the key ``federated:``; each command locks its folder and records itself in ``run.json``."""

from fedlight.support.lazy import lazy_names

_FILES = {"FedlightCLI": "cli", "find_config": "cli", "lightning_cli": "cli"}

__all__ = [*_FILES]
__getattr__ = lazy_names(__name__, _FILES)
