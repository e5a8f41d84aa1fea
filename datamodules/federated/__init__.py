"""Federated datamodules: training data read by client, batch by batch; imports partitions from `clients`."""

from fedlight.support.lazy import room_names

__getattr__ = room_names(__name__)
