from contextlib import nullcontext
from functools import partial

import lightning as L
import pytest
from fleets import make_fleet
from lightning.pytorch.callbacks import ModelCheckpoint
from plain_lightning import States, assert_equal, trainer
from refusals import refusal
from stacked import Lora, Points, assert_same_rows, both_ways, by_visit, fit, furthest, tiny_sft

from fedlight import FedAdam, FedAvg, FederatedLoop, FedProx, Scaffold
from fedlight.federation.forward import ZerothOrder

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("value", [NAN, INF])
@pytest.mark.parametrize("who", ["a", "c", "d"])
@pytest.mark.parametrize("clip", [None, 0.5])
def test_only_the_client_that_diverges_is_left_out(who, value, clip):
    """Clients a to c share a batch, in which c has fewer rows than the others."""
    more = {"settings": {"gradient_clip_val": clip}, "algorithm": FedProx(0.1, "uniform")}
    _, (beside, rows, groups, loop) = both_ways(Lora, partial(Points, broken={who: value}), **more)
    assert groups[0] == [["a", "b", "c"], ["d"]]
    assert [row["client"] for row in rows if row["reason"] == "diverged"] == [who] * 2
    assert all(p.isfinite().all() for p in beside.values())
    assert loop.rounds_done == 2


class Drops(Lora):
    """Leaves the adapter of its first layer out of every second step of a visit."""

    takes_stacked, step = True, 0

    def on_visit_start(self, client_id):
        self.step = 0

    def on_train_batch_start(self, batch, batch_idx):
        self.step += 1

    def example_losses(self, batch):
        first, tanh, last = self.net.base_model.model
        first = first if self.step % 2 else first.base_layer
        return (last(tanh(first(batch["x"]))) - batch["y"]).square().mean(dim=1)


@pytest.mark.parametrize("algorithm", [FedProx(0.5), Scaffold()])
def test_gradients_that_an_algorithm_adds_for_all_clients_are_those_of_clients_alone(algorithm):
    both_ways(Drops, algorithm=algorithm)


class ForOne(FedAvg):
    def adjust_gradients(self, visiting, parameters, gradients):
        if visiting.client.id == "a":
            gradients |= {name: p * 0 for name, p in parameters.items() if name not in gradients}


def test_a_gradient_for_some_clients_of_a_batch_alone_is_refused():
    with refusal("ForOne gives .*lora_.* a gradient, which has none in the step, .* set it to 1"):
        fit(Drops(), Points(), 3, algorithm=ForOne())


class Stop(L.Callback):
    """Ends the run inside a round, in a way that is said."""

    takes_stacked = True

    def __init__(self, how, epoch=1, batch_idx=1):
        self.how, self.epoch, self.batch_idx = how, epoch, batch_idx

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if (trainer.current_epoch, batch_idx) != (self.epoch, self.batch_idx):
            return
        self.shapes = [p.dim() for p in pl_module.parameters() if p.requires_grad]
        if self.how == "stop":
            trainer.should_stop = True
        else:
            raise RuntimeError("the power went out")


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
@pytest.mark.parametrize("how", ["stop", "error"])
@pytest.mark.parametrize("algorithm", [FedProx, Scaffold])
def test_a_run_that_is_stopped_inside_a_group_goes_on_bit_for_bit(how, algorithm, tmp_path):
    def run(module=None, rounds=3, **more):
        more |= {"algorithm": algorithm(), "server": FedAdam(0.05)}
        return fit(module or Lora(), Points(), 3, rounds, **more)

    whole, rows, *_ = run()
    first, *_ = run(rounds=1)
    save = ModelCheckpoint(tmp_path, filename="{epoch}-{step}", every_n_train_steps=5, save_top_k=-1)
    stop, module = Stop(how), Lora()
    settings = {"enable_checkpointing": True, "default_root_dir": tmp_path}
    error = pytest.raises(RuntimeError, match="the power went out")
    with nullcontext() if how == "stop" else error:
        run(module, settings=settings, callbacks=[stop, save])
    assert {*stop.shapes} == {3}
    left = {name: p.detach() for name, p in module.named_parameters() if p.requires_grad}
    assert_equal(left, first)  # the model of the round before, in its own shapes
    assert not {"training_step", "configure_gradient_clipping"} & vars(module).keys()
    (file,) = [file for file in tmp_path.glob("*.ckpt") if "step=5" in file.name]
    again, others, *_ = run(ckpt_path=file)
    assert_equal(again, whole)
    rest = by_visit(rows)
    for visit, row in by_visit(others).items():
        assert {**row, "seconds": 0} == {**rest[visit], "seconds": 0}


def test_validation_of_a_run_that_is_stopped_inside_a_group_sees_the_global_model():
    seen = []

    class Validated(Lora):
        def validation_step(self, batch, batch_idx):
            seen.append({name: p.clone() for name, p in self.named_parameters() if p.requires_grad})

    class Held(Points):
        def setup(self, stage=None):
            super().setup(stage)
            self.val_set = range(4)

    settings = {"limit_val_batches": 1.0}
    fit(Validated(), Held(), 3, rounds=2, callbacks=[Stop("stop")], settings=settings)
    assert len(seen) == 2
    assert_equal(seen[0], seen[1])


def language(tmp_path, at_once, tiny_model, devices, batch_size=4, **loop):
    fleet = make_fleet(tmp_path / str(at_once), **devices)
    loop = {"clients_per_round": 6, "local_steps": 2, "fleet": fleet, **loop}
    return fit(*tiny_sft(tiny_model, batch_size), at_once, **loop)


def test_clients_of_one_precision_share_a_batch_and_eight_bits_are_alone(tiny_model, tmp_path):
    devices = {"a": {"weight_bits": 4}, "b": {"weight_bits": 16}, "c": {"weight_bits": 8}}
    alone, rows, *_ = language(tmp_path, 1, tiny_model, devices)
    beside, others, groups, _ = language(tmp_path, 6, tiny_model, devices)
    bits = {row["client"]: row["weight_bits"] for row in others}
    kinds = [[bits[name] for name in group] for group in groups[0]]
    assert sorted(kinds) == [[4, 4], [8], [8], [16, 16]]
    assert furthest(beside, alone) < 1e-5
    assert_same_rows(others, rows, 1e-4)


@pytest.mark.parametrize(("batch_size", "share", "checkpointing"), [(4, 0.5, 0), (1, 0.9, 1)])
def test_cut_steps_are_alone_and_checkpointed_ones_share_a_batch(
    batch_size, share, checkpointing, tiny_model, tmp_path
):
    """A batch of one example cannot be cut, so it is computed twice. Costs on the devices' clock stay as they are."""
    short = {"rounds": 1, "local_steps": 1, "batch_size": batch_size}
    _, rows, *_ = language(tmp_path / "free", 1, tiny_model, {"a": {}}, **short)
    least = min(row["peak_bytes"] for row in rows)
    devices = {"small": {"memory_gib": share * least / 2**30}, "large": {}}
    alone, rows, *_ = language(tmp_path, 1, tiny_model, devices, **short)
    beside, others, groups, _ = language(tmp_path, 6, tiny_model, devices, **short)
    assert furthest(beside, alone) < 1e-6
    assert_same_rows(others, rows, 1e-5)
    small = {row["client"]: row for row in others if row["device"] == "small"}
    assert [len(group) for group in groups[0] if group[0] not in small] == [6 - len(small)]
    assert {row["checkpointing"] for row in small.values()} == {checkpointing}
    assert {row["micro_batch"] < batch_size for row in small.values()} == {not checkpointing}
    together = [len(group) for group in groups[0] if group[0] in small]
    assert together == ([len(small)] if checkpointing else [1] * len(small))
    assert len(small) > 1


def test_clients_that_drop_out_are_in_no_group(tmp_path):
    fleet = make_fleet(tmp_path, moody={"availability": 0.5}, fine={})
    (_, rows, *_), (_, _, groups, _) = both_ways(Lora, rounds=4, fleet=fleet)
    assert "absent" in {row["reason"] for row in rows}
    assert {sum(map(len, each)) for each in groups} - {4}


def test_every_upload_is_seen_also_in_groups_and_none_of_a_client_that_diverged():
    found = []
    for at_once in (1, 3):
        uploads = States()
        fit(Lora(), Points(broken={"b": NAN}), at_once, callbacks=[uploads])
        found.append(uploads.seen)
    one, three = found
    assert one.keys() == three.keys() == {(r, name) for r in (0, 1) for name in "acd"}
    assert max(furthest(one[key], three[key]) for key in one) < 1e-6
    assert furthest(one[0, "a"], one[0, "d"]) > 1e-2


@pytest.mark.parametrize("forward", [None, ZerothOrder()])
def test_an_error_while_a_group_begins_leaves_the_module_as_it_was(forward):
    class Refusing(L.Callback):
        takes_stacked = True

        def on_visit_start(self, client_id):
            raise RuntimeError("not this client")

    module = Lora()
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    with pytest.raises(RuntimeError, match="not this client"):
        fit(module, Points(), at_once=4, callbacks=[Refusing()], forward=forward)
    after = dict(module.named_parameters())
    assert {name: p.shape for name, p in after.items()} == {name: p.shape for name, p in before.items()}
    assert_equal({name: p.detach() for name, p in after.items()}, before)
    assert "training_step" not in vars(module)


def test_a_second_fit_reads_the_groups_of_its_own_data():
    whole, *_ = fit(Lora(), Points(), at_once=2)
    module, loop = Lora(), FederatedLoop(clients_per_round=4, local_steps=3, clients_at_once=2)
    again = trainer(1, [loop], limit_val_batches=0)
    again.fit(module, datamodule=Points())
    again.fit_loop.max_epochs = 2
    again.fit(module, datamodule=Points())
    assert_equal({name: p.detach() for name, p in module.named_parameters() if p.requires_grad}, whole)
