import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from plain_lightning import Numbers, Regression, assert_equal, federate, module, ten_clients, trainer, weights
from torch import nn
from torch.utils.data import DataLoader
from written_out import assert_close, combined, local, recorded

from fedlight import FedAvg, FederatedLoop, FederatedWrapper


def test_training_learns_and_records_every_visit():
    model, loop = federate(rounds=30, clients_per_round=5, local_steps=4, model=module(dropout=0.0))
    data = Numbers()
    data.setup("fit")
    loss = nn.functional.mse_loss(model.net(data.data.tensors[0]), data.data.tensors[1])
    assert loss < 0.5  # 4 for the zero model
    assert loop.rounds_done == 30
    assert [r["steps"] for r in loop.visit_records] == [4] * 5
    assert {r["round"] for r in loop.visit_records} == {29}
    record = loop.visit_records[0]
    assert record["examples"] == loop.clients[record["client"]].num_examples
    assert record["bytes_down"] == record["bytes_up"] > 4 * sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("optimizer", ["AdamW", "SGD"])
def test_one_client_with_all_the_data_is_plain_training_bit_for_bit(optimizer):
    """K steps of AdamW in one round; with SGD, which keeps nothing, any number of rounds."""
    rounds = 1 if optimizer == "AdamW" else 3
    seen = []

    class Recorder(L.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            seen.append((torch.get_rng_state(), batch))

    federated, _ = federate(
        rounds,
        clients=lambda dataset: {"only": np.arange(120)},
        model=module(optimizer=optimizer),
        callbacks=[Recorder()],
        clients_per_round=1,
        local_steps=12,
    )

    class Replay(L.Callback):
        def on_fit_start(self, trainer, pl_module):
            if optimizer == "AdamW":  # on the kernel that the loop chooses
                trainer.optimizers[0].param_groups[0]["fused"] = True

        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            torch.set_rng_state(seen[trainer.global_step][0])

    plain = module(optimizer=optimizer)
    batches = DataLoader([batch for _, batch in seen], batch_size=None)
    data = Numbers()
    data.setup("fit")
    trainer(1, [Replay()]).fit(plain, batches, data.val_dataloader())
    assert len(seen) == 12 * rounds
    assert_equal(weights(federated), weights(plain))


def test_order_of_the_clients_in_the_data_does_not_matter():
    def shuffled(dataset):
        return dict(reversed(ten_clients(dataset).items()))

    assert_equal(weights(federate()[0]), weights(federate(clients=shuffled)[0]))


@pytest.mark.parametrize("weighting", ["unbiased", "normalized", "uniform"])
def test_a_round_equals_a_loop_written_out(weighting):
    """Plain SGD without dropout, each client trained by hand from the same start on the same batches."""
    start, found, (batches,) = recorded(rounds=1, algorithm=FedAvg(weighting))
    movement = combined(start, {client: local(start, own) for client, own in batches.items()}, weighting)
    assert_close(found, {name: value + movement[name] for name, value in start.items()})


def test_every_visit_starts_from_the_global_state_with_a_fresh_optimizer():
    starts, moments = [], []

    class Watch(L.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if batch_idx % 2 == 0:
                starts.append(weights(pl_module))
                moments.append(len(trainer.optimizers[0].state))

    federate(2, callbacks=[Watch()])
    assert moments == [0] * 6
    assert_equal(starts[0], starts[2])
    assert_equal(starts[3], starts[5])
    assert not torch.equal(starts[0]["net.0.weight"], starts[3]["net.0.weight"])


def test_validation_sees_the_new_global_model():
    seen = []

    class Watch(L.Callback):
        def on_validation_start(self, trainer, pl_module):
            seen.append((trainer.global_step, weights(pl_module)))

        def on_train_epoch_end(self, trainer, pl_module):
            assert_equal(seen[-1][1], weights(pl_module))

    federate(2, callbacks=[Watch()], settings={"num_sanity_val_steps": 0})
    assert [steps for steps, _ in seen] == [6, 12]


def test_rounds_of_unequal_length_train_to_their_end():
    class Growing(FedAvg):
        def plan(self, round_idx, cohort, num_batches):
            return super().plan(round_idx, cohort, num_batches)[: 1 + round_idx]

    steps = []
    watch = LambdaCallback(on_train_epoch_end=lambda trainer, _: steps.append(trainer.global_step))
    _, loop = federate(3, algorithm=Growing(), callbacks=[watch])
    assert steps == [2, 6, 12]
    assert len(loop.visit_records) == 3


def test_a_pass_over_the_clients_data_is_the_default_work():
    _, loop = federate(rounds=1, clients_per_round=10, local_steps=None)
    assert {r["client"]: r["steps"] for r in loop.visit_records} == {
        name: -(-len(indices) // 4) for name, indices in ten_clients(None).items()
    }


def test_accumulation_never_mixes_two_clients():
    model, loop = federate(1, settings={"accumulate_grad_batches": 3})
    assert [r["steps"] for r in loop.visit_records] == [2, 2, 2]
    assert model.trainer.global_step == 6


def test_schedulers_step_once_a_round():
    class Halving(Regression):
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]

    class Told(FedAvg):
        def finish_visit(self, visiting, movement, work):
            told.append(work.lr)
            return super().finish_visit(visiting, movement, work)

    told = []
    federate(3, model=Halving(), algorithm=Told(), clients_per_round=2, local_steps=1)
    # The last visit of a round ends after the scheduler's step.
    assert told == [1.0, 1.0, 0.5, 0.5, 0.25, 0.25]


def test_estimated_steps_asked_early_do_not_pool_the_first_round():
    class Curious(Regression):
        def configure_optimizers(self):
            self.estimated = self.trainer.estimated_stepping_batches
            return super().configure_optimizers()

    model, _ = federate(2, model=Curious())
    assert model.estimated == 2 * 2  # rounds x steps of a visit, which is how far a schedule goes
    assert model.trainer.global_step == 2 * 3 * 2


def test_without_the_loop_the_same_wrapper_trains_centrally():
    t = trainer(1)
    t.fit(module(), FederatedWrapper(Numbers(), ten_clients))
    assert t.global_step == 30


def test_metrics_of_the_round_are_logged():
    model, loop = federate(2)
    logged = model.trainer.callback_metrics
    assert logged["fed/loss"].item() == pytest.approx(sum(r["loss"] for r in loop.visit_records) / 3)
    assert logged["fed/bytes_up"].item() == sum(r["bytes_up"] for r in loop.visit_records)


def test_a_run_whose_rounds_are_all_done_says_so(tmp_path, caplog):
    caplog.set_level("INFO")
    for ckpt_path in (None, tmp_path / "done.ckpt"):
        t = trainer(2, [FederatedLoop(clients_per_round=3, local_steps=2)], default_root_dir=tmp_path)
        t.fit(module(), FederatedWrapper(Numbers(), ten_clients), ckpt_path=ckpt_path, weights_only=True)
        assert ("all 2 rounds are done" in caplog.text) == (ckpt_path is not None)
        t.save_checkpoint(tmp_path / "done.ckpt")
    assert "raise trainer.max_epochs=2" in caplog.text
