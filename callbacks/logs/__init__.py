"""Tables written during training: visits, groups of clients, accuracy and data by client.

The callbacks read the federated loop, its algorithm and the datamodule through protocols. They change none of them.
"""

from fedlight.support.lazy import room_names

__getattr__ = room_names(__name__)
