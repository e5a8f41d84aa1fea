"""Tables written during training: visits, groups of clients, accuracy and data by client.

The callbacks read the federated loop, its algorithm and the datamodule through protocols. They change none of them.
"""

from fedlight.support.lazy import lazy_names

_FILES = {
    "ClientAccuracy": "client_accuracy",
    "ClientData": "client_data",
    "GroupLog": "group_log",
    "VisitLog": "visit_log",
}

__all__ = [*_FILES]
__getattr__ = lazy_names(__name__, _FILES)
