import itertools

import pytest
import torch
from fleets import make_fleet
from lightning.pytorch.callbacks import ModelCheckpoint
from nested import datamodule
from plain_lightning import assert_equal, trainer
from scripted_generator import Scripted
from tiny_world import read_lines, table, write_rows

from fedlight import LESS, FederatedLoop, HashedEncoder, Lora, Optimization, Partition, SFTModule, VisitLog
from fedlight.augmentation import DirectRetrieval, FedDCA, RandomSampling, SelfInstruct
from fedlight.augmentation.less.example_gradients import ExampleGradients
from fedlight.augmentation.less.warm_up import WarmUp
from fedlight.datamodules.instructions import AugmentedInstructionDataModule, InstructionDataModule
from fedlight.federation import FedAvg, FedAvgM, FedProx, Scaffold

PEOPLE = ("anna paints walls .", "ben bakes bread .", "finn reads letters .", "gina builds sheds .")
ROWS = [
    {"instruction": " ".join(pair), "output": pair[number % 2]}
    for number, pair in enumerate(itertools.permutations(PEOPLE, 2))
]
COLUMNS = {"instruction": "instruction", "response": "output"}
TEMPLATE = "POST : {instruction} CHOICE :"
SMALL = {"template": TEMPLATE, "max_tokens": 64, "val_share": 0.0, "batch_size": 2}
NUMBER = 3
OPTIMIZERS = {
    "FedAvg": lambda: {"algorithm": FedAvg()},
    "FedProx": lambda: {"algorithm": FedProx(0.1)},
    "Scaffold": lambda: {"algorithm": Scaffold()},
    "FedAvgM": lambda: {"algorithm": FedAvg(), "server": FedAvgM(0.5, beta=0.9)},
}


def make_data(folder, model, augmentation):
    folder.mkdir(parents=True, exist_ok=True)
    settings = {"private_rows": 6, "augmentation": augmentation, "partition": Partition("iid", 3)}
    settings |= {"columns": COLUMNS, "tokenizer": model, **SMALL}
    return datamodule(AugmentedInstructionDataModule, write_rows(folder / "rows.jsonl", ROWS), **settings)


def feddca():
    return FedDCA(HashedEncoder(64), NUMBER, clusters=2, alpha=0.95)


def run(folder, model, data, rounds=2, callbacks=(), ckpt=None, **loop):
    sgd = Optimization(name="SGD", args={})
    module = SFTModule(model, lora=Lora(rank=2, dropout=0.0), lr=0.05, optimizer=sgd)
    loop = [FederatedLoop(clients_per_round=2, local_steps=3, **loop)] if loop else []
    kept = any(isinstance(callback, ModelCheckpoint) for callback in callbacks)
    options = {"limit_val_batches": 0, "default_root_dir": folder, "enable_checkpointing": kept}
    fit = trainer(rounds, [*loop, *callbacks], **options)
    fit.fit(module, datamodule=data, ckpt_path=ckpt, weights_only=True)
    return {name: p.detach().clone() for name, p in module.named_parameters() if p.requires_grad}


def by_client(folder):
    """A datamodule of the rows in the record, each with its client: what the augmented one comes to."""
    rows = [row for name in ("private", "added") for row in read_lines(folder / f"augmentation/{name}.jsonl")]
    rows.sort(key=lambda row: row["client"])  # a client's own come first
    flat = [{"client": row["client"], **row["fields"]} for row in rows]
    columns = {name: name for name in ("client", "instruction", "response")}
    settings = {"columns": columns, "partition": Partition("client"), "tokenizer": "toy", **SMALL}
    return datamodule(InstructionDataModule, write_rows(folder / "flat.jsonl", flat), **settings)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_augmented_clients_are_clients_with_more_rows(name, tiny_model, tmp_path):
    """Bit for bit what these rows give when they are the clients' own."""
    data = make_data(tmp_path, tiny_model, feddca())
    augmented = run(tmp_path, tiny_model, data, **OPTIMIZERS[name]())
    assert data.client_sizes() == {"c0": 2 + NUMBER, "c1": 2 + NUMBER, "c2": 2 + NUMBER}
    assert_equal(augmented, run(tmp_path, tiny_model, by_client(tmp_path), **OPTIMIZERS[name]()))
    alone = run(tmp_path / "alone", tiny_model, make_data(tmp_path, tiny_model, None), **OPTIMIZERS[name]())
    assert any(not torch.equal(value, alone[key]) for key, value in augmented.items())


def small_less(model):
    sizes = {"lora": Lora(2, 512, 0.1), "dimension": 64, "warmup": WarmUp(0.5, 1), "max_tokens": 64}
    return LESS(model, NUMBER, TEMPLATE, device="cpu", gradients=ExampleGradients(batch_size=2), **sizes)


@pytest.mark.parametrize(
    "make_one",
    [
        lambda model: RandomSampling(NUMBER),
        lambda model: DirectRetrieval(HashedEncoder(64), NUMBER, clusters=2),
        small_less,
        lambda model: SelfInstruct(NUMBER, Scripted(), max_rouge_l=1.0),
    ],
    ids=["RandomSampling", "DirectRetrieval", "LESS", "SelfInstruct"],
)
def test_every_other_augmentation_feeds_the_clients(make_one, tiny_model, tmp_path):
    data = make_data(tmp_path, tiny_model, make_one(tiny_model))
    run(tmp_path, tiny_model, data, rounds=1, algorithm=FedAvg())
    assert data.client_sizes() == {"c0": 2 + NUMBER, "c1": 2 + NUMBER, "c2": 2 + NUMBER}
    again = make_data(tmp_path, tiny_model, make_one(tiny_model))
    again.augmentation.augment = None  # what is on disk is enough
    run(tmp_path, tiny_model, again, rounds=1, algorithm=FedAvg())
    assert again.added == data.added


def test_a_plain_trainer_pools_all_rows(tiny_model, tmp_path):
    data = make_data(tmp_path, tiny_model, feddca())
    augmented = run(tmp_path, tiny_model, data, rounds=1)
    assert len(data.train_dataloader()) == (3 * (2 + NUMBER)) // 2
    assert_equal(augmented, run(tmp_path, tiny_model, by_client(tmp_path), rounds=1))


def test_on_a_fleet_batches_are_known_before_they_are_read(tiny_model, tmp_path):
    data, fleet = make_data(tmp_path, tiny_model, feddca()), make_fleet(tmp_path, small={"memory_gib": 16})
    log = VisitLog(str(tmp_path / "visits.csv"))
    on_devices = run(tmp_path, tiny_model, data, callbacks=[log], algorithm=FedAvg(), fleet=fleet)
    assert {row["device"] for row in table(tmp_path / "visits.csv")} == {"small"}
    again = make_data(tmp_path, tiny_model, feddca())
    assert_equal(on_devices, run(tmp_path, tiny_model, again, algorithm=FedAvg()))


class Counting(RandomSampling):
    calls = 0

    def augment(self, clients, public, seed):
        self.calls += 1
        return super().augment(clients, public, seed)


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")  # as it goes on
def test_a_resumed_run_reads_what_was_added(tiny_model, tmp_path):
    whole, first, second = Counting(NUMBER), Counting(NUMBER), Counting(NUMBER)
    keep, goes_on = (ModelCheckpoint(tmp_path / "kept", save_top_k=-1, every_n_epochs=1) for _ in range(2))

    def ran(name, augmentation, *more, **options):
        data = make_data(tmp_path, tiny_model, augmentation)
        return run(tmp_path / name, tiny_model, data, *more, algorithm=FedAvg(), **options)

    uninterrupted = ran("whole", whole, 4)
    ran("cut", first, 2, [keep])
    resumed = ran("cut", second, 4, [goes_on], ckpt=keep.best_model_path)
    assert (whole.calls, first.calls, second.calls) == (1, 1, 0)
    assert_equal(resumed, uninterrupted)
    cut, uncut = (read_lines(tmp_path / name / "augmentation/added.jsonl") for name in ("cut", "whole"))
    assert cut == uncut
