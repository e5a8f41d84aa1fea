import numpy as np
import pytest
from lightning.pytorch.callbacks import LambdaCallback, StochasticWeightAveraging
from plain_lightning import Numbers, assert_equal, federate, module, ten_clients, trainer, weights
from refusals import refusal

from fedlight import FederatedLoop, FederatedWrapper


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_steps": 5}, "trainer.max_steps=5 would cut a round"),
        ({"limit_train_batches": 0.5}, "trainer.limit_train_batches=0.5 would cut"),
        ({"limit_train_batches": 3}, "trainer.limit_train_batches=3 would cut"),
        ({"overfit_batches": 2}, "would cut a round"),
        ({"val_check_interval": 0.5}, "use check_val_every_n_epoch"),
        ({"fast_dev_run": True}, "would cut a round"),
        ({"rounds": -1}, "give the number of rounds"),
        ({"callbacks": [StochasticWeightAveraging(0.1)]}, "averages weights across clients"),
    ],
)
def test_settings_that_would_cut_a_round_are_refused_before_any_work(settings, message):
    model, own = module(), {name: settings[name] for name in ("rounds", "callbacks") if name in settings}
    before = weights(model)
    with refusal(message):
        federate(model=model, **own, settings={n: value for n, value in settings.items() if n not in own})
    assert_equal(before, weights(model))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: federate(clients_per_round=11), r"clients_per_round=11 is more than the 10 clients"),
        (lambda: federate(clients=lambda d: ten_clients(d) | {"empty": np.arange(0)}), "'empty'"),
        (lambda: trainer(1, [FederatedLoop()]).fit(module(), Numbers()), "FederatedWrapper"),
        (lambda: trainer(1, [federate(1)[1]]).fit(module(), wrapped()), "make a new one"),
        (lambda: FederatedLoop(clients_per_round=0), "clients_per_round=0 must be at least 1"),
        (lambda: FederatedLoop(local_steps=0), "local_steps=0 must be at least 1"),
    ],
)
def test_what_cannot_be_meant_is_refused(make, message):
    with refusal(message):
        make()


def wrapped():
    return FederatedWrapper(Numbers(), ten_clients)


@pytest.mark.parametrize("inside", [False, True])
def test_a_checkpoint_of_central_training_is_refused_on_resume(inside, tmp_path):
    """Also one from the middle of its epoch, where a validation is over."""
    file = tmp_path / "central.ckpt"
    save = LambdaCallback(on_validation_end=lambda trainer, _: trainer.save_checkpoint(file))
    central = trainer(1, [save] if inside else [])
    central.fit(module(), Numbers())
    if not inside:
        central.save_checkpoint(file)
    t = trainer(2, [FederatedLoop(clients_per_round=3, local_steps=2)])
    with refusal("not of a federated run"):
        t.fit(module(), wrapped(), ckpt_path=file, weights_only=True)
