"""Federated learning without a training framework: what a round is, in torch alone.

Clients and their visits (`client`), the algorithm's hooks (`algorithm`, `algorithms`), exact sums and robust means of
updates (`aggregation`), server optimizers (`server`), what the wire does and costs (`channel`, `codecs`), differential
privacy (`privacy`), and memories of clients (`client_state`). The loop in `fedlight.callbacks` runs it under Lightning.
"""

from fedlight.support.lazy import lazy_names

_FILES = {
    **dict.fromkeys(("Algorithm", "predict_payloads"), "algorithm"),
    **dict.fromkeys(("Aggregation", "CoordinateMedian", "TrimmedMean", "WeightedSum"), "aggregation"),
    **dict.fromkeys(("Channel", "Identity", "Payload", "Wire"), "channel"),
    **dict.fromkeys(("Client", "Update", "Upload", "Visit", "Visiting", "Work"), "client"),
    **dict.fromkeys(("Codec", "Quantize", "TopK"), "codecs"),
    **dict.fromkeys(("ClipAndNoise", "PrivateMean"), "privacy"),
    **dict.fromkeys(("Average", "FedAdagrad", "FedAdam", "FedAvgM", "FedYogi", "ServerOptimizer"), "server"),
    **{
        "ClientMemories": "client_state",
        "ExactSum": "exact_sum",
        "Federation": "protocols",
        "State": "state",
    },
}
__all__ = [*_FILES]
__getattr__ = lazy_names(__name__, _FILES)
