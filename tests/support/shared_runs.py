"""Small federated runs of many kinds, and what they leave: by it, runs in one process and in several are compared."""

import csv
import hashlib
from dataclasses import dataclass, field
from pathlib import Path

import bitsandbytes  # noqa: F401  imported once, and not in each process
import dp_accounting.pld  # noqa: F401
import lightning as L
import numpy as np
import torch
from fleets import make_fleet
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from memories import loop_with
from peft import LoraConfig, get_peft_model
from plain_lightning import Backwards, Numbers, Regression, ten_clients
from ranked import RANKS, Ranked
from stacked import Points
from synthesizing import Synthesizing
from tastes import Adapters, Tastes

from fedlight.callbacks.logs.visit_log import VisitLog
from fedlight.callbacks.loop.parts.buffers import AveragedBuffers, LocalBuffers
from fedlight.callbacks.loop.parts.limits import Limits
from fedlight.callbacks.loop.parts.optimizers import StepSchedules
from fedlight.callbacks.loop.parts.product_error import ProductError
from fedlight.datamodules.federated.by_client import FederatedWrapper
from fedlight.devices.fleet import Fleet
from fedlight.federation.aggregation import TrimmedMean
from fedlight.federation.algorithms.assignments import NearestGroups, SoftGroups
from fedlight.federation.algorithms.ditto import Ditto
from fedlight.federation.algorithms.fedavg import FedAvg
from fedlight.federation.algorithms.fedbiscuit import FedBiscuit
from fedlight.federation.algorithms.fedprox import FedProx
from fedlight.federation.algorithms.fedrep import FedRep
from fedlight.federation.algorithms.global_then_local import GlobalThenLocal
from fedlight.federation.algorithms.local_only import LocalOnly
from fedlight.federation.algorithms.lora.fedsa_lora import FedSALoRA
from fedlight.federation.algorithms.lora.ffa_lora import FFALoRA
from fedlight.federation.algorithms.lora.flexlora import FlexLoRA
from fedlight.federation.algorithms.lora.hetlora import HetLoRA
from fedlight.federation.algorithms.lora.product_average import ProductAverage
from fedlight.federation.algorithms.lora.ro_lora import RoLoRA
from fedlight.federation.algorithms.scaffold import Scaffold
from fedlight.federation.algorithms.self_made.fewfedpit import FewFedPIT
from fedlight.federation.asynchronous.fedbuff import FedBuff
from fedlight.federation.channel import Wire
from fedlight.federation.client_state import ClientMemories
from fedlight.federation.codecs import Quantize, TopK
from fedlight.federation.forward.fedkseed import FedKSeed
from fedlight.federation.forward.zeroth_order import ZerothOrder
from fedlight.federation.privacy import ClipAndNoise, PrivateMean
from fedlight.federation.server import FedAdam


class Scheduled(Regression):
    """A schedule of each kind: one that steps in a visit, one by round on top."""

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.5)
        steps = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 7], gamma=0.5)
        rounds = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return [optimizer], [
            {"scheduler": steps, "interval": "step"},
            {"scheduler": rounds, "interval": "epoch"},
        ]


class ByHand(Regression):
    """Manual optimization with two optimizers, the second of which steps every other batch."""

    def __init__(self):
        super().__init__(dropout=0.0)
        self.automatic_optimization = False

    def configure_optimizers(self):
        return [torch.optim.SGD(part.parameters(), lr=0.05) for part in (self.net[0], self.net[3])]

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            optimizer.step()
        return loss


class Adapted(Regression):
    """LoRA on both layers."""

    def __init__(self):
        super().__init__(dropout=0.0)
        config = LoraConfig(r=2, target_modules=["0", "3"], init_lora_weights=False)
        self.net = get_peft_model(self.net, config)

    def configure_optimizers(self):
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.05)


class Exploding(Regression):
    """The training of one client gives no numbers in the second round."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        visit = self.loop.visit
        return loss * float("nan") if self.loop.rounds_done == 1 and visit.client_id == "c4" else loss


class Choosing(Synthesizing):
    """Candidates that are chosen in any of the processes."""

    def choices_made(self):
        return {client: chosen.tolist() for client, chosen in self.chosen.items()}

    def add_choices(self, choices):
        self.seen = sorted({*getattr(self, "seen", ()), *choices})


class LoggingFedAvg(FedAvg):
    """Logs something in every visit, of which the last counts, and once a round."""

    def check(self, federation):
        super().check(federation)
        self.federation = federation

    def finish_visit(self, visiting, movement, work):
        self.federation.log({"last": work.mean_loss})
        return super().finish_visit(visiting, movement, work)


class Forgetful(Scaffold):
    """A client's memory is large after its second visit, and empty after its third."""

    def finish_visit(self, visiting, movement, work):
        update = super().finish_visit(visiting, movement, work)
        memory = visiting.client.memory
        memory["visits"] = memory.get("visits", 0) + 1
        if memory["visits"] == 2:
            memory["much"] = torch.zeros(1000)
        if memory["visits"] == 3:
            memory.clear()
        return update


MEMORY = 196
"""Bytes of a client's memory under SCAFFOLD."""


@dataclass
class Kind:
    """A run: arguments of the loop and of the trainer, and functions that make the rest."""

    loop: dict = field(default_factory=dict)
    model: object = Regression
    data: object = None
    settings: dict = field(default_factory=dict)
    callbacks: object = tuple
    rounds: int = 3
    clients: object = ten_clients


def pairs(dataset):
    """Clients of 2 to 20 examples, so that no batch has one example, of which a batch norm has no variance."""
    cuts = np.cumsum([0, *range(2, 22, 2)])
    return {f"c{i}": np.arange(cuts[i], cuts[i + 1]) for i in range(10)}


NO_VALIDATION = {"limit_val_batches": 0}  # of data without any for it
DEVICES = {"slow": {"tflops": 0.001}, "small": {"memory_gib": 0.00002}, "fast": {}}


def write_devices(root):
    """Write the files of devices, once, before several processes read them."""
    make_fleet(Path(root) / "devices", **DEVICES)


def growing(root, memories):
    """Return a run with four clients' memories in round 1, six in round 2, and room in RAM for fewer."""
    limit = memories * MEMORY / 2**20
    settings = {"algorithm": Scaffold(), "memory": ClientMemories(limit_mib=limit)}
    return Kind(settings, lambda: Regression(optimizer="SGD"))


KINDS = {
    "fedavg": lambda root: Kind({"algorithm": FedAvg()}),
    "one_pass": lambda root: Kind({"local_steps": None, "clients_per_round": 5, "server": FedAdam()}),
    "backwards": lambda root: Kind({"algorithm": Backwards()}),
    "fedprox": lambda root: Kind({"algorithm": FedProx(mu=0.5)}),
    "scaffold": lambda root: Kind(
        {"algorithm": Scaffold(), "memory": ClientMemories(limit_mib=0), "clients_per_round": 6},
        lambda: Regression(optimizer="SGD"),
    ),
    "one_over_the_limit": lambda root: growing(root, 4.5),
    "all_over_the_limit": lambda root: growing(root, 5),
    "emptied_on_disk": lambda root: Kind(
        {"algorithm": Forgetful(), "memory": ClientMemories(limit_mib=3000 / 2**20), "clients_per_round": 10},
        lambda: Regression(optimizer="SGD"),
        rounds=5,
    ),
    "fedbiscuit": lambda root: Kind(
        {"algorithm": FedBiscuit(1, 2), "clients_per_round": 5}, Adapters, Tastes, rounds=5
    ),
    "fewfedpit": lambda root: Kind({"algorithm": FewFedPIT(beta=0.25)}, data=Choosing),
    "ditto": lambda root: Kind({"algorithm": Ditto(0.5, 2), "clients_per_round": 5}),
    "fedrep": lambda root: Kind({"algorithm": FedRep(["net.3"]), "clients_per_round": 5}),
    "global_then_local": lambda root: Kind({"algorithm": GlobalThenLocal(1)}),
    "forward": lambda root: Kind(
        {"forward": ZerothOrder(perturbations=2)}, lambda: Regression(optimizer="SGD")
    ),
    "fedkseed": lambda root: Kind(
        {"forward": ZerothOrder(), "algorithm": FedKSeed(16)}, lambda: Regression(optimizer="SGD")
    ),
    "nearest": lambda root: Kind(
        {"algorithm": FedBiscuit(1, 2, NearestGroups(), group_by="own")},
        lambda: Adapters(2),
        Tastes,
        rounds=5,
    ),
    "soft": lambda root: Kind(
        {"algorithm": FedBiscuit(1, 2, SoftGroups(), group_by="own")}, lambda: Adapters(2), Tastes, rounds=5
    ),
    "hetlora": lambda root: Kind(
        {"algorithm": HetLoRA(gamma=0.5, lam=0.5, ranks=RANKS)}, Ranked, Points, NO_VALIDATION
    ),
    "flexlora": lambda root: Kind(
        {"algorithm": FlexLoRA(missing="skip", ranks=RANKS)}, Ranked, Points, NO_VALIDATION
    ),
    "forward_ranks": lambda root: Kind(
        {"algorithm": HetLoRA(gamma=0.5, ranks=RANKS), "forward": ZerothOrder()},
        Ranked,
        Points,
        NO_VALIDATION,
    ),
    "local_only": lambda root: Kind({"algorithm": LocalOnly()}),
    "adapters": lambda root: Kind({"algorithm": FedAvg()}, Adapted),
    "private_adapters": lambda root: Kind({"aggregation": PrivateMean(1.0, 0.5, delta=0.01)}, Adapted),
    "ffa_lora": lambda root: Kind({"algorithm": FFALoRA()}, Adapted),
    "ro_lora": lambda root: Kind({"algorithm": RoLoRA(), "channel": Wire(down=Quantize("fp16"))}, Adapted),
    "fedsa_lora": lambda root: Kind({"algorithm": FedSALoRA()}, Adapted),
    "product_average": lambda root: Kind({"algorithm": ProductAverage(0.95)}, Adapted),
    "average_buffers": lambda root: Kind(
        {"parts": [AveragedBuffers()]}, lambda: Regression(norm=True), clients=pairs
    ),
    "local_buffers": lambda root: Kind(
        {"parts": [LocalBuffers()]}, lambda: Regression(norm=True), clients=pairs
    ),
    "schedules": lambda root: Kind({"local_steps": 4}, Scheduled, rounds=4),
    "restarted_schedules": lambda root: Kind(
        {"local_steps": None, "parts": [StepSchedules("restart")]}, Scheduled
    ),
    "fleet": lambda root: Kind(
        {
            "fleet": Fleet(
                {str(root / "devices" / f"{name}.yaml"): 1.0 for name in DEVICES}, 0, over_selection=1.5
            ),
            "clients_per_round": 6,
        }
    ),
    "buffered": lambda root: Kind(
        {
            "algorithm": FedProx(mu=0.5),
            "fleet": Fleet(
                {str(root / "devices" / f"{name}.yaml"): 1.0 for name in DEVICES}, buffered=FedBuff(3)
            ),
            "channel": Wire(up=[TopK(0.3, error_feedback=True), Quantize("int8")]),
            "clients_per_round": 6,
        },
        rounds=5,
    ),
    "wire": lambda root: Kind(
        {"channel": Wire(up=[TopK(0.3, error_feedback=True), Quantize("int8")], down=Quantize("fp16"))}
    ),
    "private_wire": lambda root: Kind({"channel": Wire(up=ClipAndNoise(1.0, 0.1, delta=0.01))}),
    "private_mean": lambda root: Kind({"aggregation": PrivateMean(1.0, 0.5, delta=0.01)}),
    "in_turn": lambda root: Kind({"aggregation": PrivateMean(1.0, 0.5, delta=0.01, bands=2)}),
    "trimmed_mean": lambda root: Kind({"aggregation": TrimmedMean(0.3), "clients_per_round": 5}),
    "clipped": lambda root: Kind({"limits": Limits(norm=1.0, enforce=True), "clients_per_round": 5}),
    "left_out": lambda root: Kind(
        {"limits": Limits(share=None, norm=1.01, action="leave_out", enforce=True)}
    ),
    "accumulation": lambda root: Kind(settings={"accumulate_grad_batches": 2}),
    "by_hand": lambda root: Kind(model=ByHand),
    "one_client": lambda root: Kind({"clients_per_round": 1}),
    "diverging": lambda root: Kind({"clients_per_round": 10}, Exploding),
    "logging": lambda root: Kind({"algorithm": LoggingFedAvg()}),
    "early_stopping": lambda root: Kind(
        callbacks=lambda: [EarlyStopping("val/loss", patience=1, mode="max")], rounds=6
    ),
}


def train(name, root, label, processes, resumes=False, rounds=None, kind=None):
    """Train one kind of run in this process, of ``processes``, in ``root/label/name``; return what it leaves."""
    kind, folder = kind or KINDS[name](root), folder_of(root, name, label)
    ckpt_path = newest(folder) if resumes else None
    L.seed_everything(0, verbose=False)
    fleet = kind.loop.get("fleet")
    parts = [] if fleet and fleet.buffered else [ProductError()]
    settings = {"clients_per_round": 4, "local_steps": 2} | kind.loop
    settings["parts"] = parts + kind.loop.get("parts", [])
    model, loop = kind.model(), loop_with(**settings)
    model.loop = loop
    data = kind.data() if kind.data else FederatedWrapper(Numbers(), kind.clients)
    saved = ModelCheckpoint(folder / "checkpoints", filename="{epoch}", save_top_k=-1)
    trainer = L.Trainer(
        max_epochs=rounds or kind.rounds,
        accelerator="cpu",
        default_root_dir=folder,
        callbacks=[loop, VisitLog(), saved, *kind.callbacks()],
        logger=CSVLogger(folder, "metrics", version=f"resumed_{resumes}"),
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        **({"strategy": "client_parallel", "devices": processes} if processes > 1 else {}),
        **kind.settings,
    )
    trainer.fit(model, data, ckpt_path=ckpt_path, weights_only=True if ckpt_path else None)
    return {
        "weights": digest(dict(model.state_dict())),
        "steps": trainer.global_step,
        "memories": digest({client: loop.memory.load(client) for client in loop.clients}),
        "server": digest(loop.remembered()["server"] | loop.remembered()["algorithm"]),
        "clock": loop.virtual_seconds,
        "rows": digest([{k: v for k, v in row.items() if k != "seconds"} for row in loop.visit_records]),
        "rates": [group["lr"] for optimizer in trainer.optimizers for group in optimizer.param_groups],
    }


def files_of(folder):
    """Return what is in the tables of a run but for wall seconds, and in its last checkpoint."""
    tables = {}
    for file in sorted(folder.rglob("*.csv")):
        rows = list(csv.DictReader(file.read_text().splitlines()))
        tables[str(file.relative_to(folder))] = [
            {name: value for name, value in row.items() if name != "seconds"} for row in rows
        ]
    return tables


def newest(folder):
    """Return the newest checkpoint of a run."""
    return max(folder.glob("checkpoints/*.ckpt"), key=lambda file: int(file.stem.partition("=")[2]))


def digest(value):
    """Return a digest of nested values and tensors, bit by bit."""
    return hashlib.blake2b(repr(_plain(value)).encode(), digest_size=12).hexdigest()


def _plain(value):
    if isinstance(value, torch.Tensor):
        return str(value.dtype), tuple(value.shape), value.detach().cpu().contiguous().numpy().tobytes()
    if isinstance(value, dict):
        return [
            (str(key), _plain(item)) for key, item in sorted(value.items(), key=lambda pair: str(pair[0]))
        ]
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value.hex() if isinstance(value, float) else value


def folder_of(root, name, label):
    """Return the folder of a run."""
    return Path(root) / str(label) / name
