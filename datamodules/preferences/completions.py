"""Pairs of completions for ``trainer.predict``, which a selector compares or a reward model scores.

`fedlight.datamodules.preferences.labelling` makes labels of the predictions.
"""

from typing import Any, Literal

import numpy as np
import torch
from lightning.pytorch.utilities import rank_zero_info
from torch.utils.data import Dataset

from fedlight.datamodules.federated.datamodule import FederatedDataModule
from fedlight.datamodules.preferences.format import Format, encode_comparisons
from fedlight.datamodules.preferences.labelling import Orders, form_pairs
from fedlight.datamodules.rows.given import RowsError, refuse_too_long
from fedlight.datamodules.rows.rows import load_rows
from fedlight.datamodules.text.encoding import Encoded
from fedlight.datamodules.text.examples import Choice, PreferredExamples, collate_choices, collate_preferred
from fedlight.datamodules.text.templates import Template, check_choice
from fedlight.datamodules.text.tokens import pad_id
from fedlight.pretrained.hub import load_tokenizer


class ShownPairs(Dataset):
    """Pairs, of two encoded sequences each, in one order or both, sorted by length."""

    def __init__(self, encoded: Encoded, pairs: np.ndarray, orders: Orders) -> None:
        self.encoded = encoded
        # Sequence 2p is pair p in its own order, 2p + 1 swapped.
        rows = 2 * pairs if orders == "one" else (2 * pairs[:, None] + [0, 1]).reshape(-1)
        self.rows = rows[np.argsort(encoded.table.lengths[rows], kind="stable")]

    def __len__(self) -> int:
        """Return the number of sequences."""
        return len(self.rows)

    def __getitem__(self, item: int) -> tuple[Choice, int, int]:
        """Return a comparison, the index of its pair, and its order."""
        row = int(self.rows[item])
        choice: Choice = {
            "ids": self.encoded.table[row],
            "second_segment": int(self.encoded.marks[row]),
            "label": 0,  # unknown; the batch has no labels
        }
        return choice, row // 2, row % 2  # sequences 2p and 2p + 1 are pair p


class CompletionPairDataModule(FederatedDataModule):
    """All pairs of each prompt's completions.

    Args:
        source: rows with ``completions`` and ``fields`` (or ``prompt``), as written by a predict run over
            `PromptDataModule`.
        orders: show every pair in both orders, or in one.
        format: see `PreferenceDataModule`; use the values of the selector's or the reward model's training. The form
            responses scores each completion by itself, so ``orders`` must be ``"one"``, here and in the labelling.
        tokenizer, max_tokens: see `PreferenceDataModule`.
        eval_batch_size, seed, num_workers: see `FederatedDataModule`.

    Raises:
        ValueError: ``form="responses"`` with ``orders="both"``.
    """

    def __init__(
        self,
        source: str,
        orders: Orders = "both",
        format: Format = Format(),
        tokenizer: str = "toy",
        max_tokens: int = 512,
        eval_batch_size: int = 64,
        seed: int = 0,
        num_workers: int = 0,
    ) -> None:
        super().__init__(eval_batch_size=eval_batch_size, seed=seed, num_workers=num_workers)
        self.source, self.orders, self.form, self.choices = source, orders, format.form, format.choices
        for name in ("encoder", "choice_values", "twins_together"):
            if getattr(format, name) != getattr(Format, name):
                raise ValueError(f"format.{name} is of votes, and completions have none: leave it out")
        if self.form == "features":
            raise ValueError("form='features' is of votes: set form to choice, pair or responses")
        if self.form == "responses" and orders != "one":
            raise ValueError(
                f"form='responses' has no order of answers, but orders={orders!r}: set orders to one, here and in the "
                "labelling"
            )
        templates = {"pair": format.pair_template, "responses": format.generation_template}
        name = templates.get(self.form, format.choice_template)
        asks: Literal["choice", "prompt"] = "choice" if self.form == "choice" else "prompt"
        self.template = (Template.named(name, asks=asks) if name else Template("")).trimming(format.trim)
        if self.form == "choice":
            check_choice(self.template)
        self.truncate_answers = format.truncate_answers
        self.tokenizer_name, self.max_tokens = tokenizer, max_tokens

    def setup(self, stage: str) -> None:
        if stage != "predict" or self.predict_set is not None:
            return
        pairs, skipped = form_pairs(load_rows(self.source), self.source)
        if missing := [slot for slot in self.template.slots if slot not in pairs[0].fields]:
            raise RowsError(
                f"{self.source}: the template has a slot {{{missing[0]}}}; fields has {', '.join(pairs[0].fields)}"
            )
        self.tokenizer = load_tokenizer(self.tokenizer_name)
        self.template = self.template.for_tokenizer(self.tokenizer)
        encoded = encode_comparisons(self, self.form, pairs)
        fits = np.flatnonzero(encoded.both_kept())  # [pairs]
        rank_zero_info(
            f"{self.source}: {len(pairs):,} pairs, {skipped:,} equal or empty ones skipped; "
            f"{len(pairs) - len(fits):,} too long, {encoded.trimmed:,} inputs cut"
        )
        refuse_too_long(len(fits), "pair", self.source, self.max_tokens)
        if self.form == "responses":
            examples = PreferredExamples(encoded, fits, winner=np.zeros_like(fits), index=fits)
            self.predict_set = examples.by_length()
            return
        self.predict_set = ShownPairs(encoded, fits, self.orders)

    def collate(self, examples: list[Any]) -> dict[str, Any]:
        """Return a batch of the form without choice labels, with each pair's ``index`` and ``order``, ``(batch,)``."""
        if self.form == "responses":
            batch = collate_preferred(examples, pad_id(self.tokenizer))
            return {**batch, "order": torch.zeros_like(batch["index"])}
        has_types = self.form == "pair" and "token_type_ids" in self.tokenizer.model_input_names
        batch = collate_choices([choice for choice, _, _ in examples], pad_id(self.tokenizer), has_types)
        del batch["labels"]
        return {
            **batch,
            "index": torch.tensor([index for _, index, _ in examples]),
            "order": torch.tensor([order for _, _, order in examples]),
        }
