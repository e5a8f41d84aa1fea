"""Federated learning without a training framework: the parts of a round, in torch alone.

Clients and their visits (`client`), the algorithm's hooks (`algorithm`, `algorithms`), exact sums and robust means of
updates (`aggregation`, `byzantine`), server optimizers (`server`), the wire's losses and bytes (`channel`, `codecs`),
differential privacy (`privacy`), memories of clients (`client_state`), and training without gradients (`forward`). The loop
in `fedlight.callbacks` runs it under Lightning.
"""

from fedlight.support.lazy import lazy_names

# fmt: off
_FILES = {
    "Algorithm": "algorithm", "Federation": "protocols", "Client": "client", "Visit": "client", "Visiting": "client",
    "Work": "client", "Update": "client", "Upload": "client", "State": "state", "ClientMemories": "client_state",
    "Aggregation": "aggregation", "WeightedSum": "aggregation", "CoordinateMedian": "aggregation",
    "TrimmedMean": "aggregation", "PrivateMean": "privacy", "ClipAndNoise": "privacy", "ExactSum": "exact_sum",
    "ServerOptimizer": "server", "Average": "server", "FedAvgM": "server", "FedAdagrad": "server", "FedAdam": "server",
    "FedYogi": "server", "Channel": "channel", "Identity": "channel", "Wire": "channel", "Payload": "channel",
    "Codec": "codecs", "Quantize": "codecs", "TopK": "codecs", "ZerothOrder": "forward.zeroth_order",
}
# fmt: on
__all__ = [*_FILES]
__getattr__ = lazy_names(__name__, _FILES)
