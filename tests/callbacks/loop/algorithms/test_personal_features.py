import numpy as np
import pytest
import torch
from plain_lightning import assert_equal, trainer
from stacked import furthest
from two_parts import weights

from fedlight import Ditto, FeatureSelectorModule, FedAvg, FederatedDataModule, FederatedLoop, Optimization
from fedlight.callbacks.logs import ClientAccuracy
from fedlight.federation.algorithms import FedBiscuit, FedRep, GlobalThenLocal, NearestGroups, SoftGroups

DIMENSION, CLIENTS = 8, [f"p{i}" for i in range(8)]


class Pairs(FederatedDataModule):
    """Pairs of vectors; the last three of eight clients prefer what the others do not, along one direction."""

    def setup(self, stage):
        generator = torch.Generator().manual_seed(0)
        direction = torch.randn(DIMENSION, generator=generator)
        self.features = torch.randn(8 * 40, 2, DIMENSION, generator=generator)
        better = ((self.features[:, 1] - self.features[:, 0]) @ direction > 0).long()
        self.labels = torch.where(torch.arange(8 * 40) < 5 * 40, better, 1 - better)
        self.train_set = self.val_set = self.test_set = range(8 * 40)
        rows = {client: np.arange(40 * i, 40 * i + 40) for i, client in enumerate(CLIENTS)}
        self.client_indices = {client: own[:16] for client, own in rows.items()}
        self.val_client_indices = {client: own[16:20] for client, own in rows.items()}
        self.test_client_indices = {client: own[20:] for client, own in rows.items()}

    def collate(self, examples):
        return {"features": self.features[list(examples)], "labels": self.labels[list(examples)]}


def train(algorithm, at_once=1, num_adapters=1, rounds=8):
    """Return the module, the loop and the accuracy of what each client has of its own."""
    module = FeatureSelectorModule(
        DIMENSION, hidden=6, num_adapters=num_adapters, optimizer=Optimization(name="SGD"), lr=0.3, seed=2
    )
    loop = FederatedLoop(algorithm, clients_per_round=8, local_steps=4, clients_at_once=at_once)
    own_models = num_adapters == 1
    accuracy = ClientAccuracy(own_models=own_models)
    run = trainer(rounds, [loop, accuracy], limit_val_batches=0 if own_models else 1.0)
    run.fit(module, datamodule=Pairs(batch_size=8))
    if own_models:
        return module, loop, accuracy.summary["own/client_mean"]
    run.test(module, datamodule=run.datamodule, verbose=False)
    return module, loop, float(run.callback_metrics["test/own_client_mean"])


ONE = {
    "GlobalThenLocal": lambda: GlobalThenLocal(4, "normalized"),
    "Ditto": lambda: Ditto(0.1, weighting="normalized"),
    "FedRep": lambda: FedRep(weighting="normalized"),
    "FedPer": lambda: FedRep(together=True, weighting="normalized"),
}
SEVERAL = {
    "nearest": lambda: FedBiscuit(0, 2, NearestGroups(), "normalized", group_by="own"),
    "soft": lambda: FedBiscuit(0, 1, SoftGroups(), "normalized", group_by="own"),
}


@pytest.fixture(scope="module")
def one_for_all(tmp_path_factory):
    """Accuracy of a single model, which suits five of eight clients."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("one"))
        return train(FedAvg("normalized"))[2]


@pytest.mark.filterwarnings("ignore:The 'val_dataloader' does not have many workers")
@pytest.mark.parametrize("name", [*ONE, *SEVERAL])
def test_clients_that_contradict_each_other_gain_and_share_batches_without_a_difference(
    name, one_for_all, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    make, number = (ONE | SEVERAL)[name], 2 if name in SEVERAL else 1
    module, loop, own = train(make(), 1, number)
    assert one_for_all < 0.7
    assert own > one_for_all + 0.15
    beside, other, _ = train(make(), 8, number)
    assert furthest(weights(beside), weights(module)) < 1e-4
    for client in CLIENTS:
        kept = loop.own_state(client)
        if kept is not None:
            assert furthest(other.own_state(client), kept) < 1e-4
    if name in SEVERAL:
        groups = loop.algorithm.groups
        assert {groups[client] for client in CLIENTS[:5]} != {groups[client] for client in CLIENTS[5:]}
        assert len({groups[client] for client in CLIENTS[:5]}) == 1
        assert groups == other.algorithm.groups
    else:
        assert all(loop.own_state(client) is not None for client in CLIENTS)


def test_only_the_last_layer_is_a_client_s_own_under_fedrep(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    module, loop, _ = train(FedRep(), rounds=1)
    assert {*loop.own_state("p0")} == {"heads.default.head.weight"}
    start = weights(FeatureSelectorModule(DIMENSION, hidden=6, seed=2))
    own = "heads.default.head.weight"
    assert_equal({own: weights(module)[own]}, {own: start[own]})
    with pytest.raises(ValueError, match="names all 1 trained parameters"):
        linear = FeatureSelectorModule(DIMENSION, hidden=0)
        trainer(1, [FederatedLoop(FedRep(), clients_per_round=2)], limit_val_batches=0).fit(linear, Pairs())
