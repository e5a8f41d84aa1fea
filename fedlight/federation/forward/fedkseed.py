"""FedKSeed: clients step along K directions that everybody knows, and send how far they went along which.

Qin et al., "Federated Full-Parameter Tuning of Billion-Sized Language Models with Communication Cost under 18 Kilobytes",
ICML 2024, https://arxiv.org/abs/2312.06353, Algorithm 1. Everybody has the initial parameters w_0 and K seeds, each for a
direction z_j. In each step t of a visit a client m draws one of them, j, takes g from two losses as MeZO does
(`fedlight.federation.forward.zeroth_order`), steps, and notes the scalar a = lr_t * g:

    w <- w - a z_j                                        the client, locally
    A_j <- A_j + sum over clients m of p_m * sum of its a at j        the server
    w = w_0 - sum over j of A_j z_j                       everybody, from w_0 and K scalars

A client's upload is an index of 2 bytes and a scalar of 4 for each step, or K scalars where these are fewer bytes: with
K = 4096 never more than 16.5 KB (131 KB with the largest K), whatever the size of the model. Down go the K sums, and to a
client that takes part for the first time w_0. Sums are fp32. The last line is computed in fp64 in the order of j and rounded
once, so w_0 and the sums give the server's model bit for bit (`rebuild`), but for the rounding of the server's step in a
number that it moved to within 2^-29 of 0; visits start from the rebuilt one.

Deviations: a holds the learning rate, so that schedules need not be sent; seeds are drawn evenly (FedKSeed-Pro, which learns
their probabilities, is not here); p_m follows ``weighting``. A client's visit starts from the model that it would rebuild,
which is taken from the server because the bits are the same; the time that K draws of every parameter take is not counted on
the devices' clock.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fedlight.federation.algorithm import Algorithm, Average, Weighting
from fedlight.federation.client import (
    Client,
    Identity,
    SharedDirections,
    State,
    Update,
    Visit,
    Visiting,
    Work,
    movement,
    read,
)
from fedlight.federation.forward.zeroth_order import direction
from fedlight.federation.protocols import Federation, optimized_parameters

SUMS, INDICES, SCALARS = "kseed.sums", "kseed.indices", "kseed.scalars"
MOST_SEEDS = 2**15
"""Indices are int16."""
HAS_START = "kseed"
"""Entry of a client's memory, once it has the initial parameters."""
ROUNDING = 2.0**-40
"""Difference from the rebuilt model, relative to a parameter's largest number, that counts as rounding; fp32 has 2^-24."""


class FedKSeed(Algorithm):
    """Forward-only training along shared directions; scalars alone are sent.

    The model has to be a function of w_0 and the sums, so it needs ``federated.forward``, a lossless channel and plain
    averaging.

    Args:
        num_seeds: K, from 1 to 32768. Fewer make the model cheaper to rebuild and confine it to fewer directions.
        seed: seed of the K directions.
        weighting: of the clients, as for `Algorithm`.

    Raises:
        ValueError: ``num_seeds`` is out of its range; before the first round, for other training, a lossy channel, another
            server optimizer, a robust aggregation, several learning rates or frozen parameters in the optimizer; in
            ``start_round``, where something else has changed the parameters.
    """

    buffers = ("refuse",)

    def __init__(self, num_seeds: int = 4096, seed: int = 0, weighting: Weighting = "unbiased") -> None:
        super().__init__(weighting)
        if not 1 <= num_seeds <= MOST_SEEDS:
            raise ValueError(f"num_seeds={num_seeds} must be from 1 to {MOST_SEEDS}: indices take two bytes")
        self.num_seeds = num_seeds
        self.seed = seed
        self._directions = SharedDirections(num_seeds, seed)
        self._start: State = {}
        self._sums = torch.zeros(num_seeds)
        self._now: State = {}
        self._federation: Federation | None = None

    # The server: it keeps w_0 and the sums

    def check_settings(self, federation: Federation) -> None:
        if federation.train != "forward":
            raise ValueError(
                "FedKSeed sends what forward-only visits have gone, and not all visits of this run are such: "
                "set forward=ZerothOrder, for all clients"
            )
        if type(federation.channel) is not Identity:
            raise ValueError(
                "FedKSeed has its own code for what is sent, of which channel="
                f"{type(federation.channel).__name__} would round the indices: leave channel out"
            )
        if type(federation.server) is not Average or federation.server.lr != 1:
            raise ValueError(
                "FedKSeed's model is a function of its scalars, which server="
                f"{type(federation.server).__name__} with lr={federation.server.lr} would undo: take Average with lr=1"
            )
        if federation.robust:
            raise ValueError("FedKSeed needs the weighted sum of the clients' scalars: leave aggregation out")
        rates = {float(group["lr"]) for each in federation.optimizers for group in each.param_groups}
        if len(rates) > 1:
            raise ValueError(
                f"FedKSeed sends one scalar for all parameters, so rates of {sorted(rates)} do not work: give one"
            )
        self._federation = federation
        self._refuse_frozen()

    def _refuse_frozen(self) -> None:
        for name, parameter in optimized_parameters(self._federation).items() if self._federation else ():
            if not parameter.requires_grad:
                raise ValueError(
                    f"FedKSeed's scalars move all parameters of the optimizer, and {name} is frozen (requires_grad is "
                    "False): give the optimizer those alone that are trained"
                )

    def start_round(self, round_idx: int, cohort: Sequence[Client], federation: Federation) -> None:
        state = read(optimized_parameters(federation))
        if not self._start:
            self._start = self._now = state
        elif not self._now:  # of a resumed run
            self._now = self.rebuilt()
        others = [name for name in {**self._now, **state} if not self._is_now(name, state.get(name))]
        if others:
            raise ValueError(
                f"{others[0]} is not what FedKSeed's scalars make of it: what changes parameters beside clients, or adds "
                "some in later rounds, cannot be sent as scalars. Take it out, or take FedAvg"
            )

    def _is_now(self, name: str, value: Tensor | None) -> bool:
        """Return whether a parameter is the one that the scalars give, up to the rounding of the server's step."""
        if name not in self._now or value is None or self._now[name].shape != value.shape:
            return False
        now = self._now[name]
        if torch.equal(now, value):
            return True
        # A number that comes within 2^-29 of its former size to 0 has a movement that fp64 rounds.
        largest = max(float(values.abs().max()) for values in (now, self._start[name]))
        return float((now.double() - value.double()).abs().max()) <= ROUNDING * largest

    def rebuilt(self) -> State:
        """Return the global model from the initial one and the sums so far."""
        return rebuild(self._start, self._sums, self._directions)

    def send(self, visit: Visit, client: Client, state: State) -> State:
        start = {} if HAS_START in client.memory else (self._start or state)  # w_0 goes down once
        return {SUMS: self._sums, **start}

    def finish_visit(self, visiting: Visiting, movement: State, work: Work) -> Update | None:
        update = super().finish_visit(visiting, movement, work)
        assert update is not None
        return Update(update.client_id, {SUMS: decode(movement, self.num_seeds)}, update.weight)

    def uploaded(self, visiting: Visiting, movement: State) -> State:
        return rebuild(visiting.start, decode(movement, self.num_seeds), self._directions)

    def finish_round(self, movement_of_sums: State) -> State:
        if SUMS not in movement_of_sums:  # no client came back
            return {}
        self._sums = (self._sums.double() + movement_of_sums[SUMS]).float()  # fp32 like the message
        before, self._now = self._now, self.rebuilt()
        return movement(before, self._now)

    def state_dict(self) -> dict[str, Any]:
        return {"start": dict(self._start), "sums": self._sums}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._refuse_without(state, "sums", "sums of scalars")
        self._start, self._sums, self._now = dict(state["start"]), state["sums"], {}

    # The client: it rebuilds the model, steps along shared directions, and sends how far it went

    def start_visit(self, visit: Visit, client: Client, received: State) -> Visiting:
        self._refuse_frozen()  # a module may freeze a layer when a round begins
        known = self._now or self._start  # before the first round of a resumed run names and shapes will do
        start = known or {name: value for name, value in received.items() if name != SUMS}
        return Visiting(visit, client, received, start, directions=self._directions)

    def reply(self, visiting: Visiting, trained: State, work: Work) -> State:
        visiting.client.memory[HAS_START] = True
        return encode(work.gone, self.num_seeds)


def encode(gone: Sequence[tuple[int, float]], num_seeds: int) -> State:
    """Return a client's message about its steps: index and scalar of each, or the sum of each seed where that is smaller.

    Args:
        gone: index of each step's direction, below ``num_seeds``, and the distance gone against it.
        num_seeds: K.

    Examples:
        >>> encode([(3, 0.5), (0, -2.0)], num_seeds=100)
        {'kseed.indices': tensor([3, 0], dtype=torch.int16), 'kseed.scalars': tensor([ 0.5000, -2.0000])}
        >>> encode([(1, 0.5), (1, 0.25)], num_seeds=2)
        {'kseed.scalars': tensor([0.0000, 0.7500])}
    """
    indices = torch.tensor([index for index, _ in gone], dtype=torch.int16)
    scalars = torch.tensor([scalar for _, scalar in gone], dtype=torch.float32)
    if indices.nbytes + scalars.nbytes < 4 * num_seeds:  # K scalars of fp32
        return {INDICES: indices, SCALARS: scalars}
    return {SCALARS: _summed(indices, scalars, num_seeds).float()}


def decode(sent: Mapping[str, Tensor], num_seeds: int) -> Tensor:
    """Return the sum of a client's scalars at each seed, ``(num_seeds,)`` fp64, from what `encode` made.

    Examples:
        >>> decode(encode([(1, 0.5), (1, 0.25), (0, 2.0)], num_seeds=100), 100)[:3].tolist()
        [2.0, 0.75, 0.0]
    """
    if INDICES not in sent:
        return sent[SCALARS].double()
    return _summed(sent[INDICES], sent[SCALARS], num_seeds)


def _summed(indices: Tensor, scalars: Tensor, num_seeds: int) -> Tensor:
    total = torch.zeros(num_seeds, dtype=torch.float64)
    return total.index_add_(0, indices.long(), scalars.double())


def rebuild(start: Mapping[str, Tensor], sums: Tensor, directions: SharedDirections) -> State:
    """Return ``start - sum of sums[j] * z_j``, fp32.

    Args:
        start: initial parameters.
        sums: ``(num_seeds,)``.
        directions: the shared ones.

    Examples:
        >>> shared, sums = SharedDirections(2, seed=0), torch.tensor([0.0, 0.5])
        >>> z = direction(shared.key(1), "w", (3,))
        >>> torch.equal(rebuild({"w": torch.zeros(3)}, sums, shared)["w"], -0.5 * z)
        True
    """
    # A direction with a sum of 0 moves nothing, and is not drawn.
    used = [(directions.key(index), sums[index].item()) for index in sums.nonzero().flatten().tolist()]
    state = {}
    for name, value in start.items():
        total = torch.zeros(value.shape, dtype=torch.float64)  # in the order of j, rounded once
        for key, scalar in used:
            total.add_(direction(key, name, value.shape).double().mul_(scalar))
        state[name] = (value.double() - total).float()
    return state
