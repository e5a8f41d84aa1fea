"""One file per federated algorithm; grouping of clients by losses is FedBiscuit's."""

from fedlight.support.lazy import lazy_names

# fmt: off
_FILES = {
    "FedAvg": "fedavg", "FedProx": "fedprox", "Scaffold": "scaffold", "FedBiscuit": "fedbiscuit", "FewFedPIT": "fewfedpit",
    "FedMIT": "fedmit", "FewFedWeight": "fewfedweight", "LocalOnly": "local_only",
    "LocalSelfGeneration": "local_self_generation", "GlobalThenLocal": "global_then_local", "Ditto": "ditto",
    "FedRep": "fedrep",
}
# fmt: on
__all__ = [*_FILES]
__getattr__ = lazy_names(__name__, _FILES)
