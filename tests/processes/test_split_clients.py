"""Clients that several processes train together, each a part of the layers and of a batch, with one process's results."""

import os
import time

import lightning as L
import numpy as np
import pytest
import split_runs
import torch
from fleets import make_fleet
from peft import LoraConfig, get_peft_model
from plain_lightning import Block
from plain_lightning import trainer as quiet_trainer
from ranks import log_of, run_ranks, start_ranks, wait_for
from shared_runs import files_of
from split_runs import ALONE, assert_same_visits, close, in_processes, metrics_of
from tiny_world import HELDOUT, VOTES, fedlight, weights
from torch import nn
from torchmetrics import MeanSquaredError, SumMetric

from fedlight.callbacks.loop.parts.buffers import AveragedBuffers
from fedlight.callbacks.loop.parts.dpsgd import DPSGD
from fedlight.federation.aggregation import TrimmedMean
from fedlight.federation.algorithms.ditto import Ditto
from fedlight.federation.algorithms.scaffold import Scaffold
from fedlight.federation.byzantine.whole_updates import Krum
from fedlight.federation.channel import Wire
from fedlight.federation.codecs import TopK
from fedlight.processes.strategy import ClientParallelStrategy

pytestmark = [
    pytest.mark.slow,  # teams of processes
    pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before the epoch ended"),
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty"),
]
KINDS = {
    "fedavg": lambda: {"local_steps": None},
    "scaffold": lambda: {"algorithm": Scaffold()},
    "ditto": lambda: {"algorithm": Ditto(lam=0.5), "local_steps": None},
    "trimmed": lambda: {"aggregation": TrimmedMean(0.25)},
    "krum": lambda: {"aggregation": Krum(0.2), "clients_per_round": 6},
    "wire": lambda: {"channel": Wire(up=TopK(0.5))},
}
SHAPES = {ALONE: KINDS, (4, 2): KINDS, (3, 3): ("fedavg", "krum")}
"""Kinds by processes, and processes for each client; other shapes are below."""
SEVERAL = [(shape, name) for shape, names in SHAPES.items() if shape != ALONE for name in names]


class Layered(L.LightningModule):
    """Frozen layers with LoRA, and a trained head; a batch may have fewer rows than processes."""

    def __init__(self):
        super().__init__()
        net = nn.Module()
        net.first, net.layers = nn.Linear(4, 8), nn.ModuleList([Block() for _ in range(3)])
        net.forward = lambda x: x
        self.net = get_peft_model(net, LoraConfig(r=2, target_modules=["inner"], init_lora_weights=False))
        self.head = nn.Linear(8, 1)
        self.error = MeanSquaredError()

    def features(self, x):
        net = self.net.base_model.model
        x = net.first(x)
        for layer in net.layers:
            x = layer(x)
        return x

    def training_step(self, batch, batch_idx):
        return nn.functional.mse_loss(self.head(self.features(batch[0])), batch[1])

    def validation_step(self, batch, batch_idx):
        self.error(self.head(self.features(batch[0])), batch[1])
        self.log("val/error", self.error, on_epoch=True)

    def configure_optimizers(self):
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.05)


def train(folder, shape, rounds=3, model=Layered, wait=None, **settings):
    """Train in this process; return the weights, the memories, the number of frozen weights here, and the metrics."""
    several = {"wait_seconds": wait}
    module, loop, trainer = split_runs.train(folder, shape, model, rounds, several=several, **settings)
    state = {name: value.numpy() for name, value in trainer.strategy.lightning_module_state_dict().items()}
    memories = {client: loop.memory.load(client) for client in loop.clients}
    held = sum(getattr(p, "_local_tensor", p).numel() for p in module.net.parameters() if not p.requires_grad)
    return state, memories, held, metrics_of(trainer)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Folder of all kinds of runs in all shapes, and what each process returns: shape -> rank -> kind."""
    root = tmp_path_factory.mktemp("runs")

    def all_kinds(shape):
        return {name: train(root / f"{name}_{shape}", shape, **KINDS[name]()) for name in SHAPES[shape]}

    return root, {shape: in_processes(shape, all_kinds, root) for shape in SHAPES}


@pytest.mark.parametrize(("shape", "name"), SEVERAL, ids=str)
def test_every_process_ends_with_what_one_process_ends_with(runs, name, shape):
    root, results = runs
    alone, memories, held, metrics = results[ALONE][0][name]
    for rank in range(shape[0]):
        state, kept, part, values = results[shape][rank][name]
        close(state, alone)
        close(kept, memories)
        close(values, metrics)
        assert part < held * (0.85 if shape[1] == 2 else 0.7)  # the layers alone are split
        first = results[shape][0][name][0]
        assert all((state[weight] == first[weight]).all() for weight in state)
    assert_same_visits(*(files_of(root / f"{name}_{each}")["visits.csv"] for each in (shape, ALONE)))


@pytest.mark.parametrize(("first", "then"), [(ALONE, (2, 2)), ((2, 2), ALONE)], ids=str)
def test_a_run_goes_on_with_other_numbers(runs, tmp_path, first, then):
    settings = KINDS["scaffold"]
    in_processes(first, lambda shape: train(tmp_path, shape, rounds=2, **settings()), tmp_path)
    ended = in_processes(then, lambda shape: train(tmp_path, shape, resumes=True, **settings()), tmp_path)
    close(ended[0][0], runs[1][ALONE][0]["scaffold"][0])


COMMANDS = {
    "selector": [
        *("selector.yaml", "--trainer.max_epochs=2", "--model.execution.gradient_checkpointing=true"),
        *(
            f"--data.source={VOTES}",
            f"--data.split.test_source={HELDOUT}",
            "--data.format.twins_together=true",
        ),
        *("--data.batch_size=6", "--model.orders=both"),  # half of a batch has an order alone
    ],
    # Clients see their few pairs several times, whose reference is known then.
    "dpo": [
        *("feddpo.yaml", "--trainer.max_epochs=1", "--model.dtype=bf16", "--data.batch_size=3"),
        *("--federated.local_steps=16", f"--data.source={VOTES}", f"--data.split.test_source={HELDOUT}"),
    ],
    "fewfedpit": [
        "fewfedpit.yaml",
        "--trainer.max_epochs=1",
        "--data.synthesis.number=2",
        "--model.adapter=null",
        "--model.merge_adapter=false",
    ],
}


def command(name, model, folder, *more):
    config, *changes = COMMANDS[name]
    return [
        *("fit", f"--config={config}", "--trainer.accelerator=cpu", f"--trainer.default_root_dir={folder}"),
        *(f"--model.model={model}", "--model.lora.dropout=0", "--federated.clients_per_round=2", *changes),
        *([] if "--federated.local_steps" in " ".join(changes) else ["--federated.local_steps=2"]),
        *more,
    ]


def commanded(number, folder, arguments):
    outcomes = run_ranks(number, lambda rank: vars(fedlight(*arguments)), folder.with_suffix(".logs"))
    assert [outcome["code"] for outcome in outcomes] == [0] * number, outcomes[0]["err"]
    return outcomes


IN_TWO = (
    *("--trainer.strategy=fedlight.ClientParallelStrategy", "--trainer.strategy.processes_per_client=2"),
    "--trainer.devices=2",
)


@pytest.mark.parametrize("name", COMMANDS)
def test_language_models_are_tuned_as_in_one_process(tiny_model, tmp_path, name):
    for label, number, more in (("one", 1, ()), ("two", 2, IN_TWO)):
        outcomes = commanded(number, tmp_path / label, command(name, tiny_model, tmp_path / label, *more))
    one, two = (weights(tmp_path / label) for label in ("one", "two"))
    assert one.keys() == two.keys()
    for key in one:
        np.testing.assert_allclose(one[key], two[key], atol=2e-2 if name == "dpo" else 1e-3, err_msg=key)
    assert not outcomes[1]["out"]


def test_predictions_are_written_once(tiny_model, tmp_path):
    source = "--data.source=toy:prompts?size=6"
    arguments = [
        *("predict", "--config=completions.yaml", "--trainer.accelerator=cpu", f"--model.model={tiny_model}"),
        *("--model.adapter=null", source, "--model.completions.max_new_tokens=4", "--data.eval_batch_size=2"),
    ]
    written = {}
    for label, number, more in (("one", 1, ()), ("four", 4, (*IN_TWO[:2], "--trainer.devices=4"))):
        folder = f"--trainer.default_root_dir={tmp_path / label}"
        commanded(number, tmp_path / label, [*arguments, folder, *more])
        [file] = (tmp_path / label).rglob("*.jsonl")
        written[label] = file.read_text()
    assert written["one"] == written["four"]
    assert len(written["one"].splitlines()) == 6


class Dies(Layered):
    how = staticmethod(lambda: os._exit(1))

    def training_step(self, batch, batch_idx):
        if self.trainer.global_rank == 1 and self.trainer.current_epoch == 1:
            self.how()
        return super().training_step(batch, batch_idx)


class DiesInValidation(Layered):
    def validation_step(self, batch, batch_idx):
        if self.trainer.global_rank == 1 and self.trainer.current_epoch == 1:
            os._exit(1)
        super().validation_step(batch, batch_idx)


class Fails(Dies):
    @staticmethod
    def how():
        raise RuntimeError("Connection to the store refused")


class Hangs(Dies):
    how = staticmethod(lambda: time.sleep(60))


@pytest.mark.parametrize(
    ("model", "named"),
    [
        (Dies, "process 1 is gone"),
        (DiesInValidation, "process 1 is gone"),
        (Fails, "process 1 has failed (RuntimeError: Connection to the store refused)"),
        (Hangs, "another process is not here after 4 seconds"),
    ],
)
def test_a_lost_process_ends_the_round_of_its_client_with_one_line(tmp_path, model, named):
    wait = 4.0 if model is Hangs else None
    children = start_ranks(4, lambda rank: train(tmp_path, (4, 2), model=model, wait=wait), tmp_path / "logs")
    codes = wait_for([children[0], *children[2:]], 45)
    wait_for([children[1]], 0)  # which may hang still
    assert codes == [1, 1, 1]
    for rank, expected in ((0, named), (2, "process 0 or another one has ended")):
        assert f"ConnectionError: {expected}" in log_of(tmp_path / "logs", rank).splitlines()[-1]
        assert "start again from the newest checkpoint" in log_of(tmp_path / "logs", rank).splitlines()[-1]


class ByToken(Layered):
    """A loss that is no mean over rows after the first steps."""

    steps = 0

    def training_step(self, batch, batch_idx):
        self.steps += 1
        sizes = torch.ones(len(batch[0]), dtype=torch.float64)
        if self.steps > 4:  # the first batch is computed in three ways
            sizes += torch.arange(len(batch[0]))
        errors = (self.head(self.features(batch[0])) - batch[1]).square().mean(1)
        return (errors * sizes).sum() / sizes.sum()


class Experts(Layered):
    """Layers in lists of lists, and trained weights of which each row reaches one."""

    def __init__(self):
        super().__init__()
        net = self.net.base_model.model
        net.more = nn.ModuleList([nn.ModuleList([nn.Linear(8, 8).requires_grad_(False)])])
        self.experts = nn.ParameterList([torch.full((8,), float(k + 1)) for k in range(2)])

    def training_step(self, batch, batch_idx):
        x = self.net.base_model.model.more[0][0](self.features(batch[0]))
        chosen = (batch[0][:, 0] > 0).tolist()
        rows = [row * self.experts[which] for row, which in zip(x, chosen, strict=True)]
        return nn.functional.mse_loss(self.head(torch.stack(rows)), batch[1])


class Noisy(Layered):
    """A hook between steps that draws from the global stream."""

    def on_train_batch_start(self, batch, batch_idx):
        batch[0].add_(0.1 * torch.randn_like(batch[0]))


class Counts(L.Callback):
    """A metric that is no part of the module, and one that is made in a hook."""

    def on_validation_start(self, trainer, module):
        self.metrics = [self.__dict__.setdefault("kept", SumMetric()), SumMetric()]

    def on_validation_batch_end(self, trainer, module, outputs, batch, batch_idx, dataloader_idx=0):
        for metric in self.metrics:
            metric.update(len(batch[0]))

    def on_validation_epoch_end(self, trainer, module):
        self.counted = [float(metric.compute()) for metric in self.metrics]


@pytest.mark.parametrize("model", [Experts, Noisy])
def test_rows_that_reach_unlike_weights_and_draws_between_steps(tmp_path, model):
    def work(shape):
        counts = Counts()
        folder = tmp_path / f"{shape}"
        state, *_ = train(folder, shape, model=model, local_steps=None, callbacks=[counts])
        return state, counts.counted

    [(alone, expected)] = in_processes(ALONE, work, tmp_path)
    for state, counted in in_processes((2, 2), work, tmp_path):
        close(state, alone)
        assert counted == expected
        assert counted[1] == 120


class Skips(Layered):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        return None if self.trainer.global_rank else loss


class Thaws(Layered):
    """The whole net is trained, though it was frozen when the layers were split."""

    def on_fit_start(self):
        self.net.requires_grad_(True)
        weight = self.net.base_model.model.layers[0].inner.base_layer.weight
        self.trainer.optimizers[0].add_param_group({"params": [weight]})


@pytest.mark.parametrize(
    ("how", "complaint"),
    [
        (lambda folder: {"model": ByToken, "local_steps": 8}, r"mean over its rows .*: ByToken has to"),
        (lambda folder: {"model": Skips}, r"Skips.training_step returned None for a part of a batch's rows"),
        (lambda folder: {"model": Thaws}, r"the optimizer holds .*base_layer.weight, which was frozen when"),
        (
            lambda folder: {"fleet": make_fleet(folder, slow={})},
            "a fleet emulates small.*processes_per_client",
        ),
        (lambda folder: {"parts": [DPSGD(1.0, 1.0, delta=0.001)]}, "DPSGD adds noise to the gradient"),
        (lambda folder: {"parts": [AveragedBuffers()]}, "AveragedBuffers needs the statistics of whole"),
    ],
    ids=["by_token", "skips", "thaws", "fleet", "dpsgd", "buffers"],
)
def test_what_cannot_be_split_is_refused_in_every_process(tmp_path, how, complaint):
    def tried(shape):
        with pytest.raises(ValueError, match=complaint):
            train(tmp_path, shape, **how(tmp_path))

    in_processes((2, 2), tried, tmp_path)


@pytest.mark.parametrize(
    ("setting", "complaint"),
    [
        ("--model.base=nf4", "is quantized (uint8), and torch cannot split it: load the base without quan"),
        ("--federated.clients_at_once=2", "share a batch: set --federated.clients_at_once 1, or set tra"),
    ],
    ids=["nf4", "clients_at_once"],
)
def test_settings_of_language_models_are_refused(tiny_model, tmp_path, setting, complaint):
    arguments = command("selector", tiny_model, tmp_path, *IN_TWO, setting)
    for outcome in run_ranks(2, lambda rank: vars(fedlight(*arguments)), tmp_path / "logs"):
        assert outcome["code"] == 2
        assert complaint in outcome["err"]


def test_numbers_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="processes_per_client=0"):
        ClientParallelStrategy(processes_per_client=0)
    with pytest.raises(ValueError, match=r"split_trained=true .*processes_per_client to 2 or more"):
        ClientParallelStrategy(split_trained=True)
    with pytest.raises(ValueError, match="3 processes cannot train each client in groups of"):
        quiet_trainer(1, strategy=ClientParallelStrategy(processes_per_client=2), devices=3)
