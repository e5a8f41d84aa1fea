"""Vectors of the same texts by two encoders: training data of FedDCA*'s projector.

Z. Wang et al. (FedDCA), 2024, https://arxiv.org/abs/2409.20135, section 4.3: the server trains the projector on its public
instructions, which it encodes with the clients' small encoder and with its own large one. As for retrieval, the encoded
text of a row is the template's slots without the response.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_info
from torch.utils.data import DataLoader, StackDataset, default_collate

from fedlight.datamodules.federated.datamodule import FederatedDataModule
from fedlight.datamodules.instructions.augmentation_record import AugmentationRecord
from fedlight.datamodules.rows.columns import check_columns, field_at
from fedlight.datamodules.rows.fields import NO_SLOTS, instruction_text
from fedlight.datamodules.rows.rows import RowsError, load_rows
from fedlight.datamodules.rows.split import TextSplit
from fedlight.datamodules.vectors.encoders import Encoder
from fedlight.support.checks import refuse_below
from fedlight.support.seeding import derive_seed


class EmbeddingDataModule(FederatedDataModule):
    """Public texts as vectors of two encoders; a federated loop sees one client, ``server``, that holds all of them.

    Args:
        small: the clients' encoder.
        large: the server's encoder.
        source: one source of rows or several; see `fedlight.datamodules.rows.rows`.
        columns: encoded slot -> column, in the order of encoding; ``response``, ``client`` and ``category`` are skipped.
            One mapping for all sources, or a list with one for each.
        private: ``augmentation_folder`` of a run, whose clients' own training texts are left out of ``source``: of a domain
            that is in part private the projector then learns the public part. None: nothing is left out.
        max_texts: number of texts to draw, >= 2; None: all.
        split: share of the texts to hold out for validation.
        batch_size: texts per training batch, >= 2; eq. 4 contrasts a text with the others of its batch.
        eval_batch_size: least texts per validation batch, >= 2; set it to ``batch_size`` to compare ``val/loss`` with
            ``train/loss``.
        seed, num_workers: see `FederatedDataModule`.

    Raises:
        ValueError: a setting is out of range.
    """

    def __init__(
        self,
        small: Encoder,
        large: Encoder,
        source: str | list[str],
        columns: dict[str, str] | list[dict[str, str]] | None = None,
        private: str | None = None,
        max_texts: int | None = None,
        split: TextSplit = TextSplit(),
        batch_size: int = 256,
        eval_batch_size: int = 256,
        seed: int = 0,
        num_workers: int = 0,
    ) -> None:
        super().__init__(batch_size, eval_batch_size, seed, num_workers)
        refuse_below(2, batch_size=batch_size, eval_batch_size=eval_batch_size, max_texts=max_texts)
        self.small, self.large = small, large
        self.ready = False
        self.sources = [source] if isinstance(source, str) else source
        self.split, self.private, self.max_texts = split.train_split, private, max_texts
        self.val_share, self.val_max = split.val_share, split.val_max
        columns = columns or {"instruction": "instruction", "input": "input"}
        self.columns = [columns] * len(self.sources) if isinstance(columns, dict) else columns
        if not self.sources or len(self.columns) != len(self.sources):
            raise ValueError(
                f"columns has {len(self.columns)} mappings for {len(self.sources)} sources: give one for all, or one each"
            )

    def setup(self, stage: str) -> None:
        if self.ready:
            return
        self._check_dimensions()  # before any text is encoded
        texts = self._draw_texts()
        held_out = min(round(self.val_share * len(texts)), self.val_max)
        if len(texts) - held_out < 2 or (held_out < 2 and self.val_share):
            raise ValueError(
                f"{len(texts)} texts with val_share={self.val_share} leave {len(texts) - held_out} for training and "
                f"{held_out} for validation, each of which needs 2: give more rows, or val_share=0"
            )
        small: Any = torch.from_numpy(self.small.encode(texts))  # [texts, dimension]
        large: Any = torch.from_numpy(self.large.encode(texts))
        self.ready = True
        self.train_set = StackDataset(small=small[held_out:], large=large[held_out:])
        self.val_set = StackDataset(small=small[:held_out], large=large[:held_out]) if held_out else None
        self.client_indices = {"server": np.arange(len(texts) - held_out)}

    def collate(self, examples: list[Any]) -> Any:
        """Return ``small`` and ``large``, ``(batch, dimension)`` each."""
        return default_collate(examples)

    def val_dataloader(self) -> DataLoader | list:
        """Return the held-out texts in batches of equal size: the loss needs two texts in each."""
        if self.val_set is None:
            return []
        number = len(self.val_set)  # type: ignore[arg-type]
        parts = np.array_split(np.arange(number), max(1, number // self.eval_batch_size))
        return self._loader(self.val_set, [part.tolist() for part in parts])

    def _check_dimensions(self) -> None:
        module = self.trainer.lightning_module if self.trainer else None
        small, large = self.small.dimension, self.large.dimension
        wanted = getattr(module, "dimensions", None)  # of a projector
        if wanted is not None and wanted != (small, large):
            raise ValueError(
                f"the projector maps {wanted[0]} dimensions to {wanted[1]}, the encoders give {small} and {large}: set "
                f"model.small_dimension={small} and model.large_dimension={large}"
            )

    def _draw_texts(self) -> list[str]:
        """Return distinct texts of all sources, in an order that follows from the seed."""
        read: list[str] = []
        for source, columns in zip(self.sources, self.columns, strict=True):
            read += _read_texts(source, self.split, columns)
        private_rows = AugmentationRecord(self.private).read_own() if self.private else []
        # Sorted: the order of a set of texts differs between processes.
        texts = sorted({*read} - {"", *(instruction_text(fields) for _, fields in private_rows)})
        drawn = np.random.default_rng(derive_seed(self.seed, "embeddings")).permutation(len(texts))
        kept = [texts[index] for index in drawn[: self.max_texts]]
        rank_zero_info(
            f"{', '.join(self.sources)}: {len(read):,} rows, {len(texts):,} distinct texts, {len(kept):,} used"
        )
        return kept


def _read_texts(source: str, split: str, columns: dict[str, str]) -> Sequence[str]:
    slots = {name: path for name, path in columns.items() if name not in NO_SLOTS}
    if not slots:
        raise RowsError(f"{source}: columns names no slot to encode: set columns.instruction to a column")
    rows = load_rows(source, split)
    check_columns(rows, slots, source)
    return [
        instruction_text({name: field_at(row, path, name) for name, path in slots.items()}) for row in rows
    ]
