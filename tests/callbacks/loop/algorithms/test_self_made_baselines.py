from dataclasses import replace

import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from plain_lightning import Numbers, assert_equal, module, ten_clients, weights
from synthesizing import Batches, Synthesizing, run

from fedlight import FedAvg, FederatedWrapper, LocalOnly
from fedlight.federation.algorithms.self_made import FedMIT, LocalSelfGeneration

EVERYONE = [*ten_clients(None)]


class Fixed(Synthesizing):
    """Makes the same whatever the model and the round, and keeps all of it; who sees ``owned`` has it from the start."""

    def __init__(self, owned=False, **kwargs):
        super().__init__(number=5, keep=5, **kwargs)
        self.owned = owned

    def setup(self, stage):
        super().setup(stage)
        if self.owned:
            self.synthesize(0, EVERYONE, module(dropout=0.0))

    def synthesize(self, round_idx, client_ids, model):
        super().synthesize(0, client_ids, module(dropout=0.0))

    def _as(self, split):
        return "mixed" if self.owned else split

    def num_batches(self, client_id, split="train"):
        return super().num_batches(client_id, self._as(split))

    def batches(self, visit, round_idx):
        return super().batches(replace(visit, split=self._as(visit.split)), round_idx)


@pytest.mark.parametrize("local_steps", [2, None])
def test_fedmit_is_fedavg_over_clients_who_own_the_mixed_rows(local_steps):
    """Without dropout, which is drawn by the kind of data that a visit is on."""
    settings = {"rounds": 3, "local_steps": local_steps}
    mixed, loop, _ = run(FedMIT(), model=module(dropout=0.0), data=Fixed(), **settings)
    owned, plain, _ = run(FedAvg(), model=module(dropout=0.0), data=Fixed(owned=True), **settings)
    assert_equal(weights(mixed), weights(owned))
    assert [row["steps"] for row in loop.visit_records] == [row["steps"] for row in plain.visit_records]
    assert [row["split"] for row in loop.visit_records] == ["mixed"] * 3
    examples = {row["client"]: row["examples"] for row in loop.visit_records}
    assert examples == {client: loop.clients[client].num_examples + 5 for client in examples}


def test_without_any_candidate_fedmit_is_fedavg_bit_for_bit():
    mixed, _, _ = run(FedMIT("normalized"), rounds=3, data=Synthesizing(without=EVERYONE))
    plain, _, _ = run(FedAvg("normalized"), rounds=3)
    assert_equal(weights(mixed), weights(plain))


def test_fedmits_candidates_are_made_and_chosen_by_the_global_model_before_any_is_trained_on():
    starts = []
    watch = LambdaCallback(on_train_epoch_start=lambda _, model: starts.append(weights(model)))
    _, _, data = run(FedMIT(), rounds=2, callbacks=[watch])
    kinds = [entry[0] for entry in data.diary]
    assert kinds == (["synthesize"] + ["choose"] * 3 + ["read"] * 6) * 2
    for place, entry in enumerate(entry for entry in data.diary if entry[0] != "read"):
        assert_equal(entry[-1], starts[place // 4])


def test_a_clients_own_model_makes_and_chooses_what_it_trains_on():
    own_before, own_after = {}, {}

    class Own(Batches):
        def on_train_epoch_start(self, trainer, pl_module):
            for client in self.loop.clients:
                own_before[self.loop.rounds_done, client] = self.loop.own_state(client) or weights(pl_module)

        def on_train_epoch_end(self, trainer, pl_module):
            own_after[self.loop.rounds_done - 1] = weights(pl_module)

    start = weights(module())
    model, loop, data = run(LocalSelfGeneration(), rounds=3, callbacks=[Own], clients_per_round=10)
    assert_equal(weights(model), start)
    for state in own_after.values():
        assert_equal(state, start)
    made = [entry for entry in data.diary if entry[0] == "synthesize"]
    assert [(number, clients) for _, number, clients, _ in made] == [
        (number, [client]) for number in range(3) for client in sorted(EVERYONE)
    ]
    for _, round_idx, (client,), seen in made:
        assert_equal(seen, own_before[round_idx, client])
    assert not torch.equal(made[-1][3]["net.0.weight"], made[-2][3]["net.0.weight"])
    chosen = [entry for entry in data.diary if entry[0] == "choose"]
    for (_, _, (client,), seen), (_, who, by) in zip(made, chosen, strict=True):
        assert client == who
        assert_equal(seen, by)
    assert all(row["bytes_up"] == row["bytes_down"] == 0 for row in loop.visit_records)
    assert {row["split"] for row in loop.visit_records} == {"mixed"}


def test_without_any_candidate_it_is_local_training_alone():
    alone = run(LocalOnly(), rounds=3)[1]
    generating = run(LocalSelfGeneration(), rounds=3, data=Synthesizing(without=EVERYONE))[1]
    for client in EVERYONE:
        state = alone.own_state(client)
        assert (state is None) == (generating.own_state(client) is None)
        if state is not None:
            assert_equal(state, generating.own_state(client))


@pytest.mark.parametrize("algorithm", [FedMIT, LocalSelfGeneration])
def test_data_that_cannot_make_candidates_are_refused(algorithm):
    with pytest.raises(ValueError, match=f"{algorithm.__name__} has clients make training data"):
        run(algorithm(), data=FederatedWrapper(Numbers(), ten_clients))
