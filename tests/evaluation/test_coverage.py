import numpy as np
import pytest
import torch

from fedlight.evaluation.coverage import DomainCoverage, domain_coverage


def draw(number, dimension=6, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).normal(size=(number, dimension)).astype(np.float32))


def brute_force(domain, vectors):
    """Eq. 5 as it is printed, but for the divisor."""
    total, others = 0.0, vectors.double().numpy()
    for point in domain.double().numpy():
        total += max(point @ other / np.linalg.norm(point) / np.linalg.norm(other) for other in others)
    return total / len(domain)


@pytest.mark.parametrize("block", [1, 3, 7, 1000])
def test_it_equals_brute_force(block):
    domain, vectors = draw(20), draw(7, seed=1)
    assert domain_coverage(domain, vectors, block) == pytest.approx(brute_force(domain, vectors), abs=1e-6)


def test_order_repetitions_and_batches_do_not_matter():
    domain, vectors = draw(20), draw(9, seed=1)
    whole = domain_coverage(domain, vectors)
    coverage = DomainCoverage(domain)
    for part in (vectors[6:], vectors[:4], vectors[2:7], vectors[:0]):
        coverage.update(part)
    assert coverage.compute().item() == whole
    coverage.reset()
    coverage.update(vectors[:2])
    assert coverage.compute().item() == domain_coverage(domain, vectors[:2])


def test_the_domain_covers_itself_and_more_vectors_never_cover_less():
    domain = draw(30)
    assert domain_coverage(domain, domain) == pytest.approx(1, abs=1e-6)
    values = [domain_coverage(domain, draw(40, seed=2)[:number]) for number in (1, 5, 20, 40)]
    assert values == sorted(values)
    assert values[0] < values[-1]


def test_texts_outside_of_the_domain_are_left_out():
    domain, vectors = draw(10), draw(6, seed=1)
    inside = torch.tensor([True, False, True, False, False, True])
    coverage = DomainCoverage(domain)
    coverage.update(vectors, inside)
    assert coverage.compute().item() == domain_coverage(domain, vectors[inside])
    assert coverage.compute().item() < domain_coverage(domain, vectors)


def test_processes_take_the_best_of_each_point():
    """What torchmetrics does with ``dist_reduce_fx='max'``, by hand: states stacked, then reduced."""
    domain, vectors = draw(20), draw(8, seed=1)
    one, other = DomainCoverage(domain), DomainCoverage(domain)
    one.update(vectors[:3])
    other.update(vectors[3:])
    merged = one._reductions["best"](torch.stack([one.best, other.best]))
    assert merged.mean().item() == pytest.approx(domain_coverage(domain, vectors), abs=1e-7)


def test_memory_is_that_of_the_points():
    coverage = DomainCoverage(draw(50))
    for seed in range(5):
        coverage.update(draw(200, seed=seed))
    assert [state.shape for state in coverage.metric_state.values()] == [(50,)]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_vectors_that_are_not_finite_are_refused_and_counted(bad):
    """One of them would make the whole figure NaN; what was seen before and after counts as it did."""
    domain, vectors = draw(10), draw(6, seed=1)
    broken = vectors.clone()
    broken[1, 2] = broken[4, 0] = bad
    coverage = DomainCoverage(domain, block=2)
    coverage.update(vectors[:3])
    message = "2 of 6 vectors are not finite: encode their texts anew, in fp32, or leave them out with inside"
    with pytest.raises(ValueError, match=message):
        coverage.update(broken)
    with pytest.raises(ValueError, match="1 of 5 vectors are not finite"):
        coverage.update(broken, torch.tensor([True, False, True, True, True, True]))
    inside = broken.isfinite().all(dim=1)
    coverage.update(broken, inside)
    coverage.update(vectors[3:4])
    seen = torch.cat([vectors[:3], vectors[inside]])
    assert coverage.compute().item() == domain_coverage(domain, seen)
    with pytest.raises(ValueError, match="2 of 6 points of the domain are not finite: encode their texts"):
        DomainCoverage(broken)


def test_what_cannot_be_covered_is_refused():
    with pytest.raises(ValueError, match="at least one point, it is"):
        DomainCoverage(torch.zeros(0, 3))
    coverage = DomainCoverage(draw(4))
    with pytest.raises(ValueError, match="do not fit a domain of dimension 6: encode both with one encoder"):
        coverage.update(draw(3, dimension=5))
    coverage.update(draw(3), torch.zeros(3, dtype=torch.bool))
    with pytest.raises(ValueError, match="no vector inside the domain was seen"):
        coverage.compute()
