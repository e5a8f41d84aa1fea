import math

import pytest
import torch

from fedlight.modules.functional import info_nce


def cosine(a, b):
    return sum(x * y for x, y in zip(a, b, strict=True)) / math.hypot(*a) / math.hypot(*b)


@pytest.mark.parametrize("include_positive", [False, True])
def test_it_equals_the_formula(include_positive):
    generator = torch.Generator().manual_seed(3)
    queries, targets = (3 * torch.randn(5, 4, generator=generator) for _ in range(2))
    found = info_nce(queries, targets, 0.5, include_positive)
    for i in range(5):
        similar = [cosine(queries[i].tolist(), target.tolist()) for target in targets]
        others = sum(math.exp(s / 0.5) for j, s in enumerate(similar) if include_positive or j != i)
        assert math.isclose(found[i].item(), -math.log(math.exp(similar[i] / 0.5) / others), rel_tol=1e-5)


def test_with_the_positive_it_is_cross_entropy_over_the_batch():
    generator = torch.Generator().manual_seed(4)
    queries, targets = (torch.randn(6, 3, generator=generator, requires_grad=True) for _ in range(2))
    ours = info_nce(queries, targets, 0.1, include_positive=True)
    unit = [torch.nn.functional.normalize(side, dim=1) for side in (queries, targets)]
    theirs = torch.nn.functional.cross_entropy(unit[0] @ unit[1].T / 0.1, torch.arange(6), reduction="none")
    torch.testing.assert_close(ours, theirs)
    gradients = [torch.autograd.grad(loss.sum(), queries, retain_graph=True)[0] for loss in (ours, theirs)]
    torch.testing.assert_close(*gradients)


def test_a_tiny_temperature_neither_overflows_nor_loses_its_gradient():
    queries = torch.tensor([[1.0, 0.0], [0.0, 1.0]], requires_grad=True)
    losses = info_nce(queries, torch.tensor([[-1.0, 0.1], [0.1, -1.0]]), temperature=1e-4)
    losses.sum().backward()
    assert losses.isfinite().all()
    assert queries.grad.isfinite().all()
    assert (queries.grad != 0).any()


def test_half_precision_is_computed_in_fp32():
    queries = torch.tensor([[1.0, 0.5], [0.25, 1.0]])
    found = info_nce(queries.bfloat16(), queries.bfloat16(), 0.5)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, info_nce(queries, queries, 0.5))


def test_a_batch_of_one_has_nothing_to_compare_with():
    one = torch.ones(1, 3)
    with pytest.raises(ValueError, match=r"the batch has 1: set data\.batch_size to 2 or more, or"):
        info_nce(one, one, 0.5)
    assert info_nce(one, one, 0.5, include_positive=True).item() == pytest.approx(0, abs=1e-6)
