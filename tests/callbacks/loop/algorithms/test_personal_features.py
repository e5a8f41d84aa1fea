import numpy as np
import pytest
import torch
from plain_lightning import assert_equal, trainer
from stacked import furthest
from two_parts import weights

from fedlight import Ditto, FeatureSelectorModule, FederatedDataModule, FederatedLoop, Optimization
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
        self.train_set = self.val_set = range(8 * 40)
        rows = {client: np.arange(40 * i, 40 * i + 40) for i, client in enumerate(CLIENTS)}
        self.client_indices = {client: own[:16] for client, own in rows.items()}
        self.val_client_indices = {client: own[16:] for client, own in rows.items()}

    def collate(self, examples):
        return {"features": self.features[list(examples)], "labels": self.labels[list(examples)]}


def train(algorithm, at_once=1, num_adapters=1, rounds=4):
    """Return the module and the loop."""
    module = FeatureSelectorModule(
        DIMENSION, hidden=6, num_adapters=num_adapters, optimizer=Optimization(name="SGD"), lr=0.3, seed=2
    )
    loop = FederatedLoop(algorithm, clients_per_round=8, local_steps=4, clients_at_once=at_once)
    run = trainer(rounds, [loop], limit_val_batches=0 if num_adapters == 1 else 1.0)
    run.fit(module, datamodule=Pairs(batch_size=8))
    return module, loop


KINDS = {
    "GlobalThenLocal": (lambda: GlobalThenLocal(2, "normalized"), 1),
    "Ditto": (lambda: Ditto(0.1, weighting="normalized"), 1),
    "FedRep": (lambda: FedRep(weighting="normalized"), 1),
    "FedPer": (lambda: FedRep(together=True, weighting="normalized"), 1),
    "nearest": (lambda: FedBiscuit(0, 2, NearestGroups(), "normalized", group_by="own"), 2),
    "soft": (lambda: FedBiscuit(0, 1, SoftGroups(), "normalized", group_by="own"), 2),
}


@pytest.mark.filterwarnings("ignore:The 'val_dataloader' does not have many workers")
@pytest.mark.parametrize(("make", "adapters"), KINDS.values(), ids=KINDS)
def test_clients_share_batches_without_a_difference(make, adapters):
    (module, loop), (beside, other) = (train(make(), at_once, adapters) for at_once in (1, 8))
    assert furthest(weights(beside), weights(module)) < 1e-4
    for client in CLIENTS:
        kept = loop.own_state(client)
        assert (kept is None) == (adapters > 1)
        assert kept is None or furthest(other.own_state(client), kept) < 1e-4
    if adapters > 1:
        groups = loop.algorithm.groups
        assert {groups[client] for client in CLIENTS[:5]}.isdisjoint(groups[c] for c in CLIENTS[5:])
        assert groups == other.algorithm.groups


def test_only_the_last_layer_is_a_client_s_own_under_fedrep():
    module, loop = train(FedRep(), rounds=1)
    assert {*loop.own_state("p0")} == {"heads.default.head.weight"}
    start = weights(FeatureSelectorModule(DIMENSION, hidden=6, seed=2))
    own = "heads.default.head.weight"
    assert_equal({own: weights(module)[own]}, {own: start[own]})
    with pytest.raises(ValueError, match="names all 1 trained parameters"):
        linear = FeatureSelectorModule(DIMENSION, hidden=0)
        trainer(1, [FederatedLoop(FedRep(), clients_per_round=2)], limit_val_batches=0).fit(linear, Pairs())
