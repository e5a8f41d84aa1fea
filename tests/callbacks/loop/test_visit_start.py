import lightning as L
import torch
from plain_lightning import Numbers, Regression, assert_equal, module, ten_clients, trainer, weights

from fedlight import FedAvg, FederatedLoop, FederatedWrapper


class Told(L.Callback):
    """Notes when it is called, with the weights and the random stream of that moment."""

    def __init__(self):
        self.seen = []

    def on_visit_start(self, client_id):
        self.seen.append((client_id, weights(self.module), torch.get_rng_state()))

    def on_train_epoch_start(self, trainer, pl_module):
        self.module = pl_module
        self.seen.append(("round", weights(pl_module), None))


class Carries(Regression):
    """Adds to each loss how far the mean of its features is from that of the batch before."""

    before, resets = None, True

    def on_visit_start(self, client_id):
        if self.resets:
            self.before = None

    def training_step(self, batch, batch_idx):
        hidden = self.net[:2](batch[0]).mean(0)
        extra = 0.0 if self.before is None else (hidden - self.before).square().sum()
        self.before = hidden.detach()
        return super().training_step(batch, batch_idx) + extra


class Reversed(FedAvg):
    """The clients of a round in the other order."""

    def plan(self, round_idx, cohort, num_batches):
        return super().plan(round_idx, cohort, num_batches)[::-1]


def fitted(model, *callbacks, algorithm=None):
    loop = FederatedLoop(algorithm, clients_per_round=3, local_steps=2)
    trainer(2, [loop, *callbacks]).fit(model, FederatedWrapper(Numbers(), ten_clients))
    return model, loop


def test_module_and_callbacks_are_told_before_the_first_batch_of_each_visit():
    order = []

    class Model(Regression):
        def on_visit_start(self, client_id):
            order.append(("module", client_id))

        def training_step(self, batch, batch_idx):
            order.append("batch")
            return super().training_step(batch, batch_idx)

    class Callback(L.Callback):
        def on_visit_start(self, client_id):
            order.append(("callback", client_id))

    torch.manual_seed(0)
    _, loop = fitted(Model(), Callback())
    visited = [entry[1] for entry in order if entry[0] == "module"]
    assert len(visited) == 6
    assert visited[3:] == [row["client"] for row in loop.visit_records]
    told = [[("module", client), ("callback", client), "batch", "batch"] for client in visited]
    assert order == sum(told, [])


def test_parameters_are_the_global_ones_and_streams_are_the_clients_own():
    told = Told()
    fitted(module(), told)
    for start in (0, 4):
        (_, given, _), *visits = told.seen[start : start + 4]
        for _, found, _ in visits:
            assert_equal(found, given)
    streams = [stream for _, _, stream in told.seen if stream is not None]
    assert len({stream.numpy().tobytes() for stream in streams}) == 6


def test_what_is_reset_does_not_pass_from_client_to_client():
    """Then their order does not matter; without a reset it does."""

    def both(resets):
        for algorithm in (FedAvg(), Reversed()):
            torch.manual_seed(0)
            model = Carries()
            model.resets = resets
            yield weights(fitted(model, algorithm=algorithm)[0])

    torch.testing.assert_close(*both(resets=True), rtol=0, atol=1e-7)  # one rounding
    forward, backward = both(resets=False)
    assert max((forward[name] - backward[name]).abs().max() for name in forward) > 0.01
