"""Singular values of the product of two LoRA factors, without the product itself.

B A, ``(out, in)``, has at most as many singular values as A has rows. With B = Q_B R_B and A^T = Q_A R_A (QR), those of B A
are those of the small matrix R_B R_A^T = U S V^T, and its singular vectors are Q_B U and Q_A V. All is fp64.
"""

import torch
from torch import Tensor


def product_svd(b: Tensor, a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return U, ``(out, k)``, S, ``(k,)``, and V^T, ``(k, in)``, of ``B A = U S V^T`` in fp64, with falling singular values.

    Of each row of V^T the number of largest magnitude is positive.

    Args:
        b: ``(out, r)``.
        a: ``(r, in)``.

    Examples:
        >>> b, a = torch.tensor([[1.0, 0.0], [0.0, 2.0]]), torch.tensor([[3.0, 0.0], [0.0, -4.0]])
        >>> u, s, vt = product_svd(b, a)
        >>> [round(value, 9) for value in s.tolist()], torch.allclose(u * s @ vt, (b @ a).double())
        ([8.0, 3.0], True)
    """
    q_b, r_b = torch.linalg.qr(b.double())
    q_a, r_a = torch.linalg.qr(a.double().T)
    u, s, vt = torch.linalg.svd(r_b @ r_a.T, full_matrices=False)
    u, vt = q_b @ u, vt @ q_a.T
    peaks = vt.gather(1, vt.abs().argmax(dim=1, keepdim=True))
    signs = torch.where(peaks < 0, -1.0, 1.0)
    return u * signs.T, s, vt * signs


def best_factors(b: Tensor, a: Tensor, rank: int, spare: Tensor) -> tuple[Tensor, Tensor]:
    """Return B, ``(out, rank)``, and A, ``(rank, in)``, whose product is nearest to that of the given factors, in fp64.

    B = U S and A = V^T of the largest singular values, in falling order, so the first r columns and rows are the nearest
    product of rank r (Eckart and Young, 1936). A direction without a singular value, to rounding, has a zero column in B and
    the row of ``spare`` in A: with a zero row it would have no gradient and could never be trained again.

    Args:
        b: ``(out, r)``.
        a: ``(r, in)``.
        rank: rank of the result, any number from 1.
        spare: rows of A for directions without a singular value, ``(rank, in)``.

    Examples:
        >>> b, a = torch.tensor([[0.0, 3.0], [0.0, 0.0]]), torch.tensor([[1.0, 0.0], [0.0, 2.0]])
        >>> spare = torch.full((2, 2), 0.5)
        >>> [factor.abs().tolist() for factor in best_factors(b, a, 2, spare)]
        [[[6.0, 0.0], [0.0, 0.0]], [[0.0, 1.0], [0.5, 0.5]]]
    """
    u, s, vt = product_svd(b, a)
    found_b = torch.zeros(b.shape[0], rank, dtype=torch.float64)
    found_a = spare.double().clone()
    tolerance = max(b.shape[0], a.shape[1]) * torch.finfo(torch.float64).eps
    known = min(rank, int((s > tolerance * s[:1]).sum()))
    found_b[:, :known] = u[:, :known] * s[:known]
    found_a[:known] = vt[:known]
    return found_b, found_a
