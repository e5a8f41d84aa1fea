"""The part of the examples against clipping written out, on one process and two."""

import itertools
from statistics import median_low

import lightning as L
import pytest
import torch
from plain_lightning import Numbers, assert_equal, federate, module, ten_clients, trainer, weights
from ranks import run_ranks

from examples.clip_to_median import ClipToMedian
from fedlight import FederatedLoop, FederatedWrapper


class Watch(L.Callback):
    """The shares that are logged."""

    def __init__(self):
        self.shares = []

    def on_train_epoch_end(self, trainer, pl_module):
        self.shares.append(float(trainer.callback_metrics["fed/clipped"]))


def test_each_step_is_clipped_to_the_median_of_the_visits_steps_so_far():
    made = []

    class Norms(ClipToMedian):
        def before_step(self, run, group, optimizer):
            super().before_step(run, group, optimizer)
            trained = [p for one in optimizer.param_groups for p in one["params"]]
            gradients = [p.grad for p in trained if p.grad is not None]
            made.append((len(self.norms), self.norms[-1], torch.nn.utils.get_total_norm(gradients).item()))

    watch = Watch()
    federate(rounds=2, parts=[Norms(0.9)], callbacks=[watch], local_steps=4)
    assert len(made) == 2 * 3 * 4
    clipped = 0
    for start in range(0, len(made), 4):
        visit = made[start : start + 4]
        for place, norm, left in visit:
            most = 0.9 * median_low([before for _, before, _ in visit[:place]])
            assert left == pytest.approx(min(norm, most), rel=1e-5)
            clipped += norm > most
    assert sum(watch.shares) / 2 == pytest.approx(clipped / 24)
    assert 0 < clipped < 24


def test_a_wide_bound_changes_nothing_and_clients_in_one_batch_are_refused():
    wide, plain = (weights(federate(parts=parts)[0]) for parts in ([ClipToMedian(1e9)], []))
    assert_equal(wide, plain)
    with pytest.raises(ValueError, match="set clients_at_once=1"):
        ClipToMedian().enter(None, type("Group", (), {"beside": object()}), None)


def test_a_step_without_a_loss_counts_for_no_median():
    part = ClipToMedian()
    part.norms = []
    part.before_step(None, None, torch.optim.SGD([torch.zeros(1)], lr=1.0))
    assert (part.norms, part.partial()) == ([], (0, 0))


@pytest.mark.slow
def test_two_processes_clip_alike(tmp_path):
    def run(size):
        def work(rank):
            watch, model = Watch(), module()
            loop = FederatedLoop(clients_per_round=4, local_steps=3, parts=[ClipToMedian(0.5)])
            settings = {"strategy": "client_parallel", "devices": size} if size > 1 else {}
            trainer(2, [loop, watch], **settings).fit(model, FederatedWrapper(Numbers(), ten_clients))
            return weights(model), watch.shares

        return run_ranks(size, work, tmp_path / str(size))

    ends = list(itertools.chain(run(1), run(2)))
    for state, shares in ends[1:]:
        assert_equal(state, ends[0][0])
        assert shares == ends[0][1]
