"""One file per federated algorithm; `assignments` has ways of grouping clients for FedBiscuit."""

from fedlight.support.lazy import lazy_names

# fmt: off
_FILES = {
    "FedAvg": "fedavg", "FedProx": "fedprox", "Scaffold": "scaffold", "FedBiscuit": "fedbiscuit",
    "LocalOnly": "local_only", "GlobalThenLocal": "global_then_local", "Ditto": "ditto", "FedRep": "fedrep",
    "GreedyGroups": "fedbiscuit", "OptimalGroups": "assignments", "NearestGroups": "assignments",
    "SoftGroups": "assignments", "KnownGroups": "assignments",
}
# fmt: on
__all__ = [*_FILES]
__getattr__ = lazy_names(__name__, _FILES)
