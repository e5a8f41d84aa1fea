"""Federated learning without a training framework: the parts of a round, in torch alone.

What is exchanged (`client`) and what is decided (`algorithm`) in a round, algorithms (`algorithms`), exact sums
(`exact_sum`), robust means (`aggregation`), liars and comparisons of whole updates (`byzantine`), server optimizers
(`server`), lossy wires (`channel`, `codecs`), differential privacy (`privacy`), memories of clients (`client_state`), and
training without gradients (`forward`). The loop in `fedlight.callbacks` runs it under Lightning.
"""

from fedlight.support.lazy import room_names

_FILES = {
    "Federation": "protocols",
    "Upload": "client",
    "ClientMemories": "client_state",
    "WeightedSum": "algorithm",
    "ExactSum": "exact_sum",
    "Payload": "client",
}
__getattr__ = room_names(__name__, _FILES)
