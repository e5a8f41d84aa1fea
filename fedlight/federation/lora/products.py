"""Sums of the products of LoRA factors, never multiplied out: their norms, distances and singular values.

Averaging A and B apart is not averaging their products: of clients i with weights c_i,

    sum c_i B_i A_i  !=  (sum c_i B_i) (sum c_i A_i)

unless all A_i or all B_i are equal. The left side is a product of stacked factors,

    [c_1 B_1 ... c_K B_K] [A_1; ...; A_K]  =  Q_l (R_l R_r^T) Q_r^T

with the QR decompositions ``Q_l R_l`` of the left stack and ``Q_r R_r`` of the transposed right one. Its norm and singular
values are those of the small matrix in the middle, as Q_l and Q_r are orthonormal. All is fp64.
"""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedlight.federation.algorithm import Aggregation, Average, WeightedSum, pieces_of
from fedlight.federation.client import State, Update
from fedlight.federation.lora.pairs import LoraPair, factor_of
from fedlight.federation.protocols import Federation


class Term(NamedTuple):
    """Product ``coefficient * B A``, with B, ``(out, r)``, and A, ``(r, in)``, in fp64."""

    coefficient: float
    b: Tensor
    a: Tensor


def squared_distance(terms: Sequence[Term], b: Tensor, a: Tensor) -> tuple[float, float]:
    """Return the squared Frobenius distance of ``b a`` from the sum of the terms, and that sum's squared norm.

    Examples:
        >>> one = Term(0.5, torch.tensor([[2.0]]).double(), torch.tensor([[4.0]]).double())
        >>> two = Term(0.5, torch.tensor([[6.0]]).double(), torch.tensor([[0.0]]).double())
        >>> distance, norm = squared_distance([one, two], torch.tensor([[3.0]]), torch.tensor([[2.0]]))
        >>> round(distance, 9), round(norm, 9)
        (4.0, 16.0)
    """
    # [out, n], [n, in], [n] for n stacked ranks
    left, right, weights = _stacked([*_merged(terms), Term(-1.0, b.double(), a.double())])
    # Inner products of factors are faster, and would show an error of 1e-8 for an exact average, not 1e-16.
    left, right = _triangle(left), _triangle(right.T).T
    of_sum = weights.clone()
    of_sum[-b.shape[1] :] = 0  # without b a
    return tuple(float(((left * scale) @ right).square().sum()) for scale in (weights, of_sum))  # type: ignore[return-value]


def singular_vectors(terms: Sequence[Term]) -> tuple[Tensor, Tensor, Tensor]:
    """Return the thin singular value decomposition of the sum of the terms.

    Returns:
        U, ``(out, n)``, singular values from the largest on, ``(n,)``, and V^T, ``(n, in)``, with n at most the sum of the
        ranks. Of each row of V^T the number with the largest magnitude is positive.

    Examples:
        >>> b, a = torch.tensor([[3.0], [0.0]]), torch.tensor([[0.0, -1.0]])
        >>> u, s, v = singular_vectors([Term(2.0, b.double(), a.double())])
        >>> [round(value, 9) + 0.0 for part in (u, s, v) for value in part.flatten().tolist()]
        [-1.0, 0.0, 6.0, 0.0, 1.0]
    """
    left, right, weights = _stacked(_merged(terms))
    (q_left, r_left), (q_right, r_right) = torch.linalg.qr(left), torch.linalg.qr(right.T)
    # Of a matrix no larger than the stacked ranks, however large the layer is.
    u, s, v = torch.linalg.svd((r_left * weights) @ r_right.T, full_matrices=False)
    u, v = q_left @ u, v @ q_right.T
    # The signs of a pair of vectors are free: fixed, they do not depend on how the decomposition was computed.
    signs = v.gather(1, v.abs().argmax(dim=1, keepdim=True)).sign()
    return u * signs.T, s, v * signs


def _stacked(terms: Sequence[Term]) -> tuple[Tensor, Tensor, Tensor]:
    """Return the left factors side by side, the right ones one below the other, and the coefficient of each column."""
    weights = [
        torch.full((term.a.shape[0],), term.coefficient, dtype=torch.float64, device=term.a.device)
        for term in terms
    ]
    return (
        torch.cat([term.b for term in terms], dim=1),
        torch.cat([term.a for term in terms]),
        torch.cat(weights),
    )


def _triangle(columns: Tensor) -> Tensor:
    """Return a matrix of as few rows as possible whose columns have the same inner products."""
    rows, number = columns.shape
    # With more columns than rows R would be no smaller.
    return torch.linalg.qr(columns, mode="r").R if number < rows else columns


def _merged(terms: Sequence[Term]) -> Sequence[Term]:
    """Return one term of the same sum where all terms share a factor, as under FFA-LoRA, and else the terms."""
    first, *others = terms
    if all(torch.equal(term.a, first.a) for term in others):
        return [
            Term(1.0, sum((term.coefficient * term.b for term in terms), torch.zeros_like(first.b)), first.a)
        ]
    if all(torch.equal(term.b, first.b) for term in others):
        return [
            Term(1.0, first.b, sum((term.coefficient * term.a for term in terms), torch.zeros_like(first.a)))
        ]
    return terms


class ProductSums(Aggregation):
    """Aggregation that also keeps the LoRA factors of each client, for sums of their products.

    Factors take the memory of all uploads of the round.

    Args:
        inner: combination of the movements.
        mean: a fresh weighted sum, which says with what coefficient each client counts.
        pairs: pairs of factors.
        then: function from the factors of all clients (this object) and the combined movement to the result; None: the
            combined movement as it is.

    Attributes:
        is_known: whether the server knows both factors of all clients. A client may have kept its own, or sent one that it
            had not received and whose start only its algorithm knows.
    """

    def __init__(
        self,
        inner: Aggregation,
        mean: WeightedSum,
        pairs: Sequence[LoraPair],
        then: Callable[["ProductSums", State], State] | None = None,
    ) -> None:
        self.is_known = True
        self.keeps_factors = True
        self._then = then
        self._inner, self._mean, self._pairs = inner, copy.deepcopy(mean), pairs  # `mean` may be `inner`
        # Client -> weight, names that were sent, factors.
        self._kept: dict[str, list[tuple[float, list[str], State]]] = {}

    def add(self, update: Update) -> None:
        self._inner.add(update)
        sent: list[str] = []
        factors: State = {}
        for pair in self._pairs:
            of_pair = [name for name in (pair.a, pair.b) if name in update.movement]
            sent += of_pair
            self.is_known &= not update.keeps_factors and all(name in update.received for name in of_pair)
            if not self.is_known and self._then is None:
                return
            for name in (pair.a, pair.b) if of_pair else ():
                if name in of_pair or name in update.received:
                    factors[name] = _factor(update, name)
        if sent:
            self._kept.setdefault(update.client_id, []).append((update.weight, sent, factors))

    @property
    def sums(self) -> Any:
        """Exact sums of the inner aggregation, if it has them."""
        return getattr(self._inner, "sums", None)

    def partial(self) -> dict[str, Any]:
        """Return the partial of the inner aggregation and the clients' factors, and start anew."""
        return {"inner": self._inner.partial(), **self._own()}

    def pieces(self) -> Iterator[dict[str, Any]]:
        parts = pieces_of(self._inner)
        rest = self._own()
        kept = rest.pop("kept")
        pieces: list[dict[str, Any]] = [{"kept": {client: each}} for client, each in kept.items()]
        return (piece for some in ([rest], ({"inner": part} for part in parts), pieces) for piece in some)

    def _own(self) -> dict[str, Any]:
        kept, self._kept = self._kept, {}
        is_known, self.is_known = self.is_known, True
        return {"is_known": is_known, "kept": kept}

    def merge(self, partial: Mapping[str, Any]) -> None:
        if "inner" in partial:
            self._inner.merge(partial["inner"])
        self.is_known &= partial.get("is_known", True)
        for client, kept in partial.get("kept", {}).items():
            self._kept.setdefault(client, []).extend(kept)

    def result(self) -> State:
        """Return the combined movement, or what ``then`` makes of it; the factors stay for `terms`."""
        movement = self._inner.result()
        return movement if self._then is None else self._then(self, movement)

    def terms(self, pair: LoraPair, state: Mapping[str, Tensor]) -> list[Term] | None:
        """Return terms whose sum is the mean product of a pair over the clients, the same in any order of the clients.

        With coefficients c_i that do not sum to 1 the mean is, as that of movements, ``P + sum c_i (B_i A_i - P)`` with the
        server's own product P. A factor that a client did not send is the one that it received, or else the server's.

        Args:
            pair: one of the pairs.
            state: the server's parameters at the beginning of the round.

        Returns:
            No term where no client sent a factor; None where some sent A alone and others B, so that no coefficient is that
            of a product.
        """
        sent_factors = [
            (weight, [name for name in (pair.a, pair.b) if name in sent], factors)
            for client in sorted(self._kept)
            for weight, sent, factors in self._kept[client]
            if pair.a in sent or pair.b in sent
        ]
        if not sent_factors:
            return []
        names = sent_factors[0][1]
        if any(sent != names for _, sent, _ in sent_factors):
            return None
        mean = copy.deepcopy(self._mean)
        # The mean of unit vectors has the clients' coefficients, whatever the aggregation.
        one_hots = torch.eye(len(sent_factors), dtype=torch.float64)
        for one_hot, (weight, sent, _) in zip(one_hots, sent_factors, strict=True):
            mean.add(Update("", dict.fromkeys(sent, one_hot), weight))
        coefficients = mean.result()[names[0]].tolist()
        own_a, own_b = state[pair.a].double(), state[pair.b].double()
        terms = [
            Term(c, factors[pair.b].double() if pair.b in factors else own_b,
                 factors[pair.a].double() if pair.a in factors else own_a)
            for c, (_, _, factors) in zip(coefficients, sent_factors, strict=True)
        ]  # fmt: skip
        # Unbiased weights do not sum to 1.
        rest = 1 - sum(coefficients)
        return terms if abs(rest) < 1e-12 else [*terms, Term(rest, own_b, own_a)]


def _factor(update: Update, name: str) -> Tensor:
    """Return a factor as the server knows it from the tensors that the client received and sent."""
    received = update.received[name]
    if name not in update.movement:
        return received
    value = update.movement[name].double() + received
    # Over a lossless channel fp32 loses nothing, and takes half of the memory.
    small = value.float()
    return small if torch.equal(small.double(), value) else value


def refuse_fixed_coordinates(federation: Federation, algorithm: str, other: str) -> None:
    """Raise ValueError for a run whose aggregation, server or channel takes factors for parameters of a fixed meaning.

    The ``algorithm`` replaces factors by others with the averaged product; the ``other`` is one to take instead.
    """
    reason = (
        f"{algorithm} replaces the factors A and B by others with the averaged product, in other coordinates"
    )
    if federation.robust:
        raise ValueError(
            f"{reason}, and an aggregation combines coordinates: take it out, or take another algorithm, such as "
            "FFALoRA, whose clients share their A"
        )
    if type(federation.server) is not Average or federation.server.lr != 1:
        raise ValueError(
            f"{reason}, and a server optimizer combines rounds: take Average with lr=1, or {other}"
        )
    if federation.channel.error_feedback:
        raise ValueError(
            f"{reason}, so what one message has lost cannot be added to the next: set error_feedback=false in the codecs of "
            f"channel.up, or take {other}"
        )


def with_factors(
    update: Update, received: State, trained: Mapping[str, Tensor], state: Mapping[str, Tensor]
) -> Update:
    """Return a client's update with its received tensors, and whether it keeps a LoRA factor that the server does not know.

    That is one that it has trained and not sent, and that differs from the one that it received, or else from the server's.
    """
    unsent = [name for name in trained if name not in update.movement and factor_of(name)]
    keeps = any(not torch.equal(trained[n], received.get(n, state.get(n, trained[n]))) for n in unsent)
    return replace(update, received=received, keeps_factors=keeps)
