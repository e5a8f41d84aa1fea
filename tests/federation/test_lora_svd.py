"""Singular values of products of factors against numpy's on the product itself."""

import numpy as np
import pytest
import torch

from fedlight.federation.lora.svd import best_factors, product_svd


def factors(out, rank, inner, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) for shape in ((out, rank), (rank, inner)))


@pytest.mark.parametrize(("out", "rank", "inner"), [(9, 4, 7), (3, 5, 4), (4, 12, 6), (1, 2, 5)])
def test_singular_values_are_those_of_the_product(out, rank, inner):
    b, a = factors(out, rank, inner)
    u, s, vt = product_svd(b, a)
    expected = np.linalg.svd((b.double() @ a.double()).numpy(), compute_uv=False)
    np.testing.assert_allclose(s, expected[: len(s)], atol=1e-12)
    np.testing.assert_allclose(u * s @ vt, b.double() @ a.double(), atol=1e-12)
    np.testing.assert_allclose(u.T @ u, np.eye(len(s)), atol=1e-12)
    assert u.dtype is s.dtype is vt.dtype is torch.float64


@pytest.mark.parametrize("rank", [1, 2, 3, 4])
def test_the_first_columns_and_rows_are_the_nearest_product_of_that_rank(rank):
    b, a = factors(9, 6, 7, seed=1)
    own_b, own_a = best_factors(b, a, 4, torch.zeros(4, 7))
    u, s, vt = np.linalg.svd((b.double() @ a.double()).numpy())
    expected = (u[:, :rank] * s[:rank]) @ vt[:rank]
    np.testing.assert_allclose(own_b[:, :rank] @ own_a[:rank], expected, atol=1e-12)
    np.testing.assert_allclose(own_a @ own_a.T, np.eye(4), atol=1e-12)


def test_directions_without_a_singular_value_keep_their_rows_of_a():
    """A product of rank 2 in adapters of rank 4: the others have B = 0 and an A through which a gradient comes."""
    b, a = factors(9, 2, 7)
    spare = torch.arange(28.0).reshape(4, 7)
    own_b, own_a = best_factors(torch.cat([b, b], dim=1), torch.cat([a, 2 * a]), 4, spare)
    np.testing.assert_allclose(own_b @ own_a, 3 * b.double() @ a.double(), atol=1e-12)
    assert not own_b[:, 2:].any()
    assert torch.equal(own_a[2:], spare[2:].double())
    zero_b, zero_a = best_factors(torch.zeros(9, 2), a, 4, spare)
    assert not zero_b.any()
    assert torch.equal(zero_a, spare.double())


def test_the_sign_of_a_direction_does_not_depend_on_that_of_the_factors():
    b, a = factors(5, 3, 6)
    for sign in (1, -1):
        _, _, vt = product_svd(sign * b, sign * a)
        peaks = vt.gather(1, vt.abs().argmax(dim=1, keepdim=True))
        assert (peaks > 0).all()
