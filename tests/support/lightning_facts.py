"""A module and numbers that note which of their hooks Lightning calls, and a quiet trainer for them."""

import lightning as L
import torch
from torch.utils.data import DataLoader, Dataset

QUIET = {
    **{"logger": False, "accelerator": "cpu", "enable_checkpointing": False},
    **{"enable_progress_bar": False, "enable_model_summary": False},
}


class Model(L.LightningModule):
    """One weight; the loss of a batch is weight times the batch's sum, so the gradient is that sum."""

    def __init__(self, hooks: list[str] | None = None) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.hooks = hooks if hooks is not None else []

    def training_step(self, batch, batch_idx):
        self.hooks.append("training_step")
        return (self.weight * batch.sum()).sum()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.1)


class Numbers(Dataset):
    """The numbers 1 to ``size``; notes when one is fetched."""

    def __init__(self, size: int, hooks: list[str] | None = None) -> None:
        self.size = size
        self.hooks = hooks if hooks is not None else []

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        if index >= self.size:
            raise IndexError
        self.hooks.append("fetch")
        return torch.tensor([index + 1.0])


def fit(model, numbers=1, callbacks=(), ckpt_path=None, **options):
    """Train one epoch, or as the options say, on so many numbers or a loader."""
    data = DataLoader(Numbers(numbers)) if isinstance(numbers, int) else numbers
    trainer = L.Trainer(callbacks=list(callbacks), **QUIET | {"max_epochs": 1} | options)
    trainer.fit(model, data, ckpt_path=ckpt_path, weights_only=True if ckpt_path else None)
    return trainer
