"""Federated runs under a budget of privacy, which may stop early."""

import lightning as L
from plain_lightning import Metrics, Numbers, module, ten_clients, trainer, weights

from fedlight.callbacks.loop.federated_loop import FederatedLoop
from fedlight.datamodules.federated.by_client import FederatedWrapper


class StopsAfter(L.Callback):
    """Ends the run after some of its planned rounds."""

    def __init__(self, rounds):
        self.rounds = rounds

    def on_train_epoch_end(self, trainer, pl_module):
        if trainer.current_epoch + 1 == self.rounds:
            trainer.should_stop = True


def budget(rounds, saved=None, ckpt=None, settings=None, stops_after=None, **loop):
    """Train; return the module's weights, the loop and the logged values of each round."""
    made = FederatedLoop(clients_per_round=3, local_steps=2, **loop)
    watch, model = Metrics("epsilon", "delta"), module()
    fitted = trainer(rounds, [made, watch, StopsAfter(stops_after)], **(settings or {}))
    clients = FederatedWrapper(Numbers(), ten_clients)
    fitted.fit(model, clients, ckpt_path=ckpt, weights_only=True if ckpt else None)
    if saved is not None:
        fitted.save_checkpoint(saved)
    return weights(model), made, watch.rounds
