import numpy as np
import pytest

from fedlight.evaluation.alignment import alignment, unit


def test_by_hand():
    """Of twelve targets, spread over a half circle, the mapped vectors point to another one."""
    angles = np.arange(12) * np.pi / 24
    targets = np.stack([np.cos(angles), np.sin(angles)], axis=1)
    found = alignment(targets[[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 0]], targets)
    assert found.top1 == pytest.approx(10 / 12)
    assert found.recall10 == pytest.approx(11 / 12)  # before the own target of the last lie eleven others
    assert found.cosine == pytest.approx((10 + np.cos(np.pi / 24) + np.cos(11 * np.pi / 24)) / 12)


@pytest.mark.parametrize("block", [1, 4, 100])
def test_blocks_do_not_matter(block, monkeypatch):
    monkeypatch.setattr("fedlight.evaluation.alignment.BLOCK", block)
    rng = np.random.default_rng(0)
    targets = rng.normal(size=(30, 5))
    mapped = targets + rng.normal(size=(30, 5))
    similar = unit(mapped) @ unit(targets).T
    ranks = (similar > np.diag(similar)[:, None]).sum(axis=1)
    found = alignment(mapped, targets)
    assert found.top1 == (ranks == 0).mean()
    assert 0 < found.top1 < found.recall10 == (ranks < 10).mean()


def test_equal_targets_do_not_count_against_each_other_and_sizes_have_to_fit():
    targets = np.array([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    assert alignment(targets, targets).top1 == 1
    broken = np.where([[True], [False], [False]], np.nan, targets)
    assert alignment(broken, targets)[1:] == alignment(targets, broken)[1:] == (2 / 3, 2 / 3)
    with pytest.raises(ValueError, match=r"mapped \(2, 3\) and targets \(2, 2\) must be equal"):
        alignment(np.ones((2, 3)), np.ones((2, 2)))
