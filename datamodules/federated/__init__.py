"""Federated datamodules: training data read by client, batch by batch; imports partitions from `clients`."""

from fedlight.support.lazy import lazy_names

_FILES = {
    "ByClient": "by_client",
    "FederatedWrapper": "by_client",
    "GivenLoaders": "by_client",
    "FederatedDataModule": "datamodule",
}

__all__ = [*_FILES]
__getattr__ = lazy_names(__name__, _FILES)
