"""What every client has, as a table beside the run: what a report draws the clients' data from.

It counts and names labels; no text of any client is in it. Who may not say how many rows of which label a client has leaves
this callback out.
"""

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

import lightning as L
from lightning.pytorch.utilities import rank_zero_info

from fedlight.callbacks.loop.federated_run import training_data
from fedlight.support.files import write_whole

COLUMNS = ("client", "label", "split", "rows")


@runtime_checkable
class CountsClientRows(Protocol):
    """What the table needs of the datamodule."""

    def client_counts(self) -> Sequence[tuple[str, str, str, int]]:
        """Client, label (empty for none), split, and how many examples that are."""


class ClientData(L.Callback):
    """Writes ``data.csv`` when training starts: client, label, split (``train`` or ``val``) and the number of rows.

    Rows as training counts them: a vote that is read in both orders is two.
    A resumed run writes the same again. With a datamodule that does not know its clients it says so and writes nothing.

    Args:
        path: the file; ``data.csv`` in the trainer's ``default_root_dir`` if not given.
    """

    def __init__(self, path: str | None = None) -> None:
        self.path = path

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        data = training_data(trainer)
        if not isinstance(data, CountsClientRows):
            rank_zero_info(
                "ClientData: nobody knows whose training example is whose, so there is no data.csv: add "
                "ByClient(clients) to the callbacks"
            )
        elif trainer.is_global_zero:
            write_counts(Path(self.path or Path(trainer.default_root_dir) / "data.csv"), data.client_counts())


def write_counts(file: Path, counts: Sequence[tuple[str, str, str, int]]) -> None:
    """Writes the table, all or nothing."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows(counts)
    write_whole(file, text.getvalue())
