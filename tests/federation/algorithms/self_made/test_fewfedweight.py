import math
from collections import defaultdict
from itertools import pairwise

import lightning as L
import pytest
import torch
from nested import nested
from plain_lightning import trainer
from refusals import refusal
from tiny_world import write_rows
from torch.nn import functional

from fedlight import FederatedLoop, InstructionDataModule, Lora, Optimization, Partition, SFTModule
from fedlight.datamodules.rows.rows import load_rows
from fedlight.datamodules.synthesis import PseudoResponses, SyntheticInstructionDataModule
from fedlight.federation import Client, Visit, Work
from fedlight.federation.algorithm import aggregation_of
from fedlight.federation.algorithms.self_made import FewFedWeight

LR = 0.05


def combined(algorithm, clients):
    """The combined movement of clients given by share, loss and one number that moved."""
    total = aggregation_of(algorithm, num_clients=10)
    for name, (share, loss, moved) in clients.items():
        movement = {"w": torch.tensor([moved], dtype=torch.float64)}
        visiting = algorithm.start_visit(Visit(name, 1), Client(name, 1, share), {})
        total.add(algorithm.finish_visit(visiting, movement, Work(1, 0.1, loss, 1.0)))
    return total.result()["w"].item()


CLIENTS = {"a": (0.2, 1.0, 3.0), "b": (0.1, 0.5, -1.0), "c": (0.4, 2.0, 7.0)}


def test_clients_count_by_share_and_loss_and_with_equal_losses_as_in_normalized_fedavg():
    weights = [0.2 * math.exp(-1), 0.1 * math.exp(-0.5), 0.4 * math.exp(-2)]
    expected = (3 * weights[0] - weights[1] + 7 * weights[2]) / sum(weights)
    assert combined(FewFedWeight(), CLIENTS) == pytest.approx(expected, rel=1e-12)
    same = {name: (share, 1.7, moved) for name, (share, _, moved) in CLIENTS.items()}
    assert combined(FewFedWeight(), same) == pytest.approx((0.2 * 3 - 0.1 + 0.4 * 7) / 0.7, rel=1e-12)
    for weighting, expected in (("normalized", 2.7 / 0.7 + 0.6 / 0.7), ("uniform", 3.0), ("unbiased", 11.0)):
        assert combined(FewFedWeight(weighting), CLIENTS) == pytest.approx(expected, rel=1e-12)


def test_losses_that_leave_no_weight_divide_nothing_by_zero():
    lost = {
        name: (share, loss, moved)
        for (name, (share, _, moved)), loss in zip(CLIENTS.items(), (1e4, 2e4, math.inf), strict=True)
    }
    assert combined(FewFedWeight(), lost) == pytest.approx((0.2 * 3 - 0.1 + 0.4 * 7) / 0.7, rel=1e-12)
    with refusal("weight nan of client a is not finite"):
        combined(FewFedWeight(), {"a": (1.0, math.nan, 1.0)})


def test_what_is_misspelt_or_cannot_make_candidates_is_refused(tmp_path):
    with refusal("weighting='performence' is not one of"):
        FewFedWeight("performence")
    data = InstructionDataModule(rows(tmp_path), **nested(InstructionDataModule, **SETTINGS))
    with refusal(r"FewFedWeight has clients make training data.*SyntheticInstructionDataModule"):
        fit(data, tmp_path)


SETTINGS = {
    "template": "toy_generation",
    "columns": {"prompt": "prompt", "response": "output"},
    "partition": Partition("iid", num_clients=3),
    "val_share": 0.0,
    "batch_size": 3,
}


def rows(folder):
    prompts = load_rows("toy:prompts?size=14", "train")
    made = [{**row, "output": row["prompt"].split(" .")[0]} for row in prompts]
    return write_rows(folder / "rows.jsonl", made)


class Recorder(L.Callback):
    """The global state before each round, and the batches of each visit."""

    def __init__(self):
        self.states, self.batches = [], []

    def on_train_epoch_start(self, trainer, pl_module):
        self.states.append(state_of(pl_module))
        self.batches.append(defaultdict(list))

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        (loop,) = (one for one in trainer.callbacks if isinstance(one, FederatedLoop))
        assert loop.visit.split == "mixed"
        self.batches[-1][loop.visit.client_id].append(
            {name: part.cpu().clone() for name, part in batch.items()}
        )

    def on_train_end(self, trainer, pl_module):
        self.states.append(state_of(pl_module))


def state_of(module):
    return {name: weight.cpu().clone() for name, weight in module.state_dict().items()}


def fit(data, folder, weighting="performance", rounds=2):
    module = SFTModule("toy", lora=Lora(dropout=0.0), lr=LR, optimizer=Optimization(name="SGD"), dtype="fp32")
    loop, recorder = FederatedLoop(FewFedWeight(weighting), clients_per_round=2), Recorder()
    trainer(rounds, [loop, recorder], default_root_dir=folder, limit_val_batches=0).fit(module, data)
    return module, loop, recorder


def make_data(folder):
    return SyntheticInstructionDataModule(
        rows(folder),
        PseudoResponses(max_response_tokens=40),
        **nested(SyntheticInstructionDataModule, **SETTINGS),
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    return folder, *fit(make_data(folder), folder)


def loss_of(module, batch):
    """The mean over examples of weight times mean token loss, from the logits of whole texts."""
    logits = module.network(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    before, labels = logits[:, :-1].transpose(1, 2), batch["labels"][:, 1:]
    tokens = functional.cross_entropy(before, labels, reduction="none", ignore_index=-100)
    each = tokens.sum(1) / (labels != -100).sum(1)
    return (each * batch.get("weights", torch.ones(len(each)))).mean()


def trained_from(module, state, batches):
    """Plain SGD, and the mean loss on the way."""
    module.load_state_dict(state)
    optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=LR)
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss = loss_of(module, batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return state_of(module), sum(losses) / len(losses)


def test_a_run_equals_its_rounds_written_out(run):
    _, module, loop, recorder = run
    module.network.train()
    for (before, after), batches in zip(pairwise(recorder.states), recorder.batches, strict=True):
        assert len(batches) == 2
        expected = {name: torch.zeros_like(value, dtype=torch.float64) for name, value in before.items()}
        total = 0.0
        for client, own in batches.items():
            state, loss = trained_from(module, before, own)
            weight = loop.clients[client].share * math.exp(-loss)
            total += weight
            for name, value in state.items():
                expected[name] += weight * (value.double() - before[name].double())
        moved = 0.0
        for name, value in after.items():
            found = value.double() - before[name].double()
            torch.testing.assert_close(found, expected[name] / total, rtol=1e-3, atol=1e-6)
            moved += float(expected[name].abs().sum())
        assert moved > 0
    metrics = module.trainer.callback_metrics  # all that survive are trained on
    assert 0 < metrics["fed/synthetic/survived"] == metrics["fed/synthetic/chosen"] <= 10


def test_the_same_run_again_and_with_the_record_of_the_first_gives_the_same_bits(run, tmp_path):
    folder, _, _, recorder = run
    _, _, again = fit(make_data(tmp_path), tmp_path)
    _, _, read = fit(make_data(folder), folder)
    for other in (again, read):
        assert all(torch.equal(value, other.states[-1][name]) for name, value in recorder.states[-1].items())
