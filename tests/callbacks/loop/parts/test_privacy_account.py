"""What a run says of its privacy: epsilon at the delta that was asked for, and that delta beside it."""

import math
from types import SimpleNamespace

import lightning as L
import pytest
from plain_lightning import federate

from fedlight.callbacks.loop.parts.privacy_account import PrivacyAccount
from fedlight.federation.channel import Wire
from fedlight.federation.client import Identity
from fedlight.federation.codecs import Quantize
from fedlight.federation.privacy import ClipAndNoise, PrivateMean, gaussian_epsilon, sampled_epsilon


class Logged(L.Callback):
    """What is logged of privacy after each round."""

    def __init__(self):
        self.rounds = []

    def on_train_epoch_end(self, trainer, pl_module):
        metrics = trainer.callback_metrics
        self.rounds.append(
            {name: float(metrics[name]) for name in metrics if "epsilon" in name or "delta" in name}
        )


@pytest.mark.parametrize("delta", [1e-2, 1e-8])
def test_both_epsilons_are_logged_at_their_own_delta(delta):
    watch = Logged()
    federate(
        rounds=2,
        callbacks=[watch],
        aggregation=PrivateMean(1.0, 4.0, delta=delta),
        channel=Wire(up=[ClipAndNoise(1.0, 8.0, delta=delta / 2), Quantize("int8")]),
        clients_per_round=3,
    )
    for number, found in enumerate(watch.rounds, start=1):
        expected = {
            "fed/epsilon": sampled_epsilon(4.0, delta, [(3, 10)] * number),
            "fed/epsilon_local": gaussian_epsilon(8.0, delta / 2, number),
            "fed/delta": delta,
            "fed/delta_local": delta / 2,
        }
        assert found == pytest.approx(expected, rel=1e-5)
    assert watch.rounds[0]["fed/epsilon"] != pytest.approx(sampled_epsilon(4.0, 1e-5, [(3, 10)]), rel=0.01)


def test_a_run_without_privacy_says_nothing_of_it():
    watch = Logged()
    federate(rounds=1, callbacks=[watch], channel=Wire(up=[Quantize("int8")]))
    assert watch.rounds == [{}]
    assert not PrivacyAccount(None, Identity()).is_private


def test_a_delta_that_would_let_a_client_be_given_away_is_refused():
    """Ten clients: one of them whole, drawn by lot, would be private at a delta of 0.1."""
    message = "PrivateMean: delta=0.1 is not below one over the 10 clients.*: set it to 1e-02 or less"
    with pytest.raises(ValueError, match=message):
        federate(rounds=1, aggregation=PrivateMean(1.0, 1.0, delta=0.1))
    account = PrivacyAccount(None, Wire(up=[ClipAndNoise(1.0, 1.0)]))
    account.meet(SimpleNamespace(clients=range(99_999)))
    with pytest.raises(ValueError, match="Wire: delta=1e-05 is not below one over the 100,000 clients"):
        account.meet(SimpleNamespace(clients=range(100_000)))


def test_only_noise_on_the_way_up_has_a_delta():
    assert Wire(up=[ClipAndNoise(1.0, 1.0, delta=1e-7), Quantize("int8")]).delta == 1e-7
    assert Wire(up=[Quantize("int8")]).delta is None
    assert Wire().delta is None


def test_without_noise_there_is_no_epsilon():
    account = PrivacyAccount(PrivateMean(1.0, 0.0), Identity())
    assert account.after(2, 10) == {"epsilon": math.inf, "delta": 1e-5}
