"""The same training as in characters.py, each module of the standard library a client. characters.py stays as it is.

Run: python examples/script_style/federated.py
"""

import lightning as L
from characters import CharacterModel, Pieces, train_loader, val_loader
from lightning.pytorch.loggers import CSVLogger

from fedlight import ByClient, FederatedLoop, RoundProgress, VisitLog, by_key


def by_source(pieces: Pieces) -> dict:
    """A client for each module."""
    return by_key(pieces.sources)


def federation() -> list[L.Callback]:
    """All that is added to the trainer."""
    return [ByClient(by_source), FederatedLoop(clients_per_round=8), VisitLog(), RoundProgress()]


if __name__ == "__main__":
    L.seed_everything(0)
    folder = "runs/characters_federated"
    trainer = L.Trainer(
        max_epochs=15,
        accelerator="cpu",
        devices=1,  # a federation is one process
        default_root_dir=folder,
        logger=CSVLogger(folder),
        log_every_n_steps=5,
        enable_model_summary=False,
        callbacks=federation(),
    )
    trainer.fit(CharacterModel(lr=1.0), train_loader, val_loader)
