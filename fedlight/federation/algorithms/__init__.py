"""One file per federated algorithm; `assignments` has ways of grouping clients for FedBiscuit."""

from fedlight.support.lazy import room_names

__getattr__ = room_names(__name__)
