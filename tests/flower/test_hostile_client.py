import csv
import json
from collections import Counter
from functools import partial
from pathlib import Path

import lightning as L
import numpy as np
import pytest
import torch
from changed_messages import lost, with_header
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from nodes_here import ALL_KINDS, Here, Kind, deploy, make_node, two_nodes, visits_of
from safetensors.torch import load, save
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fedlight import FederatedWrapper, Limits
from fedlight.flower.messages import Parcel

pytestmark = pytest.mark.filterwarnings("ignore")  # of Lightning, about rounds of a few batches

LIAR = "c9"
TEST = 2000


def sorted_points(seed, number):
    """Points around the corners of a simplex, and the corner of each: a line through them all tells most apart."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(4, (number,), generator=generator)
    return 1.5 * torch.eye(4)[labels] + torch.randn(number, 4, generator=generator), labels


class Corners(L.LightningDataModule):
    def setup(self, stage):
        self.data = TensorDataset(*sorted_points(1, 300))

    def train_dataloader(self):
        return DataLoader(self.data, batch_size=10, shuffle=True)


class Classifier(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 4)

    def training_step(self, batch, batch_idx):
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("train/loss", loss, on_step=False, on_epoch=True, batch_size=len(batch[1]))
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.2)

    def accuracy(self):
        """Share of new points whose corner is found."""
        x, y = sorted_points(2, TEST)
        with torch.no_grad():
            return float((self.net(x).argmax(1) == y).double().mean())


def ten_alike(dataset):
    """Ten clients with 20 to 40 of 300 points each."""
    cuts = np.cumsum([0, *([20, 40, 30] * 3), 30])
    return {f"c{i}": np.arange(cuts[i], cuts[i + 1]) for i in range(10)}


def classifying(callbacks=(), **loop):
    return Kind(
        {"clients_per_round": 10, "local_steps": 4, **loop},
        Classifier,
        lambda: FederatedWrapper(Corners(), ten_alike),
        rounds=8,
        callbacks=lambda: [*callbacks],
    )


@pytest.fixture
def kind():
    """Add a kind of run for one test."""
    added = []

    def add(name, **more):
        ALL_KINDS[name] = lambda root: classifying(**more)
        added.append(name)
        return name

    yield add
    for name in added:
        del ALL_KINDS[name]


def claiming(number, message):
    """The liar claims so many examples when its node joins."""
    head = message.answer.header
    if message.asked.header["action"] != "join" or LIAR not in head["clients"]:
        return message.answer
    return Parcel(head | {"clients": head["clients"] | {LIAR: number}})


def saying(message, rounds=range(100), **fields):
    """The liar says something else of its visit."""
    head = message.answer.header
    if message.asked.header["action"] != "visit" or head["round"] not in rounds:
        return message.answer
    visits = [one | fields if one["client"] == LIAR else one for one in head["visits"]]
    return with_header("visits", visits, message.answer)


def sending(message, of, rounds=range(100)):
    """The liar sends ``of(received, trained)``, tensor by tensor."""
    head, payloads = message.answer.header, dict(message.answer.payloads)
    for one in head.get("visits", ()):
        if one["client"] == LIAR and head["round"] in rounds:
            [asked] = [each for each in message.asked.header["visits"] if each["client"] == LIAR]
            received = load(message.asked.payloads[asked["payload"]])
            trained = load(payloads[one["payload"]])
            payloads[one["payload"]] = save({name: of(received[name], v) for name, v in trained.items()})
    return Parcel(head, payloads)


def flipped(times):
    return lambda received, trained: received - times * (trained - received)


LIES = {
    "a billion examples": partial(claiming, 10**9),
    "a huge update": partial(sending, of=lambda _, trained: trained * 0 + 2.0**62, rounds=[5]),
    "a flipped update": partial(sending, of=flipped(10)),
    "a huge loss": partial(saying, loss=1e308),
    "a loss below all": partial(saying, loss=-1e6, training={"train/loss": [-1e6, 1]}, rounds=[0]),
}
REASONS = {
    "a billion examples": {"capped": 8},
    "a huge update": {"": 7, "clipped": 1},
    "a flipped update": {"clipped": 8},
    "a huge loss": {"dropped: client c9 has a loss of 1e+308": 8},
    "a loss below all": {"": 8},
}


def accuracy(folder, name, change=lambda message: message.answer, **how):
    """Return the accuracy of a deployment's model, and its rows of the liar."""
    module, _ = deploy(name, folder / "server", Here(two_nodes(name, folder), change), **how)
    return module.accuracy(), rows_of(folder / "server", LIAR)


def rows_of(folder, client):
    rows = csv.DictReader((Path(folder) / "visits.csv").read_text().splitlines())
    return [row for row in rows if row["client"] == client]


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """Accuracy of the run without the liar."""
    ALL_KINDS["ten without"] = lambda root: classifying()
    without = partial(saying, diverged="it is not there")  # the liar's node never gives its work
    found, _ = accuracy(tmp_path_factory.mktemp("without"), "ten without", without)
    del ALL_KINDS["ten without"]
    return found


@pytest.mark.slow  # whole runs
@pytest.mark.parametrize("lie", LIES)
def test_one_of_ten_liars_costs_no_accuracy_under_the_defaults(tmp_path, kind, expected, lie):
    found, rows = accuracy(tmp_path, kind("ten"), LIES[lie])
    assert expected > 0.65  # the best line finds 0.69
    assert found == pytest.approx(expected, abs=0.02)
    assert Counter(row["reason"] for row in rows) == REASONS[lie]


def test_a_client_that_diverges_in_its_last_visit_alone_is_left_out(tmp_path):
    def last(message):
        if message.asked.header["action"] != "visit":
            return message.answer
        *others, visit = message.answer.header["visits"]
        payloads = {n: data for n, data in message.answer.payloads.items() if n != visit["payload"]}
        visits = [*others, visit | {"diverged": "no number", "payload": None}]
        return Parcel(message.answer.header | {"visits": visits}, payloads)

    _, loop = deploy("ditto", tmp_path / "server", Here(two_nodes("ditto", tmp_path), last))
    reasons = {}
    for row in visits_of(tmp_path / "server"):
        reasons.setdefault((row["round"], row["client"]), []).append(row["reason"])
    assert loop.rounds_done == 3
    assert 3 <= [*reasons.values()].count(["diverged", "diverged"]) < len(reasons)


def test_a_metric_that_one_client_alone_reports_is_not_logged(tmp_path):
    def inventing(message):
        return saying(message, training={"loss": [3.0, 2], "better": [0.0, 1]})

    module, loop = deploy(
        "everybody", tmp_path / "server", Here(two_nodes("everybody", tmp_path), inventing), 1
    )
    logged = module.trainer.callback_metrics
    assert not loop.nodes.refused
    assert "train/better" not in logged


def test_limits_that_are_off_leave_the_model_to_the_liar(tmp_path, kind):
    name = kind("off", limits=Limits(share=None, norm=None))
    found, rows = accuracy(tmp_path, name, LIES["a huge update"], rounds=6)
    assert found < 0.4
    assert {row["reason"] for row in rows} == {""}


def test_a_claim_counts_as_the_limit_and_is_said(tmp_path, kind, caplog):
    """Sizes are 20, 30 and 40, the median 30; 0.3 of a round of ten is 9 * 0.3 / 0.7 = 3.857 medians."""
    there = Here(two_nodes(kind("ten"), tmp_path), LIES["a billion examples"])
    _, loop = deploy("ten", tmp_path / "server", there, 1)
    assert loop.clients[LIAR].num_examples == 115
    assert loop.clients[LIAR].share == 115 / (270 + 115)
    assert caplog.text.count("client c9, which claims 1,000,000,000 examples, has more than a share 0.3") == 1


def test_secure_sums_are_protected_from_claims_alone_and_say_so(tmp_path, kind, caplog):
    caplog.set_level("INFO")
    homes = {n: make_node(kind(f"ten{n}"), tmp_path / f"node{n}", (n, 3), secure=True) for n in range(3)}
    there = Here(homes, LIES["a billion examples"])
    _, loop = deploy("ten0", tmp_path / "server", there, 1, secure=True)
    assert "limits.norm is not held" in caplog.text
    assert loop.clients[LIAR].num_examples == 115
    assert [row["reason"] for row in rows_of(tmp_path / "server", LIAR)] == ["capped"]


@pytest.mark.slow  # whole runs
def test_a_reported_loss_neither_ends_a_run_nor_keeps_a_checkpoint(tmp_path, kind):
    for lie in ("a huge loss", "a loss below all"):
        folder = tmp_path / lie.replace(" ", "_")
        stop = EarlyStopping("fed/loss", patience=2, check_on_train_epoch_end=True)
        best = ModelCheckpoint(folder / "best", "{epoch}", "fed/loss", save_top_k=1)
        name = kind(f"watched {lie}", callbacks=[stop, best])
        _, loop = deploy(name, folder / "server", Here(two_nodes(name, folder), LIES[lie]))
        assert loop.rounds_done == 8
        assert [file.name for file in (folder / "best").iterdir()] == ["epoch=7.ckpt"]


def all_diverged(message):
    """All clients say that they have diverged."""
    visits = [
        one | {"diverged": "no number", "payload": None} for one in message.answer.header.get("visits", ())
    ]
    return with_header("visits", visits, Parcel(message.answer.header)) if visits else message.answer


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lost("visit", answer=None), "dropped: no answer in time, or the node is gone (50)"),
        (all_diverged, "diverged (50)"),
    ],
)
def test_a_deployment_without_work_ends_with_the_reasons_and_not_as_finished(tmp_path, kind, change, reason):
    with pytest.raises(ValueError, match=r"5 rounds in a row") as error:
        accuracy(tmp_path, kind("ten"), change)
    assert reason in str(error.value)
    assert "limits.empty_rounds" in str(error.value)
    entry = json.loads((tmp_path / "server" / "run.json").read_text())["commands"][-1]
    assert entry["state"] == "failed"
    assert {row["round"] for row in rows_of(tmp_path / "server", LIAR)} == set("0123")


def test_an_answer_in_between_counts_anew(tmp_path, kind):
    def moody(message):
        head = message.asked.header
        return None if head["action"] == "visit" and head["round"] % 5 < 4 else message.answer

    assert accuracy(tmp_path, kind("ten"), moody, rounds=10)[0] > 0.5
