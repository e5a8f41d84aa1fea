from contextlib import nullcontext

import lightning as L
import pytest
import torch
from fleets import make_fleet
from lightning.pytorch.callbacks import BackboneFinetuning, ModelCheckpoint, ModelPruning
from plain_lightning import Numbers, assert_equal, federate, seeded, ten_clients, trainer, weights
from refusals import refusal
from torch import nn
from torch.func import functional_call
from written_out import LR, assert_close, combined, doubled, recorded

from fedlight import Ditto, FedAvgM, FederatedLoop, FederatedWrapper, LocalOnly, Scaffold, Wire
from fedlight.callbacks.loop.checkpoint import HeldState
from fedlight.federation import ClientMemories, TopK


class Transfer(L.LightningModule):
    """A head that is trained from the start, on a backbone that may join."""

    def __init__(self):
        super().__init__()
        self.backbone = nn.Linear(4, 8)
        self.head = nn.Sequential(nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x):
        return self.head(self.backbone(x))

    def training_step(self, batch, batch_idx):
        return nn.functional.mse_loss(self(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", nn.functional.mse_loss(self(batch[0]), batch[1]))

    def configure_optimizers(self):
        return torch.optim.SGD(self.head.parameters(), lr=LR)


def transfer():
    return seeded(Transfer)


def unfreezing(epoch=2):
    """Joins with a tenth of the head's rate, which grows by half in each later round."""
    return BackboneFinetuning(epoch, lambda_func=lambda epoch: 1.5, backbone_initial_ratio_lr=0.1)


def rates(round_idx):
    """Of the two parts in a round; a part that is not there is not trained."""
    joined = {"backbone": 0.1 * LR * 1.5 ** (round_idx - 2)} if round_idx >= 2 else {}
    return {"head": LR, **joined}


def gradients(state, batch):
    leaves = {name: value.clone().requires_grad_() for name, value in state.items()}
    loss = nn.functional.mse_loss(functional_call(Transfer(), leaves, (batch[0],)), batch[1])
    return dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))


def written_out(state, rounds, rates, beta=0.0, scaffold=False):
    """The federation, with momentum ``beta`` at the server, and with SCAFFOLD's controls if asked for, in fp64."""
    zero = {name: torch.zeros_like(value) for name, value in state.items()}
    velocity, control, controls = zero, zero, dict.fromkeys(ten_clients(None), zero)
    for round_idx, of_clients in enumerate(rounds):
        rate, trained, new = rates(round_idx), {}, {}
        names = [name for name in state if name.split(".")[0] in rate]
        for client, batches in of_clients.items():
            now, own = dict(state), controls[client]
            for batch in batches:
                found = gradients(now, batch)
                for n in names:
                    step = found[n] + (control[n] - own[n] if scaffold else 0.0)
                    now[n] = now[n] - rate[n.split(".")[0]] * step
            trained[client] = now
            new[client] = own | {
                n: own[n] - control[n] + (state[n] - now[n]) / (len(batches) * rate[n.split(".")[0]])
                for n in names
            }
        movement = combined(state, trained)
        velocity = velocity | {n: beta * velocity[n] + movement[n] for n in names}
        control = {n: c + sum(new[m][n] - controls[m][n] for m in new) / 10 for n, c in control.items()}
        controls |= new
        state = {n: w + velocity[n] if n in names else w for n, w in state.items()}
    return state


KINDS = {
    "momentum": lambda: ({"server": FedAvgM(beta=0.5)}, {"beta": 0.5}),
    "scaffold": lambda: ({"algorithm": Scaffold()}, {"scaffold": True}),
}


@pytest.mark.parametrize("place", ["before", "after"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_backbone_that_joins_in_the_third_round_equals_a_loop_written_out(place, kind):
    settings, reference = KINDS[kind]()
    start, found, rounds = recorded(
        rounds=5, clients_per_round=6, model=transfer(), **{place: [unfreezing()]}, **settings
    )
    expected = written_out(start, rounds, rates, **reference)
    assert_close(found, expected)
    assert not torch.allclose(found["backbone.weight"], start["backbone.weight"], atol=1e-3)


@pytest.mark.parametrize("place", ["before", "after"])
def test_the_bytes_of_a_backbone_count_once_it_has_joined(place):
    sent = []

    class Watch(L.Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            loop = next(one for one in trainer.callbacks if isinstance(one, FederatedLoop))
            sent.append({(row["bytes_down"], row["bytes_up"]) for row in loop.visit_records})

    callbacks = {"before": [], "after": [Watch()]}
    callbacks[place].insert(0, unfreezing(1))
    recorded(rounds=2, model=transfer(), **callbacks)
    (head,), (both,) = sent
    assert head[0] == head[1]
    assert both[0] == both[1]
    assert 4 * 40 <= both[0] - head[0] < 4 * 40 + 300  # 40 numbers, and their names in the header


def fitted(model, rounds, order, joins, folder, every=None, ckpt_path=None, **loop):
    """The weights of a run that saves each round or step, with the loop on either side of the finetuning."""
    filename = "{step}" if every else "{epoch}"
    save = ModelCheckpoint(folder, save_top_k=-1, filename=filename, every_n_train_steps=every)
    callbacks = [FederatedLoop(**loop), unfreezing(joins)][::order]
    fit = trainer(rounds, [*callbacks, save], enable_checkpointing=True)
    fit.fit(model, FederatedWrapper(Numbers(), ten_clients), ckpt_path=ckpt_path, weights_only=True)
    return weights(model)


class Falling(Transfer):
    """A rate that falls by step."""

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("large", [False, True])
def test_saved_inside_the_round_in_which_it_joins_resumes_before_it(tmp_path, monkeypatch, order, large):
    """A checkpoint after every step, of a backbone that joins in the second round and a rate that falls by step."""
    if large:  # frozen weights are held by reference
        monkeypatch.setattr(HeldState.__init__, "__defaults__", (0.0,))

    def run(folder, ckpt_path=None):
        model = seeded(Falling)
        return fitted(
            model, 3, order, 1, folder, every=1, ckpt_path=ckpt_path, clients_per_round=2, local_steps=2
        )

    whole = run(tmp_path / "whole")
    for step in ("5", "6", "7") if large else ("1", "5", "6", "7", "10"):
        assert_equal(whole, run(tmp_path / f"from{step}", tmp_path / f"whole/step={step}.ckpt"))


class Replaces(L.Callback):
    """Gives the trainer an optimizer of everything in the second round."""

    def __init__(self, make):
        self.make = make

    def on_train_epoch_start(self, trainer, pl_module):
        if trainer.current_epoch == 1:
            trainer.optimizers = [self.make(pl_module.parameters())]


@pytest.mark.parametrize("place", ["before", "after"])
def test_an_optimizer_in_the_place_of_another_is_followed(place):
    replaces = Replaces(lambda parameters: torch.optim.SGD(parameters, lr=LR / 2))
    start, found, rounds = recorded(rounds=3, model=transfer(), **{place: [replaces]})
    new = {"head": LR / 2, "backbone": LR / 2}
    assert_close(found, written_out(start, rounds, lambda round_idx: new if round_idx else {"head": LR}))


def test_an_algorithm_looks_at_an_optimizer_that_took_the_place_of_another():
    with refusal("LBFGS moves by many evaluations"):
        recorded(rounds=3, model=transfer(), algorithm=Scaffold(), before=[Replaces(torch.optim.LBFGS)])


def test_local_training_takes_in_what_joined_and_keeps_it_with_the_client():
    """All ten clients in each round: a client's model is its own, the backbone from the second round on."""
    memory = ClientMemories()
    start, found, rounds = recorded(
        rounds=3,
        clients_per_round=10,
        model=transfer(),
        algorithm=LocalOnly(),
        memory=memory,
        after=[unfreezing(1)],
    )
    assert_close(found, start)
    for client in ten_clients(None):
        now = dict(start)
        for round_idx, of_clients in enumerate(rounds):
            rate = rates(round_idx + 1)
            for batch in of_clients[client]:
                grads = gradients(now, batch)
                now |= {n: w - rate.get(n.split(".")[0], 0.0) * grads[n] for n, w in now.items()}
        assert_close(doubled(memory.load(client)["own_state"]), now)


def test_parameters_that_leave_inside_a_round_are_refused():
    class Leaves(L.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if batch_idx == 3:
                trainer.optimizers[0].param_groups.pop()

    class Groups(Transfer):
        def configure_optimizers(self):
            return torch.optim.SGD([{"params": [p]} for p in self.head.parameters()], lr=LR)

    with refusal(r"1 parameters joined or left the optimizer during the visit to client"):
        federate(model=Groups(), callbacks=[Leaves()])


class FreezesLater(Transfer):
    """Its optimizer holds the backbone, which is frozen from the second round on."""

    def on_train_epoch_start(self):
        if self.current_epoch == 1:
            self.backbone.requires_grad_(False)
            self.kept = weights(self.backbone)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=LR)


@pytest.mark.parametrize("settings", [{"server": FedAvgM(beta=0.5)}, {"algorithm": Scaffold()}])
def test_what_is_frozen_after_some_rounds_follows_neither_momentum_nor_control_variates(settings):
    model = FreezesLater()
    federate(rounds=3, model=model, **settings)
    assert_equal(weights(model.backbone), model.kept)


@pytest.mark.parametrize(("model", "callbacks"), [(Transfer, [unfreezing(1)]), (FreezesLater, [])])
def test_with_devices_whose_memory_is_planned_a_change_of_what_is_trained_is_refused(
    model, callbacks, tmp_path
):
    with refusal(r"fleet: backbone.bias and 1 others joined .* frozen or thawed, .* from the start"):
        federate(model=seeded(model), callbacks=callbacks, fleet=make_fleet(tmp_path, phone={}))


@pytest.mark.parametrize(
    ("settings", "is_refused"),
    [
        ({}, False),
        ({"server": FedAvgM()}, True),
        ({"algorithm": Ditto()}, True),
        ({"channel": Wire(up=TopK(0.5))}, True),
    ],
    ids=["nothing remembered", "momentum", "own models", "error feedback"],
)
def test_what_is_pruned_has_another_name_under_which_nothing_is_remembered(settings, is_refused):
    model = seeded(Transfer)
    prune = ModelPruning("l1_unstructured", [(model.head[1], "weight")], amount=0.5)
    renamed = "head.1.weight is called head.1.weight_orig since the last round"
    with refusal(renamed) if is_refused else nullcontext():
        federate(2, model=model, callbacks=[prune], **settings)
