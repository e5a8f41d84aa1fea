import lightning as L
import torch
from plain_lightning import Regression, assert_equal, federate, weights


class Told(L.Callback):
    """Notes when it is called, with the weights and the random stream of that moment."""

    def __init__(self):
        self.seen = []

    def on_visit_start(self, client_id):
        self.seen.append((client_id, weights(self.module), torch.get_rng_state()))

    def on_train_epoch_start(self, trainer, pl_module):
        self.module = pl_module
        self.seen.append(("round", weights(pl_module), None))


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

    _, loop = federate(2, model=Model(), callbacks=[Callback()])
    visited = [entry[1] for entry in order if entry[0] == "module"]
    assert len(visited) == 6
    assert visited[3:] == [row["client"] for row in loop.visit_records]
    told = [[("module", client), ("callback", client), "batch", "batch"] for client in visited]
    assert order == sum(told, [])


def test_parameters_are_the_global_ones_and_streams_are_the_clients_own():
    told = Told()
    federate(2, callbacks=[told])
    for start in (0, 4):
        (_, given, _), *visits = told.seen[start : start + 4]
        for _, found, _ in visits:
            assert_equal(found, given)
    streams = [stream for _, _, stream in told.seen if stream is not None]
    assert len({stream.numpy().tobytes() for stream in streams}) == 6
