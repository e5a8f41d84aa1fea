"""Domain coverage: the mean cosine of a domain's texts to the nearest text that the clients hold.

Z. Wang et al., "Federated Instruction Tuning of LLMs with Domain Coverage Augmentation" (FedDCA), 2024,
https://arxiv.org/abs/2409.20135, eq. 5, after the facility location of G. Cornuejols et al. 1983:
``d(D^d, D^c) = 1 / |D^d| * sum over d in D^d of max over v in D^c and D^d of cos(d, v)``.

Deviation: the paper prints ``1 / |D^c|``, but its values lie in [0, 1], and facility location is a mean over the covered
points. Texts from outside the domain distort the metric (the paper's Figure 5): pass only vectors of texts inside, or a
mask.
"""

import torch
from torch import Tensor
from torch.nn.functional import normalize
from torchmetrics import Metric

from fedlight.support.checks import Checked

BLOCK = 1024


class DomainCoverage(Checked, Metric):
    """Coverage of a domain by all vectors seen so far, a torchmetrics Metric; a text seen twice counts once.

    Its memory does not grow with the number of vectors, and a matrix never has more than ``block * points`` similarities.

    Args:
        domain: vectors of all texts of the domain, ``(points, dimension)``, of any length above 0.
        block: number of vectors that are compared with the domain at a time, at least 1.

    Raises:
        ValueError: the domain is empty, not a matrix or not finite, or the block is below 1.

    Examples:
        >>> coverage = DomainCoverage(torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]]))
        >>> coverage.update(torch.tensor([[0.0, 2.0]]))
        >>> coverage.update(torch.tensor([[3.0, 4.0]]))
        >>> round(coverage.compute().item(), 6)  # (0.6 + 1 + 0) / 3
        0.533333
    """

    is_differentiable = False
    higher_is_better = True
    full_state_update = False  # a batch's state is merged by the maximum; no second update is needed
    domain: Tensor
    best: Tensor

    def __init__(self, domain: Tensor, block: int = BLOCK) -> None:
        super().__init__()
        if domain.ndim != 2 or not len(domain) or block < 1:
            raise ValueError(
                f"domain must be (points, dimension) with at least one point, it is {tuple(domain.shape)}, "
                f"and block={block} at least 1"
            )
        _check_finite(domain, "points of the domain", "leave them out")
        self.block = block
        self.register_buffer("domain", normalize(domain.float(), dim=1), persistent=False)
        # The best cosine of each point, [points]; processes take the maximum.
        self.add_state("best", torch.full((len(domain),), float("-inf")), dist_reduce_fx="max")

    def update(self, vectors: Tensor, inside: Tensor | None = None) -> None:
        """Add vectors of texts that the clients hold.

        Args:
            vectors: ``(vectors, dimension)``.
            inside: whether each belongs to the domain, ``(vectors,)`` bool; others are left out. None: all belong to it.

        Raises:
            ValueError: the dimension is not the domain's, or a vector inside is not finite; then none is added.
        """
        if vectors.ndim != 2 or vectors.shape[1] != self.domain.shape[1]:
            raise ValueError(
                f"vectors of shape {tuple(vectors.shape)} do not fit a domain of dimension {self.domain.shape[1]}: "
                "encode both with one encoder"
            )
        kept = vectors if inside is None else vectors[inside]
        _check_finite(kept, "vectors", "leave them out with inside")
        for block in kept.split(self.block) if len(kept) else ():
            similar = self.domain @ normalize(block.to(self.domain), dim=1).T  # [points, block]
            self.best = torch.maximum(self.best, similar.amax(dim=1))

    def compute(self) -> Tensor:
        """Return the mean over the domain's points, at most 1; raise ValueError if no vector inside the domain was seen."""
        if torch.isinf(self.best).any():
            raise ValueError("no vector inside the domain was seen: its coverage is not defined")
        return self.best.mean(dtype=torch.float64).float()  # eq. (5)


def _check_finite(vectors: Tensor, what: str, otherwise: str) -> None:
    """Check that vectors are finite: one NaN or infinity, as from an encoder in fp16, makes the whole coverage NaN."""
    broken = int((~vectors.isfinite().all(dim=1)).sum())
    if broken:
        raise ValueError(
            f"{broken} of {len(vectors)} {what} are not finite: encode their texts anew, in fp32, or {otherwise}"
        )


def domain_coverage(domain: Tensor, vectors: Tensor, block: int = BLOCK) -> float:
    """Return the coverage of ``domain`` by ``vectors``, both ``(n, dimension)``; see `DomainCoverage`."""
    coverage = DomainCoverage(domain, block)
    coverage.update(vectors)
    return coverage.compute().item()
