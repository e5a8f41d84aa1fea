import hashlib
import subprocess
import sys

import lightning as L
import numpy as np
import pytest
import torch
from fleets import make_fleet
from lightning.pytorch.callbacks import GradientAccumulationScheduler, ModelCheckpoint
from plain_lightning import assert_equal, federate, module, weights
from refusals import refusal
from safetensors.torch import save
from stacked import Lora, Points, assert_same_rows, fit, furthest

from fedlight import CoordinateMedian, FedAdam, FedAvg, Wire
from fedlight.federation import Average
from fedlight.federation.client import Identity, SharedDirections, serialized_bytes
from fedlight.federation.forward import ZerothOrder
from fedlight.federation.forward.fedkseed import INDICES, SCALARS, SUMS, FedKSeed, decode, encode

FORWARD = {"forward": ZerothOrder(1e-2)}


def test_the_code_by_hand():
    steps = [(4000, 0.5), (7, -0.25), (4000, 1.5)]
    sent = encode(steps, 4096)
    assert (sent[INDICES].tolist(), sent[SCALARS].tolist()) == ([4000, 7, 4000], [0.5, -0.25, 1.5])
    sums = decode(sent, 4096)
    assert (sums[4000].item(), sums[7].item(), sums.count_nonzero().item()) == (2.0, -0.25, 2)
    few = encode([(2, 0.5), (0, 1.0), (2, 0.25)], 4)
    assert {name: value.tolist() for name, value in few.items()} == {SCALARS: [1.0, 0.0, 0.75, 0.0]}
    assert encode([], 4096)[SCALARS].shape == (0,)


@pytest.mark.parametrize("steps", [1, 200, 2730, 2731, 10**5])
def test_bytes_are_those_of_the_file_and_stay_below_18_kb(steps):
    """6 bytes a step and a header, until K scalars of 4 bytes are fewer."""
    num_seeds = 4096
    sent = encode([(step % num_seeds, 1.0) for step in range(steps)], num_seeds)
    values = min(6 * steps, 4 * num_seeds)
    header = len(save(sent)) - values
    assert serialized_bytes(sent) == len(save(sent)) < 18_000
    assert 60 < header <= 160
    assert decode(sent, num_seeds).sum().item() == steps


def drawn(seed, index, name, shape):
    text = f"int:{seed}\x1fstr:shared direction\x1fint:{index}\x1fstr:{name}"
    key = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=16).digest(), "little")
    generator = np.random.Generator(np.random.Philox(key=key))
    return generator.standard_normal(tuple(shape), dtype=np.float32).astype(np.float64)


def written_out(start, sums, seed):
    """``w_0 - sum of A_j z_j`` in numpy's fp64, in the order of j."""
    found = {}
    for name, value in start.items():
        total = np.zeros(tuple(value.shape))
        for index, scalar in enumerate(sums.double().tolist()):
            if scalar:
                total = total + drawn(seed, index, name, value.shape) * scalar
        found[name] = torch.from_numpy((value.double().numpy() - total).astype(np.float32))
    return found


@pytest.fixture
def uploads(monkeypatch):
    kept, up = [], Identity.up

    def keeping(self, received, trained, client, without_feedback=()):
        kept.append((client, {name: value.clone() for name, value in trained.items()}))
        return up(self, received, trained, client, without_feedback)

    monkeypatch.setattr(Identity, "up", keeping)
    return kept


@pytest.mark.parametrize("num_seeds", [1000, 3])
def test_the_model_follows_from_what_was_sent(uploads, num_seeds, tmp_path):
    """Three rounds of three of ten clients: sums and model from the uploads alone, and nothing else was sent.

    A second process rebuilds the model from the scalars bit for bit.
    """
    start = weights(module(optimizer="SGD"))
    algorithm = FedKSeed(num_seeds, seed=3)
    model, made = federate(3, model=module(optimizer="SGD"), algorithm=algorithm, **FORWARD)
    assert len(uploads) == 9
    names = {INDICES, SCALARS} if num_seeds == 1000 else {SCALARS}
    assert {frozenset(sent) for _, sent in uploads} == {frozenset(names)}
    assert len({row["bytes_up"] for row in made.visit_records}) == 1
    sums = torch.zeros(num_seeds)
    for first in (0, 3, 6):
        each = [client.share * decode(sent, num_seeds) for client, sent in uploads[first : first + 3]]
        sums = (sums.double() + 10 / 3 * sum(each)).float()
    torch.testing.assert_close(algorithm._sums, sums, rtol=1e-6, atol=1e-9)
    assert_equal(weights(model), written_out(start, algorithm._sums, 3))
    assert all(not torch.equal(value, start[name]) for name, value in weights(model).items())
    if num_seeds == 3:  # one of the two is rebuilt elsewhere
        return
    torch.save({"start": start, "sums": algorithm._sums}, tmp_path / "scalars.pt")
    code = (
        "import sys, torch\n"
        "from fedlight.federation.client import SharedDirections\n"
        "from fedlight.federation.forward.fedkseed import rebuild\n"
        "kept = torch.load(sys.argv[1], weights_only=True)\n"
        "torch.save(rebuild(**kept, directions=SharedDirections(1000, 3)), sys.argv[2])\n"
    )
    files = [str(tmp_path / name) for name in ("scalars.pt", "rebuilt.pt")]
    subprocess.run([sys.executable, "-c", code, *files], check=True)
    assert_equal(torch.load(files[1], weights_only=True), weights(model))


def test_down_go_the_sums_and_to_a_new_client_the_initial_model():
    model = module(optimizer="SGD")
    state = weights(model)
    _, made = federate(2, model=model, algorithm=FedKSeed(50), clients_per_round=10, **FORWARD)
    assert {row["bytes_down"] for row in made.visit_records} == {serialized_bytes({SUMS: torch.zeros(50)})}
    _, made = federate(1, model=module(), algorithm=FedKSeed(50), clients_per_round=10, **FORWARD)
    both = serialized_bytes({SUMS: torch.zeros(50), **state})
    assert {row["bytes_down"] for row in made.visit_records} == {both}


@pytest.mark.parametrize("clip", [None, 0.5])
def test_scalars_are_what_a_client_has_gone_also_where_it_is_clipped(uploads, clip):
    """FedAvg's client along the same directions ends where the scalars lead to, up to rounding."""

    class Alike(FedAvg):
        def start_visit(self, visit, client, received):
            found = super().start_visit(visit, client, received)
            found.directions = SharedDirections(8, 0)
            return found

    loop = {"clients_per_round": 1, "local_steps": 5, "settings": {"gradient_clip_val": clip}}
    plain, _ = federate(1, model=module(optimizer="SGD"), algorithm=Alike("uniform"), **loop, **FORWARD)
    scalars = FedKSeed(8, weighting="uniform")
    rebuilt, _ = federate(1, model=module(optimizer="SGD"), algorithm=scalars, **loop, **FORWARD)
    assert furthest(weights(rebuilt), weights(module(optimizer="SGD"))) > 0
    assert furthest(weights(plain), weights(rebuilt)) < 1e-6


@pytest.mark.parametrize("perturbations", [1, 3])
def test_clients_side_by_side_send_what_each_sends_alone(perturbations, uploads):
    def run(at_once):
        settings = {"forward": ZerothOrder(1e-2, perturbations)}
        data, model = Points(dtype=torch.float64), Lora(dtype=torch.float64, lr=0.02)
        return fit(model, data, at_once, algorithm=FedKSeed(100), **settings)

    alone, rows, *_ = run(1)
    beside, others, groups, _ = run(3)
    assert groups[0][0] == ["a", "b", "c"]
    assert furthest(beside, alone) < 1e-6
    assert_same_rows(others, rows)
    assert {len(sent[INDICES]) for _, sent in uploads} == {3 * perturbations}


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
def test_a_resumed_run_plans_the_memory_and_the_micro_batches_of_the_whole_one(tmp_path):
    """Device of 800 bytes: its micro-batch of 2 follows from what the visit trains."""

    def run(*callbacks, ckpt_path=None):
        settings = {"enable_checkpointing": bool(callbacks), "default_root_dir": tmp_path / "run"}
        fleet = make_fleet(tmp_path / "devices", small={"memory_gib": f"{800 / 2**30:.15f}"})
        more = {"rounds": 3, "callbacks": callbacks, "ckpt_path": ckpt_path, "settings": settings}
        data = Points(dict.fromkeys("abcd", 8))
        return fit(
            Lora(lr=0.001), data, 1, algorithm=FedKSeed(50), forward=ZerothOrder(), fleet=fleet, **more
        )

    whole, rows, *_ = run(ModelCheckpoint(tmp_path / "run", filename="{epoch}", save_top_k=-1))
    resumed, others, *_ = run(ckpt_path=tmp_path / "run" / "epoch=0.ckpt")
    rest = [{**row, "seconds": 0} for row in rows if row["round"] > 0]
    assert {row["adapter_bytes"] for row in rest} == {2 * 4 * sum(value.numel() for value in whole.values())}
    assert [{**row, "seconds": 0} for row in others] == rest
    assert_equal(resumed, whole)


def test_bytes_are_known_where_the_batches_of_a_step_change_from_round_to_round(tmp_path, caplog):
    changes = GradientAccumulationScheduler({0: 2, 1: 1})
    fleet, forward = make_fleet(tmp_path, fast={}), ZerothOrder(perturbations=2)
    loop = {"algorithm": FedKSeed(5000), "fleet": fleet, "forward": forward}
    _, rows, *_ = fit(Lora(lr=0.001), Points(), local_steps=None, callbacks=[changes], **loop)
    expected = [serialized_bytes(encode([(0, 1.0)] * steps, 5000)) for steps in (2, 4)]
    for round_idx, size in enumerate(expected):
        asked = [row for row in rows if row["round"] == round_idx and row["client"] != "c"]
        assert {row["bytes_up"] for row in asked} == {size}
    assert "was to send" not in caplog.text


class TwoRates(type(module())):
    def configure_optimizers(self):
        groups = [{"params": [*self.net[0].parameters()], "lr": 0.1}, {"params": [*self.net[3].parameters()]}]
        return torch.optim.SGD(groups, lr=0.05)


class Frozen(type(module())):
    """The server would rebuild, and so move, what no client moves."""

    def configure_optimizers(self):
        self.net[0].weight.requires_grad_(False)
        return torch.optim.SGD(self.parameters(), lr=0.05)


class Freezes(L.Callback):
    def on_train_epoch_start(self, trainer, pl_module):
        pl_module.net[0].weight.requires_grad_(False)


class Changes(L.Callback):
    def on_train_epoch_end(self, trainer, pl_module):
        with torch.no_grad():
            pl_module.net[0].weight.add_(1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"model": TwoRates()}, r"so rates of \[0.05, 0.1\] do not work: give one"),
        ({"model": Frozen()}, r"net\.0\.weight is frozen .* give the optimizer those alone"),
        ({"callbacks": [Freezes()]}, r"net\.0\.weight is frozen .* give the optimizer those alone"),
        ({"callbacks": [Changes()]}, r"net\.0\.weight is not what FedKSeed's scalars make of it"),
        ({"forward": None}, "not all visits of this run are such: set forward=ZerothOrder"),
        ({"channel": Wire()}, "channel=Wire would round the indices: leave channel out"),
        ({"server": FedAdam(0.1)}, "server=FedAdam with lr=0.1 would undo: take Average with lr=1"),
        ({"server": Average(0.5)}, "server=Average with lr=0.5 would undo"),
        ({"aggregation": CoordinateMedian()}, "the weighted sum of the clients' scalars: leave agg"),
        ({"forward": ZerothOrder(weight_decay=0.1)}, "weight_decay=0.1 goes another way: set it to 0"),
    ],
)
def test_what_scalars_cannot_say_is_refused(settings, message):
    with refusal(message):
        federate(2, **{"model": module(optimizer="SGD"), "algorithm": FedKSeed(), **FORWARD, **settings})


class RatesPart(TwoRates):
    """From the second round on the second group's rate is 0."""

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        optimizer.param_groups[0]["lr"] = 0.05
        rates = [lambda step: 1.0, lambda step: 0.0 if step else 1.0]
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rates)
        return [optimizer], [{"scheduler": schedule, "interval": self.interval}]


@pytest.mark.parametrize("interval", ["epoch", "step"])
def test_learning_rates_that_part_later_are_refused(interval):
    model = RatesPart()
    model.interval = interval
    federate(1, model=model, algorithm=FedKSeed(), local_steps=1, **FORWARD)
    with refusal(r"rates of \[0.0, 0.05\]: give all parameters one"):
        federate(2, model=model, algorithm=FedKSeed(), **FORWARD)


def test_a_number_of_seeds_out_of_its_range_and_a_checkpoint_of_another_algorithm_are_refused():
    for number in (0, 32769):
        with refusal(f"num_seeds={number} must be from 1 to 32768"):
            FedKSeed(number)
    with refusal("no sums of scalars, so another algorithm than FedKSeed made it"):
        FedKSeed().load_state_dict({"control": {}})


def test_a_number_that_the_server_rounds_is_no_change():
    """In fp64 1 + (1e-12 - 1) is not 1e-12."""

    class ToZero(FedKSeed):
        rounds = 0

        def rebuilt(self):
            found = super().rebuilt()
            found["net.0.weight"] = found["net.0.weight"].clone()
            found["net.0.weight"][0, 0] = 1e-12 if self.rounds else 1.0
            return found

        def finish_round(self, movement_of_sums):
            found = super().finish_round(movement_of_sums)
            self.rounds += 1
            return found

    algorithm = ToZero(50)
    model, _ = federate(3, model=module(optimizer="SGD"), algorithm=algorithm, **FORWARD)
    number, rebuilt = weights(model)["net.0.weight"][0, 0], algorithm.rebuilt()["net.0.weight"][0, 0]
    assert number != rebuilt
    assert abs(number - rebuilt) < 1e-15


def test_an_upload_is_the_model_that_the_server_rebuilds_of_a_client(uploads):
    """What a client sends tells its model: of the sums before the round and its scalars, and what it has trained."""
    start = weights(module(optimizer="SGD"))
    algorithm = FedKSeed(20, seed=2)

    class Looks(L.Callback):
        def __init__(self):
            self.seen, self.trained, self.round = [], [], -1

        def on_train_epoch_start(self, trainer, pl_module):
            self.round += 1
            self.sums = algorithm._sums.double()

        def on_upload(self, upload):
            assert upload.round_idx == self.round
            sent = decode(uploads[-1][1], 20)
            assert upload.client_id == uploads[-1][0].id
            expected = written_out(start, self.sums, 2)
            for name, value in written_out(expected, sent, 2).items():
                torch.testing.assert_close(upload.state[name], value, rtol=0, atol=1e-12)
            self.seen.append(upload.state)

        def on_train_batch_end(self, trainer, pl_module, *_):
            self.trained.append(weights(pl_module))

    watch = Looks()
    loop = {"local_steps": 1, "callbacks": [watch], "algorithm": algorithm}
    federate(2, model=module(optimizer="SGD"), **loop, **FORWARD)
    assert len(watch.seen) == 6
    assert all(furthest(state, start) > 0 for state in watch.seen)
    for state, trained in zip(watch.seen[:2], watch.trained[:2], strict=True):
        assert furthest(state, trained) < 1e-6


def test_an_upload_is_rebuilt_only_for_who_looks(monkeypatch):
    monkeypatch.setattr(FedKSeed, "uploaded", lambda *_: pytest.fail("rebuilt for nobody"))
    federate(1, model=module(optimizer="SGD"), algorithm=FedKSeed(20), **FORWARD)
