"""Small runs under attack: three clients with rows of the embedded world and a canary each."""

import random
from pathlib import Path

import lightning as L
from nested import nested
from tiny_world import table, write_rows

from fedlight.callbacks.attacks.discoverable_memorization import DiscoverableMemorization
from fedlight.callbacks.attacks.membership_inference import MembershipInference
from fedlight.callbacks.attacks.memory_extraction import MemoryExtraction
from fedlight.callbacks.loop.federated_loop import FederatedLoop
from fedlight.datamodules.clients.partition import Partition
from fedlight.datamodules.instructions.datamodule import InstructionDataModule
from fedlight.datamodules.rows.canaries import Canaries
from fedlight.modules.language.adapters import Lora
from fedlight.modules.sft import SFTModule
from fedlight.toy.instructions import JUDGEMENTS, NUMBERS, TEMPLATE
from fedlight.toy.world import NAMES, OBJECTS, VERBS

COLUMNS = {"instruction": "instruction", "input": "input", "response": "output", "client": "client"}
BOTH = ("global", "uploads")


def make_data(source="toy:instructions?num_clients=3&client_rows=8", **changes):
    settings = {"columns": COLUMNS, "template": TEMPLATE, "val_share": 0.25, "batch_size": 4}
    settings |= {"partition": Partition(by="client"), "canaries": Canaries(repeats=2)}
    return InstructionDataModule(source, **nested(InstructionDataModule, **{**settings, **changes}))


def attacks(**settings):
    """All three, small."""
    return [
        MemoryExtraction(samples=4, max_new_tokens=4, **settings),
        DiscoverableMemorization(examples=6, max_new_tokens=3, random_secrets=3, **settings),
        MembershipInference(examples=6, **settings),
    ]


def loop(**settings):
    return FederatedLoop(**{"clients_per_round": 2, "local_steps": 2, **settings})


def fit(model, folder: Path, *callbacks, data=None, module=None, ckpt_path=None, **options):
    """The module and the trainer after a run; ``model`` is a folder."""
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    if any(isinstance(one, L.pytorch.callbacks.ModelCheckpoint) for one in callbacks):
        del quiet["enable_checkpointing"]
    trainer = L.Trainer(
        **quiet | {"accelerator": "cpu", "logger": False, "max_epochs": 3, "log_every_n_steps": 1} | options,
        num_sanity_val_steps=0,
        default_root_dir=folder,
        callbacks=list(callbacks),
    )
    module = module or SFTModule(model, lr=0.02, lora=Lora(dropout=0.1), seed=1)
    L.seed_everything(1, verbose=False)
    trainer.fit(module, datamodule=data or make_data(), ckpt_path=ckpt_path, weights_only=True)
    return module, trainer


def found(folder: Path) -> dict[tuple[int, str], dict[str, float]]:
    """``attacks.csv`` as numbers, by round and target."""
    return {
        (int(row.pop("round")), row.pop("target")): {name: float(text) for name, text in row.items() if text}
        for row in table(folder / "attacks/attacks.csv")
    }


def files(folder: Path) -> dict[str, str]:
    """Everything that attacks have written."""
    root = folder / "attacks"
    return {str(file.relative_to(root)): file.read_text() for file in root.rglob("*") if file.is_file()}


def random_rows(file: Path, clients: int = 2, rows: int = 6, seed: int = 0) -> str:
    """Rows whose answers follow from nothing, so that whoever knows them has seen them."""
    draw = random.Random(seed)
    names = draw.sample([(name, thing) for name in NAMES for thing in OBJECTS], clients * rows)
    return write_rows(
        file,
        [
            {
                "instruction": f"which {draw.choice(VERBS)} {draw.choice(VERBS)} ?",
                "input": f"{name} {thing}",
                "output": f"{draw.choice(JUDGEMENTS)} {draw.choice(NUMBERS)} {draw.choice(OBJECTS)}",
                "client": f"c{index % clients}",
            }
            for index, (name, thing) in enumerate(names)
        ],
    )
