import numpy as np
import pytest
from lightning.pytorch.callbacks import StochasticWeightAveraging
from plain_lightning import Numbers, assert_equal, federate, module, ten_clients, trainer, weights

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
    settings = dict(settings)
    callbacks = [FederatedLoop(clients_per_round=3, local_steps=2), *settings.pop("callbacks", [])]
    model = module()
    before = weights(model)
    with pytest.raises(ValueError, match=message):
        trainer(settings.pop("rounds", 2), callbacks, **settings).fit(
            model, FederatedWrapper(Numbers(), ten_clients)
        )
    assert_equal(before, weights(model))


def test_more_clients_per_round_than_clients_is_refused():
    with pytest.raises(ValueError, match=r"clients_per_round=11 is more than the 10 clients"):
        federate(clients_per_round=11)


def test_an_empty_client_is_refused():
    with pytest.raises(ValueError, match="'empty'"):
        federate(clients=lambda d: ten_clients(d) | {"empty": np.arange(0)})


def test_a_datamodule_without_clients_is_refused_with_the_remedy():
    with pytest.raises(ValueError, match="FederatedWrapper"):
        trainer(1, [FederatedLoop()]).fit(module(), Numbers())


@pytest.mark.parametrize("setting", [{"clients_per_round": 0}, {"local_steps": 0}])
def test_nonsense_numbers_are_refused(setting):
    with pytest.raises(ValueError, match="must be at least 1"):
        FederatedLoop(**setting)


def test_a_checkpoint_of_central_training_is_refused_on_resume(tmp_path):
    t = trainer(1)
    t.fit(module(), Numbers())
    t.save_checkpoint(tmp_path / "central.ckpt")
    t = trainer(2, [FederatedLoop(clients_per_round=3, local_steps=2)])
    with pytest.raises(ValueError, match="not of a federated run"):
        t.fit(module(), FederatedWrapper(Numbers(), ten_clients), ckpt_path=tmp_path / "central.ckpt")


def test_a_used_loop_is_not_taken_for_a_new_run():
    _, loop = federate(rounds=1)
    with pytest.raises(ValueError, match="make a new one"):
        trainer(1, [loop]).fit(module(), FederatedWrapper(Numbers(), ten_clients))
