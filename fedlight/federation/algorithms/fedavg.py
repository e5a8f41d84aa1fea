"""FedAvg, whose hooks are the defaults of `Algorithm`.

McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017,
https://arxiv.org/abs/1602.05629
"""

from fedlight.federation.algorithm import Algorithm


class FedAvg(Algorithm):
    """Clients train from the global state; the server adds the weighted sum of their movements."""
