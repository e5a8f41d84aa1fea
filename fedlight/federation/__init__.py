"""Federated learning without a training framework: the parts of a round, in torch alone.

What is exchanged (`client`) and what is decided (`algorithm`) in a round, algorithms (`algorithms`), exact sums
(`exact_sum`), robust means (`aggregation`), liars and comparisons of whole updates (`byzantine`), server optimizers
(`server`), lossy wires (`channel`, `codecs`), differential privacy (`privacy`), memories of clients (`client_state`), and
training without gradients (`forward`). The loop in `fedlight.callbacks` runs it under Lightning.
"""

from fedlight.support.lazy import lazy_names

# fmt: off
_FILES = {
    "Algorithm": "algorithm", "Federation": "protocols", "Client": "client", "Visit": "client", "Visiting": "client",
    "Work": "client", "Update": "client", "Upload": "client", "State": "client", "ClientMemories": "client_state",
    "Aggregation": "algorithm", "WeightedSum": "algorithm", "CoordinateMedian": "aggregation",
    "TrimmedMean": "aggregation", "PrivateMean": "privacy", "ClipAndNoise": "privacy", "ExactSum": "exact_sum",
    "ServerOptimizer": "algorithm", "Average": "algorithm", "FedAvgM": "server", "FedAdagrad": "server", "FedAdam": "server",
    "FedYogi": "server", "Channel": "client", "Identity": "client", "Wire": "channel", "Payload": "client",
    "Codec": "codecs", "Quantize": "codecs", "TopK": "codecs", "ZerothOrder": "forward.zeroth_order",
}
# fmt: on
__all__ = [*_FILES]
__getattr__ = lazy_names(__name__, _FILES)
