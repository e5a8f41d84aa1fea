"""Table of every client's number of examples by label, for a report's figure of the clients' data.

It holds labels and counts, no text of a client. Leave the callback out where the counts are private.
"""

from pathlib import Path

import lightning as L
from lightning.pytorch.utilities import rank_zero_info

from fedlight.callbacks.loop.run import training_data
from fedlight.support.checks import Checked
from fedlight.support.files import csv_text, write_whole

COLUMNS = ("client", "label", "split", "rows")


class ClientData(Checked, L.Callback):
    """Lightning callback that writes ``data.csv`` when training starts.

    Columns: client, label, split (``train`` or ``val``) and the number of rows. A vote that is trained on in both orders
    counts as two rows. A resumed run writes the same file. Without a datamodule that knows its clients, the callback
    says so and writes nothing.

    Args:
        path: the file; None: ``data.csv`` in the trainer's ``default_root_dir``.
    """

    def __init__(self, path: str | None = None) -> None:
        self.path = path

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        data = training_data(trainer)
        if not hasattr(data, "client_counts"):
            rank_zero_info(
                "ClientData: the client of a training example is not known, so there is no data.csv: add "
                "ByClient(clients) to the callbacks"
            )
        elif trainer.is_global_zero:
            rows = [dict(zip(COLUMNS, counts, strict=True)) for counts in data.client_counts()]
            file = Path(self.path or Path(trainer.default_root_dir) / "data.csv")
            write_whole(file, csv_text(rows, COLUMNS))
