import numpy as np
import pytest
import torch
from stacked import Points, fit
from two_parts import Recorder, TwoParts

from fedlight.callbacks.loop.parts.dpsgd import DPSGD
from fedlight.datamodules.federated.rounds import PooledSampler, RoundPlan, draw_batches
from fedlight.federation.client import Visit


def test_a_pass_holds_every_example_at_most_once_in_full_batches_and_the_next_has_another_order():
    indices = np.arange(100, 123)
    batches = draw_batches(indices, num_batches=4, batch_size=5, seed=3)
    drawn = [i for batch in batches for i in batch]
    assert len(drawn) == len(set(drawn)) == 20
    assert set(drawn) <= set(indices.tolist())
    assert all(len(batch) == 5 for batch in batches)
    further = draw_batches(indices, num_batches=8, batch_size=5, seed=3)
    assert len({*sum(further[4:], [])}) == 20
    assert further[:4] == batches != further[4:]  # each pass is shuffled anew


@pytest.mark.parametrize("lengths", [None, np.arange(20)])
@pytest.mark.parametrize("passes", [1, 3])
def test_a_visit_of_whole_passes_sees_every_example_in_each(lengths, passes):
    plan = RoundPlan({"a": np.arange(20), "b": np.arange(16)}, batch_size=8, seed=0, lengths=lengths)
    for client, sizes in {"a": [4, 8, 8], "b": [8, 8]}.items():
        number = plan.num_batches(client)
        batches = plan.batches(Visit(client, passes * number, whole_passes=True), round_idx=0)
        for start in range(0, passes * number, number):
            of_pass = batches[start : start + number]
            assert sorted(map(len, of_pass)) == sizes
            assert sorted(sum(of_pass, [])) == list(range(sum(sizes)))
    # without a remainder they are the same
    visits = [Visit("b", 4, whole_passes=whole) for whole in (True, False)]
    assert plan.batches(visits[0], 0) == plan.batches(visits[1], 0)


def test_a_client_smaller_than_a_batch_gives_all_that_it_has():
    batches = draw_batches(np.array([4, 9]), 3, batch_size=8, seed=0)
    assert [sorted(batch) for batch in batches] == [[4, 9]] * 3


def test_bucketing_keeps_batches_of_similar_length():
    lengths = np.random.default_rng(0).integers(5, 100, size=320)
    indices = np.arange(320)

    def padded(batches):
        total = sum(lengths[batch].max() * len(batch) for batch in batches)
        return 1 - lengths[[i for b in batches for i in b]].sum() / total

    plain = draw_batches(indices, 10, 32, seed=0)
    bucketed = draw_batches(indices, 10, 32, seed=0, lengths=lengths)
    assert sorted(sum(plain, [])) == sorted(sum(bucketed, []))
    assert padded(bucketed) < 0.1 < 0.4 < padded(plain)
    assert [lengths[b].mean() for b in bucketed] != sorted(lengths[b].mean() for b in bucketed)


def test_the_batches_of_a_visit_follow_from_client_and_split_and_the_round_that_asked_it():
    plan = RoundPlan({"a": np.arange(10), "b": np.arange(10, 20)}, batch_size=2, seed=0)
    plan.further["b", "again"] = np.arange(10, 20)

    def batches(round_idx, *visits):
        plan.set_visits(visits, round_idx)
        return list(plan.sampler())

    together = batches(4, Visit("a", 3, asked=2), Visit("b", 2, asked=4))
    assert together == batches(2, Visit("a", 3)) + batches(4, Visit("b", 2))
    others = batches(5, Visit("b", 2)), batches(4, Visit("b", 2, split="again"))
    assert together[3:] not in others


def test_pooled_order_is_new_in_each_epoch_and_repeatable():
    sampler = PooledSampler(20, batch_size=4, seed=0)
    first = list(sampler)
    sampler.sampler.set_epoch(1)
    second = list(sampler)
    sampler.sampler.set_epoch(0)
    assert list(sampler) == first != second
    assert len(sampler) == 5


def test_neighbours_stay_together_in_visits_and_in_pooled_batches():
    lengths = np.repeat([9, 5, 7, 5, 8, 6], 2)
    plan = RoundPlan({"u": np.arange(12)}, batch_size=4, seed=0, lengths=lengths, together=2)
    plan.set_visits([Visit("u", 5)], round_idx=0)
    pooled = list(PooledSampler(12, 4, seed=0, lengths=lengths, together=2))
    for batch in [*plan.sampler(), *pooled]:
        assert len(batch) == 4
        assert [index + 1 for index in batch[::2]] == batch[1::2]
        assert all(index % 2 == 0 for index in batch[::2])
    assert sorted(sum(pooled, [])) == list(range(12))


def test_a_batch_of_a_group_has_the_batches_of_its_visits_one_after_the_other():
    plan = RoundPlan({"a": np.arange(6), "b": np.arange(6, 9), "c": np.arange(9, 20)}, batch_size=4, seed=0)
    a, b, c = (Visit(name, 2) for name in "abc")
    plan.set_groups([(a, b), (c,)], round_idx=1)
    found = [plan.batches(visit, 1) for visit in (a, b, c)]
    sampler = plan.sampler()
    assert len(sampler) == 4
    assert list(sampler) == [found[0][0] + found[1][0], found[0][1] + found[1][1], *found[2]]
    assert [*plan.counts] == [[4, 3], [4, 3]]  # a group of one visit has no counts
    assert list(sampler) == list(sampler)
    assert len(plan.counts) == 2  # a pass that begins anew drops those of the pass before


def test_the_examples_of_a_group_are_asked_for_when_it_begins():
    plan = RoundPlan({"a": np.arange(4), "b": np.arange(4, 8)}, batch_size=2, seed=0)
    visits = [[Visit(name, 1, split) for name in "ab"] for split in ("train", "synthetic")]
    plan.set_groups([*map(tuple, visits)], round_idx=0)
    batches = iter(plan.sampler())
    next(batches)
    plan.further["a", "synthetic"], plan.further["b", "synthetic"] = np.array([8, 9]), np.array([10, 11])
    last = next(batches)
    assert (sorted(last[:2]), sorted(last[2:])) == ([8, 9], [10, 11])


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("together", [1, 2])
@pytest.mark.parametrize("examples", [2, 6, 8, 14, 20])
@pytest.mark.parametrize("wanted", [1, 3, 7])
def test_an_example_is_in_a_batch_of_each_pass_at_most(whole, together, examples, wanted):
    plan = RoundPlan({"a": np.arange(examples)}, batch_size=4, seed=0, together=together)
    visit = Visit("a", wanted, whole_passes=whole)
    most = 0
    for round_idx in range(30):
        batches = plan.batches(visit, round_idx)
        assert all(len({*batch}) == len(batch) for batch in batches)
        most = max(most, *np.bincount(np.concatenate(batches)))
    assert plan.passes(visit) == most


def test_batches_of_alike_lengths_come_back_after_the_run():
    class Long(Points):
        def setup(self, stage=None):
            super().setup(stage)
            self.train_lengths = np.arange(len(self.train_set))[::-1].copy()

    orders = []
    for data, parts in ((Long(), [DPSGD(1.0, 1.0)]), (Long(), [])):
        fit(TwoParts(), data, rounds=1, parts=parts)
        assert data.plan.lengths is data.train_lengths
        recorder = Recorder()
        fit(TwoParts(), data, rounds=1, callbacks=[recorder])
        orders.append([batch["x"] for _, batches in recorder.visits[0] for batch in batches])
    assert all(map(torch.equal, *orders))
