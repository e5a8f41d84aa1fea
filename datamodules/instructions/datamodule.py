"""Instructions with responses, by client, with the loss on the response alone.

The template is Alpaca's (Taori et al. 2023, https://github.com/tatsu-lab/stanford_alpaca) unless another is
given; rows with an empty input take its shorter form. ``alpaca_joined`` has that form for all rows and appends the
input to the instruction.
"""

from dataclasses import replace
from typing import Any

import numpy as np
from lightning.pytorch.utilities import rank_zero_info

from fedlight.datamodules.clients.clusters import PseudoLabels
from fedlight.datamodules.clients.few_shot import FewShot
from fedlight.datamodules.clients.partition import Partition
from fedlight.datamodules.clients.splits import Split, check_validation, label_examples, pool, share_out
from fedlight.datamodules.federated.datamodule import FederatedDataModule
from fedlight.datamodules.instructions.reports import SetupReport, padding_shares
from fedlight.datamodules.rows.canaries import Canaries, check_words
from fedlight.datamodules.rows.exclusion import Holdout
from fedlight.datamodules.rows.fields import OWNERS, make_row_key, number_prompts
from fedlight.datamodules.rows.instruction_rows import ALPACA_COLUMNS, check_slots, read_instructions
from fedlight.datamodules.rows.rows import RowsError, load_rows
from fedlight.datamodules.text.encoding import encode_responses
from fedlight.datamodules.text.examples import ResponseExamples, collate_responses, join_examples
from fedlight.datamodules.text.templates import Template
from fedlight.datamodules.text.tokens import load_tokenizer, pad_id
from fedlight.support.types import Fields

CANARY = "canary"
"""The category of planted rows, where rows have categories."""


class InstructionDataModule(FederatedDataModule):
    """Instruction data for supervised fine-tuning.

    Args:
        source: where the rows are; see `fedlight.datamodules.rows.rows`.
        split: split of a hub dataset.
        test_source: rows to test on; None with a ``holdout``: the held-out rows of ``source``; with
            ``few_shot.rest_as_test``: rows that it has left.
        test_split: its split.
        columns: where the rows have ``response``, the template's slots, ``client`` and ``category``; an empty name where
            they have no such column. None: Alpaca's.
        template: a name or a text with slots; see `fedlight.datamodules.text.templates`.
        tokenizer: hub name or folder, or ``"toy"``.
        max_tokens: most tokens of prompt and response together.
        partition: how examples are shared out among clients; None: by the column mapped to ``client``, or without one a
            single client has all.
        holdout: rows kept out of training; see `fedlight.datamodules.rows.exclusion`.
        pseudo_labels: makes the categories for ``partition.by: dirichlet`` where no column has them.
        few_shot: takes a few rows of each cluster of ``source``, and their clusters as categories.
        canaries: made-up rows that some clients train on besides their own, for attacks to look for.
        val_share: share of each client's prompts for validation, in [0, 1); 0: no validation.
        val_max: most prompts of a client in validation.
        batch_size, eval_batch_size, seed, bucket, num_workers: see `FederatedDataModule`.

    Attributes:
        template: what a row is rendered with.
        client_rows: each client's own training rows, the template's slots and ``response``, planted canaries included;
            nothing of what an augmentation or the model itself adds. After ``setup``.
        planted: the canaries of each client that has some, each once. After ``setup``.
    """

    def __init__(
        self,
        source: str,
        split: str = "train",
        test_source: str | None = None,
        test_split: str = "test",
        columns: dict[str, str] | None = None,
        template: str = "alpaca",
        tokenizer: str = "toy",
        max_tokens: int = 512,
        partition: Partition | None = None,
        holdout: Holdout | None = None,
        pseudo_labels: PseudoLabels | None = None,
        few_shot: FewShot | None = None,
        canaries: Canaries | None = None,
        val_share: float = 0.05,
        val_max: int = 200,
        batch_size: int = 32,
        eval_batch_size: int = 64,
        seed: int = 0,
        bucket: bool = True,
        num_workers: int = 0,
    ) -> None:
        super().__init__(batch_size, eval_batch_size, seed, bucket, num_workers)
        check_validation(val_share, val_max)
        self.train_rows = (source, split)
        own = (source, split) if holdout else None
        self.test_rows = (test_source, test_split) if test_source else own
        self.columns = {
            name: path for name, path in (columns or ALPACA_COLUMNS).items() if path or name not in OWNERS
        }
        self.template = Template.named(template)
        self.tokenizer_name, self.max_tokens = tokenizer, max_tokens
        own_clients = Partition() if "client" in self.columns else Partition("iid", num_clients=1)
        self.partition = partition or own_clients
        self.holdout, self.val_share, self.val_max = holdout, val_share, val_max
        self.report: SetupReport | None = None
        self.pseudo_labels, self.few_shot, self.canaries = pseudo_labels, few_shot, canaries
        self.client_rows: dict[str, list[dict[str, str]]] = {}
        self.planted: dict[str, list[dict[str, str]]] = {}
        self._validation: list[dict[str, str]] = []
        self._left_over: list[dict[str, str]] | None = None
        check_slots(self.columns, self.template)
        self._check_sources()

    def setup(self, stage: str) -> None:
        """Reads, tokenises and shares out what the stage needs, once."""
        self.tokenizer = load_tokenizer(self.tokenizer_name)
        if stage in ("fit", "validate") and self.report is None:
            self._setup_training()
        if stage == "test" and self.test_set is None:
            examples, _, _ = self._encode(self._test_rows(), (self.test_rows or self.train_rows)[0])
            self.test_set = examples.take(np.argsort(examples.lengths, kind="stable"))

    def unseen_rows(self) -> list[dict[str, str]]:
        """Rows that no client trains on: those of validation, else those to test on, else none."""
        trained = {make_row_key(row) for row in self._trained_rows()}
        found = self._without(self._validation, trained)
        if found or not self._has_test_rows:
            return found
        return self._without(self._test_rows(), trained)

    def collate(self, examples: list[Any]) -> dict[str, Any]:
        """An sft batch."""
        return collate_responses(examples, pad_id(self.tokenizer))

    def _setup_training(self) -> None:
        examples, rows, (too_long, trimmed) = self._encode(self._shared_rows(), self.train_rows[0])
        prompts = number_prompts(rows)
        split = share_out(
            self.partition,
            owners=[row["client"] for row in rows] if "client" in self.columns else [],
            categories=self._categories(rows),
            prompts=prompts,
            keys=prompts,
            share=self.val_share,
            at_most=self.val_max,
            seed=self.seed,
        )
        self._validation = [rows[row] for own in (split.val or {}).values() for row in own]
        examples, rows, split = self._with_canaries(examples, rows, split)
        self.client_rows = self._by_client(rows, split)
        examples, split = self._with_more(examples, rows, split)
        order, self.client_indices = pool(split.train)
        labels = [row.get("category", "") for row in rows]
        self.train_labels = label_examples(labels, order)
        self.train_set = examples.take(order)
        self.train_lengths, self.train_labelled = self.train_set.lengths, self.train_set.labelled
        if split.val is not None:
            order, self.val_client_indices = pool(split.val, examples.lengths)
            self.val_labels = label_examples(labels, order)
            self.val_set = examples.take(order)
        padding = padding_shares(self.client_indices, self.train_lengths, self.batch_size, self.seed)
        self.report = SetupReport("examples", split, too_long, trimmed, *padding)
        rank_zero_info(str(self.report))

    def _own_rows(self) -> list[dict[str, str]]:
        """The rows that are the clients', before few of them are chosen."""
        return self._read(*self.train_rows, held_out=False)

    def _shared_rows(self) -> list[dict[str, str]]:
        """The rows that are shared out among the clients; of few-shot data, what is left is put aside for the test."""
        rows = self._own_rows()
        if self.few_shot is None:
            return rows
        _, fitting, _ = self._encode(rows, self.train_rows[0])
        few = self.few_shot.choose(fitting, self.seed)
        self._left_over = [fitting[row] for row in few.test]
        rank_zero_info(f"{self.train_rows[0]}: {few}")
        return [
            {**fitting[row], "category": label} for row, label in zip(few.chosen, few.labels, strict=True)
        ]

    def _with_canaries(
        self, examples: ResponseExamples, rows: list[dict[str, str]], split: Split
    ) -> tuple[ResponseExamples, list[dict[str, str]], Split]:
        """Plants the canaries behind the clients' training rows, each ``repeats`` times; validation stays as it is."""
        if self.canaries is None:
            return examples, rows, split
        planted = self.canaries.plant(self._by_client(rows, split))
        self.planted = {client: [self._plain(row) for row in own] for client, own in planted.items()}
        owners = [client for client, own in self.planted.items() for _ in own]
        new = [
            row
            | {name: value for name, value in (("client", client), ("category", CANARY)) if name in rows[0]}
            for client, own in self.planted.items()
            for row in own
        ]
        responses = [row["response"] for row in new]
        check_words(self.tokenizer, responses)
        encoded = encode_responses(self.tokenizer, self.template, new, responses, self.max_tokens)
        if cut := encoded.trimmed + int((~encoded.kept).sum()):
            raise ValueError(
                f"{cut} of {len(new)} canaries do not fit into max_tokens={self.max_tokens}. Raise it, or lower "
                "canaries.length."
            )
        train = dict(split.train)
        for at, client in enumerate(owners, start=len(examples)):
            train[client] = np.concatenate([train[client], np.full(self.canaries.repeats, at)])
        rank_zero_info(
            f"{len(new):,} canaries planted at {len(self.planted):,} clients, {self.canaries.repeats:,} times each"
        )
        more = ResponseExamples(encoded, np.arange(len(new)))
        return join_examples(examples, more), [*rows, *new], replace(split, train=train)

    def _with_more(
        self, examples: ResponseExamples, rows: list[dict[str, str]], split: Split
    ) -> tuple[ResponseExamples, Split]:
        """Room for what clients train on besides their own rows: more examples, and who has which."""
        return examples, split

    def _categories(self, rows: list[dict[str, str]]) -> list[str]:
        if self.pseudo_labels is not None:
            labels = self.pseudo_labels.label(rows, self.seed)
            for row, label in zip(rows, labels, strict=True):
                row["category"] = label
        return [row["category"] for row in rows if "category" in row]

    @property
    def _has_test_rows(self) -> bool:
        return self.test_rows is not None or bool(self.few_shot and self.few_shot.rest_as_test)

    def _test_rows(self) -> list[dict[str, str]]:
        if not self._has_test_rows:
            raise ValueError(
                "there is nothing to test on: set test_source, or holdout to test on held-out rows, or "
                "few_shot.rest_as_test to test on rows that few_shot has left."
            )
        if self.test_rows is not None:
            return self._read(*self.test_rows, held_out=True)
        if self._left_over is None:
            self._shared_rows()
        return self._left_over or []

    def _kept_for_testing(self) -> list[dict[str, str]]:
        """Rows of ``source`` that no client may get in another way."""
        held_out = self._read(*self.train_rows, held_out=True) if self.holdout is not None else []
        return held_out + (self._left_over or [])

    def _trained_rows(self) -> list[Fields]:
        """All that clients train on in every round."""
        return [row for rows in self.client_rows.values() for row in rows]

    def _plain(self, row: Fields) -> dict[str, str]:
        """The template's slots and the response alone."""
        return {name: row[name] for name in (*self.template.slots, "response")}

    def _by_client(self, rows: list[dict[str, str]], split: Split) -> dict[str, list[dict[str, str]]]:
        return {client: [self._plain(rows[row]) for row in own] for client, own in split.train.items()}

    def _without(self, rows: list[dict[str, str]], known: set[tuple[str, ...]]) -> list[dict[str, str]]:
        return [plain for plain in map(self._plain, rows) if make_row_key(plain) not in known]

    def _check_sources(self) -> None:
        """No two settings say the same thing."""
        sayers = [name for name in ("pseudo_labels", "few_shot") if getattr(self, name) is not None]
        if "category" in self.columns:
            sayers.insert(0, f"columns.category={self.columns['category']}")
        if len(sayers) > 1:
            raise ValueError(
                f"{sayers[0]} and {sayers[1]} both say what a row's category is. Remove one of them."
            )
        if self.few_shot is not None and self.few_shot.rest_as_test and self.test_rows is not None:
            raise ValueError(
                f"few_shot.rest_as_test={self.few_shot.rest_as_test} and {'holdout' if self.holdout else 'test_source'} "
                "both say what to test on. Set rest_as_test to 0, or remove the other."
            )

    def _encode(
        self, rows: list[dict[str, str]], source: str
    ) -> tuple[ResponseExamples, list[dict[str, str]], tuple[int, int]]:
        """The examples that fit, their rows, and how many are too long and how many were cut."""
        encoded = encode_responses(
            self.tokenizer, self.template, rows, [row["response"] for row in rows], self.max_tokens
        )
        fits = np.flatnonzero(encoded.kept)
        if not len(fits):
            raise RowsError(f"{source}: no example fits into max_tokens={self.max_tokens}. Raise it.")
        kept = [rows[example] for example in fits]
        return ResponseExamples(encoded, fits), kept, (len(rows) - len(fits), encoded.trimmed)

    def _read(self, source: str, split: str, held_out: bool) -> list[dict[str, str]]:
        raw = load_rows(source, split)
        if self.holdout is not None:
            raw = self.holdout.side(raw, source, held_out)
        columns = {name: path for name, path in self.columns.items() if not held_out or name not in OWNERS}
        return read_instructions(raw, columns, self.template, source)
