"""A notebook as a script: a small GRU learns to write docstrings, character by character.

The text comes with Python: the docstrings of a few modules of its standard library. Loaders and Trainer are made by hand.
Run: python examples/script_style/characters.py
"""

# %% Text
import importlib
import inspect

import lightning as L
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset
from torchmetrics.classification import MulticlassAccuracy

MODULES = ["argparse", "calendar", "csv", "datetime", "difflib", "json", "logging", "os", "pathlib", "random"]
MODULES += ["shutil", "statistics", "subprocess", "tarfile", "textwrap", "threading", "zipfile"]
CHARACTERS = "\n" + "".join(map(chr, range(32, 127)))
LENGTH = 40


def docstrings(module: str) -> str:
    """Of a module's functions and classes."""
    members = vars(importlib.import_module(module)).values()
    texts = [inspect.getdoc(member) or "" for member in members if callable(member)]
    return "".join(char for char in "\n".join(dict.fromkeys(texts)) if char in CHARACTERS)


# %% Data: pieces of text, each with the module it is from
class Pieces(Dataset):
    """Every n-th piece of each module, at most 24 of one."""

    def __init__(self, first: int, step: int) -> None:
        self.texts, self.sources = [], []
        for name in MODULES:
            text = docstrings(name)
            pieces = [text[i : i + LENGTH] for i in range(0, len(text), LENGTH)][:24]
            self.texts += pieces[first::step]
            self.sources += [name] * len(pieces[first::step])

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, i: int) -> torch.Tensor:
        return torch.tensor([CHARACTERS.index(char) for char in self.texts[i]])


def collate(pieces: list[torch.Tensor]) -> torch.Tensor:
    """Pads to the longest piece with -1."""
    return pad_sequence(pieces, batch_first=True, padding_value=-1)


train_set, val_set = Pieces(1, 2), Pieces(0, 8)
train_loader = DataLoader(train_set, batch_size=8, shuffle=True, collate_fn=collate)
val_loader = DataLoader(val_set, batch_size=64, collate_fn=collate)


# %% Model
class CharacterModel(L.LightningModule):
    """Embedding, GRU, logits of the next character."""

    def __init__(self, size: int = 64, lr: float = 0.5) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.embed = nn.Embedding(len(CHARACTERS), size)
        self.gru = nn.GRU(size, size, batch_first=True)
        self.head = nn.Linear(size, len(CHARACTERS))
        self.accuracy = MulticlassAccuracy(len(CHARACTERS), average="micro", ignore_index=-1)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        """(batch, characters) -> (batch, characters of the vocabulary, positions) of what follows."""
        states, _ = self.gru(self.embed(batch[:, :-1].clamp(min=0)))
        return self.head(states).transpose(1, 2)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        """Cross-entropy of the next character."""
        return nn.functional.cross_entropy(self(batch), batch[:, 1:], ignore_index=-1)

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        """How many are guessed right."""
        logits = self(batch)
        self.accuracy(logits, batch[:, 1:])
        self.log(
            "val/loss", nn.functional.cross_entropy(logits, batch[:, 1:], ignore_index=-1), prog_bar=True
        )
        self.log("val/accuracy", self.accuracy, prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain SGD."""
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr)


# %% Training
if __name__ == "__main__":
    L.seed_everything(0)
    folder = "runs/characters"
    trainer = L.Trainer(
        max_epochs=3,
        accelerator="cpu",
        default_root_dir=folder,
        logger=CSVLogger(folder),
        log_every_n_steps=5,
        enable_model_summary=False,
    )
    trainer.fit(CharacterModel(), train_loader, val_loader)
