import pytest
from lightning.pytorch.callbacks import LambdaCallback
from plain_lightning import Numbers, federate, module, ten_clients, trainer
from refusals import refusal

from fedlight import FederatedLoop, FederatedWrapper


@pytest.mark.parametrize(
    ("make", "message"),
    [
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
