"""Deployments in this process: a server and nodes of the small runs of `shared_runs`, joined by messages in memory."""

import csv
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import BaseFinetuning, GradientAccumulationScheduler, ModelCheckpoint
from memories import loop_with
from nested import nested
from plain_lightning import Numbers, Regression
from ranked import Ranked
from safetensors.torch import load
from shared_runs import KINDS, Adapted, Choosing, Kind, digest
from stacked import Points

from fedlight.callbacks.logs.visit_log import VisitLog
from fedlight.callbacks.loop.parts.dpsgd import DPSGD
from fedlight.callbacks.loop.parts.limits import Limits
from fedlight.callbacks.loop.parts.product_error import ProductError
from fedlight.datamodules.clients.partition import Partition
from fedlight.datamodules.federated.by_client import FederatedWrapper
from fedlight.datamodules.rows.split import Split
from fedlight.datamodules.synthesis.datamodule import SyntheticInstructionDataModule
from fedlight.datamodules.synthesis.prompts import InstructionPrompt, ResponsePrompt, SelfGenerationPrompts
from fedlight.datamodules.synthesis.pseudo_responses import PseudoResponses
from fedlight.datamodules.synthesis.self_generation import NewInstructions, NewResponses, SelfGeneration
from fedlight.federation.aggregation import CoordinateMedian
from fedlight.federation.algorithms.ditto import Ditto
from fedlight.federation.algorithms.fedavg import FedAvg
from fedlight.federation.algorithms.fedprox import FedProx
from fedlight.federation.algorithms.fedrep import FedRep
from fedlight.federation.algorithms.lora.fedsa_lora import FedSALoRA
from fedlight.federation.algorithms.lora.flexlora import FlexLoRA
from fedlight.federation.algorithms.lora.hetlora import HetLoRA
from fedlight.federation.algorithms.scaffold import Scaffold
from fedlight.federation.algorithms.self_made.fedmit import FedMIT
from fedlight.federation.algorithms.self_made.fewfedpit import FewFedPIT
from fedlight.federation.algorithms.self_made.fewfedweight import FewFedWeight
from fedlight.federation.algorithms.self_made.local_self_generation import LocalSelfGeneration
from fedlight.federation.byzantine.whole_updates import Krum
from fedlight.federation.channel import Wire
from fedlight.federation.client import Client
from fedlight.federation.codecs import Quantize, TopK
from fedlight.federation.forward.zeroth_order import ZerothOrder
from fedlight.federation.privacy import ClipAndNoise, PrivateMean
from fedlight.federation.server import FedAdam
from fedlight.flower import node as of_node
from fedlight.flower import server as of_server
from fedlight.flower.identity import signed
from fedlight.flower.loops.node_memories import NodeMemories, Versions
from fedlight.flower.messages import FORMAT, Parcel, Refused, read_header, write_header, write_payload
from fedlight.flower.node import Node
from fedlight.flower.nodes import NO_ANSWER
from fedlight.flower.parts import Parts
from fedlight.modules.sft import SFTModule
from fedlight.support.settings_record import digest as digest_of

pytest.importorskip("cryptography", reason="needs fedlight[flower]")  # a node signs with it


class Paced(Regression):
    """A schedule that steps once a round, and a rate that the module takes from the number of the round."""

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.5)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]

    def training_step(self, batch, batch_idx):
        left = 1 - self.trainer.current_epoch / (2 * self.trainer.max_epochs)
        return left * super().training_step(batch, batch_idx)


class Plateau(Regression):
    """A schedule that begins with an infinite loss."""

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "fed/loss"}}


class Thawing(BaseFinetuning):
    """A layer that joins the optimizer in the first round."""

    def freeze_before_training(self, pl_module):
        self.freeze(pl_module.net[0])

    def finetune_function(self, pl_module, epoch, optimizer):
        if epoch == 0:
            self.unfreeze_and_add_param_group(pl_module.net[0], optimizer, lr=0.02)


class OfTrained(Regression):
    def configure_optimizers(self):
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.05)


class Frozen(Regression):
    """A frozen layer that the optimizer holds, so it is sent."""

    def __init__(self):
        super().__init__()
        self.net[0].requires_grad_(False)


def writing(algorithm, by=None, **loop):
    """A run of a language model whose clients write their own data, some candidates of which are dropped and replaced."""
    example = "POST : {instruction} {input}\nCHOICE : {response}\n"
    prompts = SelfGenerationPrompts(
        InstructionPrompt("", example, "POST :", ("CHOICE",), "(?P<instruction>.*)"),
        ResponsePrompt(
            "",
            example,
            example,
            "POST : {instruction}\nCHOICE :",
            ("POST",),
            "(?P<response>.+)",
            no_input="none",
        ),
    )
    steps = NewInstructions(demonstrations=4, max_new_tokens=12), NewResponses(0, max_new_tokens=4)
    own = by or SelfGeneration(4, *steps, prompts=prompts, temperature=1.0, keep_cut=True, max_rouge_l=0.9)

    def data():
        return SyntheticInstructionDataModule(
            "toy:instructions?num_clients=6&client_rows=6",
            own,
            **nested(
                SyntheticInstructionDataModule,
                columns={
                    "instruction": "instruction",
                    "input": "input",
                    "response": "output",
                    "client": "client",
                },
                **{
                    "template": "POST : {instruction} {input}\nCHOICE :",
                    "tokenizer": "toy",
                    "max_tokens": 128,
                },
                **{
                    "partition": Partition("client"),
                    "split": Split(val_share=0.0),
                    "batch_size": 4,
                    "keep": 3,
                },
            ),
        )

    def model():
        return SFTModule("toy", dtype="fp32", lr=0.003)

    return Kind({"algorithm": algorithm, "clients_per_round": 3, **loop}, model, data, rounds=2)


def share_noise(clients):
    """Return a kind of run in which everybody takes part, and clients share the noise of the sum."""
    channel = Wire(up=ClipAndNoise(0.5, 2.0, delta=0.01, shared_by=clients))
    return Kind({"algorithm": FedAvg("uniform"), "channel": channel, "clients_per_round": 10})


MORE_KINDS = {
    "written_fewfedpit": lambda root: writing(FewFedPIT()),
    "written_fedmit": lambda root: writing(FedMIT()),
    "written_local": lambda root: writing(LocalSelfGeneration()),
    "written_fewfedweight": lambda root: writing(
        FewFedWeight(), PseudoResponses(6), limits=Limits(share=None)
    ),
    "fedmit": lambda root: Kind({"algorithm": FedMIT()}, data=Choosing),
    "fewfedweight": lambda root: Kind(
        {"algorithm": FewFedWeight(), "limits": Limits(share=None)}, data=Choosing
    ),
    "local_self_generation": lambda root: Kind(
        {"algorithm": LocalSelfGeneration(), "channel": Wire(down=Quantize("int8"))}, data=Choosing
    ),
    "hetlora_alike": lambda root: Kind({"algorithm": HetLoRA(gamma=0.5, lam=0.5)}, Ranked, Points),
    "flexlora_alike": lambda root: Kind({"algorithm": FlexLoRA()}, Ranked, Points),
    "median": lambda root: Kind({"aggregation": CoordinateMedian()}),
    "krum": lambda root: Kind({"aggregation": Krum(0.2)}),  # of three clients or more, which no node has
    "fedadam": lambda root: Kind({"server": FedAdam()}),
    "int8": lambda root: Kind({"channel": Wire(up=Quantize("int8"), down=Quantize("int8"))}),
    "nf4": lambda root: Kind({"channel": Wire(up=Quantize("nf4", error_feedback=True))}),
    "scaffold_top_k": lambda root: Kind(
        {"algorithm": Scaffold(), "channel": Wire(up=TopK(0.3, error_feedback=True))},
        lambda: Regression(optimizer="SGD"),
    ),
    "forward_weighted": lambda root: Kind(
        {"forward": ZerothOrder(forward_weight=0.25)}, lambda: Regression(optimizer="SGD")
    ),
    "ditto_top_k": lambda root: Kind(
        {"algorithm": Ditto(0.5, 1), "channel": Wire(up=TopK(0.3, error_feedback=True))}
    ),
    "fedrep_int8": lambda root: Kind(
        {"algorithm": FedRep(["net.3"]), "channel": Wire(up=Quantize("int8", error_feedback=True))}
    ),
    "uniform_fewfedpit": lambda root: Kind({"algorithm": FewFedPIT(weighting="uniform")}, data=Choosing),
    "hetlora_pruning": lambda root: Kind(
        {"algorithm": HetLoRA(gamma=0.5, lam=5.0), "channel": Wire(up=TopK(0.5, error_feedback=True))},
        Ranked,
        Points,
    ),
    "fedsa_lora_nf4": lambda root: Kind(
        {"algorithm": FedSALoRA(), "channel": Wire(up=Quantize("nf4")), "parts": [ProductError()]}, Adapted
    ),
    "uniform": lambda root: Kind({"algorithm": FedAvg("uniform"), "local_steps": 2}),
    "everybody": lambda root: Kind({"clients_per_round": 10}),
    "everybody_coded": lambda root: Kind(
        {"clients_per_round": 10, "channel": Wire(up=[TopK(0.3), Quantize("fp16")])}
    ),
    "frozen_fp16": lambda root: Kind({"channel": Wire(down=Quantize("fp16"))}, Frozen),
    "plateau": lambda root: Kind(model=Plateau),
    "cut": lambda root: Kind(settings={"max_steps": 5}),
    "thawing": lambda root: Kind(model=OfTrained, callbacks=lambda: [Thawing()]),
    "accumulation_by_round": lambda root: Kind(
        callbacks=lambda: [GradientAccumulationScheduler({0: 1, 1: 2})]
    ),
    "paced": lambda root: Kind(model=Paced),
    "all_fedprox": lambda root: Kind({"algorithm": FedProx(0.5, "normalized"), "clients_per_round": 10}),
    "all_uniform": lambda root: Kind({"algorithm": FedAvg("uniform"), "clients_per_round": 10}),
    "noised": lambda root: Kind({"channel": Wire(up=ClipAndNoise(0.5, 2.0, delta=0.01))}),
    "noised_by_none": lambda root: Kind({"channel": Wire(up=ClipAndNoise(0.5, 0.0, delta=0.01))}),
    "noised_examples": lambda root: Kind({"parts": [DPSGD(0.5, 2.0, delta=0.01)]}),
    "budget": lambda root: Kind({"aggregation": PrivateMean(0.5, delta=0.01, epsilon=20.0)}),
    "all_noised": lambda root: Kind({"channel": Wire(up=ClipAndNoise(0.5, 0.1)), "clients_per_round": 10}),
    "all_shared_noise": lambda root: share_noise(3),
    "four_share_noise": lambda root: share_noise(4),
}
ALL_KINDS = KINDS | MORE_KINDS


class MadeParts(Parts):
    """Objects of a kind of run in the place of those of a config; ``args`` are ``--kind`` and the trainer's folder."""

    def __init__(self, args, keeps):
        given = dict(one.removeprefix("--").split("=", 1) for one in args)
        kind = ALL_KINDS[given["kind"]](Path(given.get("root", ".")))
        folder = Path(given["trainer.default_root_dir"])
        L.seed_everything(0, verbose=False)
        self.model = kind.model()
        self.loop = loop_with(**{"clients_per_round": 4, "local_steps": 2} | kind.loop)
        self.datamodule = kind.data() if kind.data else FederatedWrapper(Numbers(), kind.clients)
        saved = ModelCheckpoint(folder / "checkpoints", filename="{epoch}", save_top_k=-1)
        made = [VisitLog(), saved, *kind.callbacks()]
        self.callbacks = [one for one in made if keeps(one)]
        self.left_out = [one for one in made if not keeps(one)]
        self.config = {"fit": SimpleNamespace(seed_everything=0)}
        self._config = {
            "max_epochs": int(given.get("rounds", kind.rounds)),
            "accelerator": "cpu",
            "default_root_dir": folder,
            "logger": False,
            "log_every_n_steps": 1,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "num_sanity_val_steps": 0,
            "limit_val_batches": 0,
            **kind.settings,
        }

    def new_trainer(self, callbacks, **changes):
        self.model.loop = callbacks[-1]
        return super().new_trainer(callbacks, **changes)


@dataclass
class Message:
    """A message to a node, and its answer, as they went over the transport."""

    node: int
    asked: Parcel
    answer: Parcel | Refused


@dataclass
class Here:
    """Transport to nodes in this process.

    Args:
        homes: number -> node, or a function that makes it.
        change: function from a `Message` to the answer that reaches the server.
    """

    homes: dict[int, Node]
    change: Callable[[Message], Parcel | Refused] = lambda message: message.answer
    messages: list[Message] = field(default_factory=list)
    before: Callable[[], None] = lambda: None
    under_way: dict = field(default_factory=dict)

    def nodes(self):
        return sorted(self.homes)

    def push(self, node, parcel, timeout):
        name = f"message {len(self.messages) + len(self.under_way)}"
        self.under_way[name] = node, parcel
        return name

    def pull(self, asked, seconds):
        """Have the nodes answer these messages, one after the other."""
        self.before()
        return {name: self.answer(*self.under_way.pop(name)) for name in asked}

    def answer(self, number, parcel):
        """Return what reaches the server of a node's answer to a message, or why nothing does."""
        if number not in self.homes:  # it has gone since it was planned with
            return Refused(NO_ANSWER)
        asked = Parcel(read_header(write_header(parcel.header)), dict(parcel.payloads), parcel.due_bytes)
        try:
            answer = self.homes[number].answer(asked)
            answer = Parcel(read_header(write_header(answer.header)), answer.payloads)
        except (Refused, ValueError, OSError) as error:
            answer = Refused(f"the node refuses: {error}")
        self.messages.append(Message(number, asked, answer))
        changed = self.change(self.messages[-1])
        return Refused(NO_ANSWER) if changed is None else changed

    def of(self, action):
        """Return the messages that asked for an action."""
        return [one for one in self.messages if one.asked.header["action"] == action]


def make_node(name, folder, part=(0, 1), clients=None, secure=False):
    """Return a node of a kind of run."""
    with mock.patch.object(of_node, "Parts", MadeParts):
        return Node([f"--kind={name}"], {}, folder, clients, part, secure)


def two_nodes(name, folder):
    """Return two nodes, each with half of the clients."""
    return {number: make_node(name, folder / f"node{number}", (number - 1, 2)) for number in (1, 2)}


def deploy(name, folder, transport, rounds=None, **how):
    """Run the server of a kind of run, or let it go on; return its module and its loop."""
    args = [f"--kind={name}", f"--trainer.default_root_dir={folder}"]
    args += [f"--rounds={rounds}"] if rounds else []
    with mock.patch.object(of_server, "Parts", MadeParts):
        trainer, loop = of_server.serve(args, transport, **{"wait_seconds": 0, **how})
    return trainer.lightning_module, loop


def emulate(name, folder, rounds=None, checkpoint=None):
    """Run a kind of run in the emulator, or go on from a checkpoint; return its module and its loop."""
    args = [f"--kind={name}", f"--trainer.default_root_dir={folder}"]
    parts = MadeParts([*args, *([f"--rounds={rounds}"] if rounds else [])], lambda callback: True)
    parts.new_trainer([parts.loop]).fit(parts.model, parts.datamodule, ckpt_path=checkpoint)
    return parts.model, parts.loop


def visits_of(folder):
    """Return the rows of ``visits.csv`` but for wall seconds, in the order of clients."""
    rows = list(csv.DictReader((Path(folder) / "visits.csv").read_text().splitlines()))
    return [{name: value for name, value in row.items() if name != "seconds"} for row in rows]


def left_by(module, loop):
    """Return what a run leaves at the server: digests of weights and of the states of algorithm and server."""
    kept = loop.remembered()
    return digest(dict(module.state_dict())), digest(kept["algorithm"]), digest(kept["server"])


def memories_of(folder, loop):
    """Return what the nodes in a folder remember of each client that the server of a run knows."""
    found = {}
    for client in loop.clients:
        versions = {client: Versions(loop.last.get(client))}
        stores = [
            NodeMemories(one, versions)
            for one in Path(folder).glob(f"node*/{digest_of(loop.nodes.run)}/clients")
        ]
        kept = [store for store in stores if client not in loop.last or store._files(client)]
        found[client] = kept[0].load(client) if kept else {}
    return found


class FakeNode:
    """Node that trains nothing: a client sends what it has received, moved by an amount of its own, in 10 microseconds.

    Args:
        name: kind of run, one of those in which everybody takes part.
        clients: its clients.
        real: node that answers in its place when it is asked to join.
    """

    def __init__(self, name, clients, real):
        self.channel = MadeParts(
            [f"--kind={name}", "--trainer.default_root_dir=."], lambda one: False
        ).loop.channel
        self.clients, self.real, self.key = clients, real, os.urandom(32)
        self._joined = None

    def answer(self, asked):
        head = asked.header
        given = {name: head[name] for name in ("action", "run", "nonce", "round") if name in head}
        if head["action"] == "join":
            own = dict.fromkeys(self.clients, 5)
            shown = signed(self.key, head["run"], head["nonce"])
            return Parcel(self.real.answer(asked).header | {"clients": own} | shown)
        visits, payloads = [], {}
        for one in head["visits"]:
            received = load(asked.payloads[one["payload"]])
            shift = 0.01 * (1 + self.clients.index(one["client"])) * (1 + head["round"] % 3)
            reply = {name: value + shift for name, value in received.items()}
            label = f"p{len(payloads)}"
            payloads[label] = write_payload(self.channel.message_up(received, reply, Client("", 1, 1.0)))
            visits.append(
                {
                    **{"client": one["client"], "label": one["label"], "payload": label, "names": None},
                    **{"diverged": "", "steps": 2, "seconds": 0.5, "loss": 1.5},
                    "training": {"loss": [3.0, 2]},
                }
            )
        return Parcel({"format": FORMAT, **given, "visits": visits}, payloads)
