"""Instructions with responses, by client, with the loss on the response alone.

The default template is Alpaca's (Taori et al. 2023, https://github.com/tatsu-lab/stanford_alpaca), with its shorter form for
rows with an empty input. ``alpaca_joined`` uses the shorter form for all rows and appends the input to the instruction.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from fedlight.datamodules.clients.few_shot import FewShot
from fedlight.datamodules.clients.partition import Partition
from fedlight.datamodules.clients.splits import ClientSplit, label_examples, pool, share_out
from fedlight.datamodules.federated.datamodule import FederatedDataModule
from fedlight.datamodules.instructions.reports import SetupReport, padding_shares
from fedlight.datamodules.rows.canaries import Canaries, check_words
from fedlight.datamodules.rows.fields import OWNERS, make_row_key, number_prompts
from fedlight.datamodules.rows.given import GivenRows, Source, refuse_too_long
from fedlight.datamodules.rows.instruction_rows import check_slots, read_instructions
from fedlight.datamodules.rows.poison import Backdoor
from fedlight.datamodules.rows.rows import load_rows
from fedlight.datamodules.rows.split import Split
from fedlight.datamodules.text.encoding import Encoded, TaughtTurns, encode_responses
from fedlight.datamodules.text.examples import ResponseExamples, collate_responses, join_examples
from fedlight.datamodules.text.templates import Template
from fedlight.datamodules.text.tokens import check_known, draw_rows, pad_id, warn_of_control
from fedlight.datamodules.vectors.clusters import PseudoLabels
from fedlight.pretrained.hub import load_tokenizer
from fedlight.support.checks import Settings
from fedlight.support.types import Fields, FieldsByClient

CANARY, BACKDOOR = "canary", "backdoor"  # categories of planted rows in data with categories
PLANTED = {
    CANARY: ("canaries", "canaries.length"),
    BACKDOOR: ("rows with a trigger", "the words of backdoor.response"),
}
"""Category -> its rows, and the setting that makes them shorter."""

Taught = tuple[ResponseExamples, list[dict[str, str]], ClientSplit]
"""Examples, their rows, and the clients' positions among them."""


@dataclass(frozen=True)
class TaughtRows(Settings):
    """Rows and turns that clients train on; in YAML ``rows: {canaries: {repeats: 2}}``.

    Args:
        few_shot: selection of a few rows of each cluster of ``source``, with the clusters as categories.
        pseudo_labels: categories for ``partition.by: dirichlet`` of rows without a category column.
        canaries: artificial rows that some clients train on besides their own; attacks search for them.
        backdoor: rows with a trigger that clients which lie train on besides their own; ``BackdoorSuccess`` measures it.
        taught_turns: of a conversation, train on ``all`` answers, or on the ``last``.
    """

    few_shot: FewShot | None = None
    pseudo_labels: PseudoLabels | None = None
    canaries: Canaries | None = None
    backdoor: Backdoor | None = None
    taught_turns: TaughtTurns = "all"


class InstructionDataModule(FederatedDataModule):
    """Instruction data for supervised fine-tuning.

    Args:
        source: name of the rows' file, folder or data set, see `fedlight.datamodules.rows.rows`; in a program also the
            rows: a list of mappings from column to value, a DataFrame of pandas or a Dataset of ``datasets``.
        columns: columns of ``response``, the template's slots, ``client`` and ``category``; an empty name for a column that
            is not to be read. A name that it leaves out, except ``category``, is read from the column of the same name, a
            response from Alpaca's ``output`` or from ``response``; of the slots, ``input`` alone needs no column.
        template: a name or a text with slots; see `fedlight.datamodules.text.templates`. With ``chat``, the column
            ``messages`` holds whole conversations.
        tokenizer: hub name or folder, or ``"toy"``.
        max_tokens: most tokens of prompt and response together.
        partition: assignment of examples to clients; None: by the column mapped to ``client``, or a single client without
            such a column.
        split: rows for test, and the share of each client's prompts for validation. Without rows for test and with
            ``rows.few_shot.rest_as_test``: rows that no client gets.
        rows: which rows and turns are trained on.
        batch_size, eval_batch_size, seed, num_workers: see `FederatedDataModule`.

    Attributes:
        template: template of the prompts.
        client_rows: client -> its own training rows (the template's slots and ``response``), with planted canaries, without
            rows that an augmentation or a synthesis adds; after ``setup``.
        planted: client -> its canaries, each once; after ``setup``.
    """

    def __init__(
        self,
        source: Source,
        columns: dict[str, str] | None = None,
        template: str = "alpaca",
        tokenizer: str = "toy",
        max_tokens: int = 512,
        partition: Partition | None = None,
        split: Split = Split(),
        rows: TaughtRows = TaughtRows(),
        batch_size: int = 32,
        eval_batch_size: int = 64,
        seed: int = 0,
        num_workers: int = 0,
    ) -> None:
        super().__init__(batch_size, eval_batch_size, seed, num_workers)
        if split.val_source is not None:
            raise ValueError(
                f"split.val_source={split.val_source!r}, but instructions are validated on a share of each client's own: "
                "leave it out, and set split.val_share"
            )
        self.train_rows, _, self.test_rows = split.rows(source)
        self.columns = columns or {}
        self.template, self.taught_turns = Template.named(template, self.columns), rows.taught_turns
        self.tokenizer_name, self.max_tokens = tokenizer, max_tokens
        self.partition = partition
        self.holdout, self.val_share, self.val_max = split.holdout, split.val_share, split.val_max
        self.report: SetupReport | None = None
        self.pseudo_labels, self.few_shot, self.canaries = rows.pseudo_labels, rows.few_shot, rows.canaries
        self.backdoor = rows.backdoor
        self.client_rows: dict[str, list[dict[str, str]]] = {}
        self.planted: dict[str, list[dict[str, str]]] = {}
        self._validation: list[dict[str, str]] = []
        self._left_over: list[dict[str, str]] | None = None
        check_slots(self.columns, self.template)
        self._check_sources()

    def setup(self, stage: str) -> None:
        self.tokenizer = load_tokenizer(self.tokenizer_name)
        self.template = self.template.for_tokenizer(self.tokenizer)
        if stage in ("fit", "validate") and self.report is None:
            self._setup_training()
        if stage == "test" and self.test_set is None:
            examples, _, _ = self._encode(self._read_test_rows(), (self.test_rows or self.train_rows)[0])
            self.test_set = examples.by_length()

    def unseen_rows(self) -> list[dict[str, str]]:
        """Return rows that no client trains on: validation rows, else test rows, else none."""
        trained = {make_row_key(row) for row in self._list_trained_rows()}
        unseen = self._drop_known(self._validation, trained)
        if unseen or not self._has_test_rows:
            return unseen
        return self._drop_known(self._read_test_rows(), trained)

    def collate(self, examples: list[Any]) -> dict[str, Any]:
        """Return an sft batch."""
        return collate_responses(examples, pad_id(self.tokenizer))

    def _setup_training(self) -> None:
        rows = self._read_shared_rows()
        some = [text for row in draw_rows(len(rows)) for text in self._strip(rows[row]).values()]
        if warning := check_known(self.tokenizer, self.tokenizer_name, some, str(self.train_rows[0])):
            rank_zero_warn(warning)
        texts = (text for row in rows for text in self._strip(row).values())
        warn_of_control(self.tokenizer, texts, str(self.train_rows[0]))
        examples, rows, (too_long, trimmed) = self._encode(rows, self.train_rows[0])
        prompts = number_prompts(rows)  # one prompt, one client and one side
        split = share_out(
            self.partition,
            owners=[row["client"] for row in rows if "client" in row],
            categories=self._find_categories(rows),
            prompts=prompts,
            keys=prompts,
            share=self.val_share,
            at_most=self.val_max,
            seed=self.seed,
        )
        self._validation = [rows[row] for indices in (split.val or {}).values() for row in indices]
        examples, rows, split = self._plant_canaries(self._plant_backdoor((examples, rows, split)))
        self.client_rows = self._group_by_client(rows, split)
        examples, split = self._add_examples(examples, rows, split)
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

    def _read_own_rows(self) -> list[dict[str, str]]:
        """Return the rows that the clients hold, before the selection of ``few_shot``."""
        return self._read(*self.train_rows, held_out=False)

    def _read_shared_rows(self) -> list[dict[str, str]]:
        """Return the rows to partition; with ``few_shot``, keep its remaining rows for the test."""
        rows = self._read_own_rows()
        if self.few_shot is None:
            return rows
        _, fitting, _ = self._encode(rows, self.train_rows[0])  # else a chosen row could be left out later
        few = self.few_shot.choose(fitting, self.seed)
        self._left_over = [fitting[row] for row in few.test]
        rank_zero_info(f"{self.train_rows[0]}: {few}")
        chosen = zip(few.chosen, few.labels, strict=True)
        return [{**fitting[row], "category": label} for row, label in chosen]

    def _plant_backdoor(self, taught: Taught) -> Taught:
        _, rows, split = taught
        if self.backdoor is None:
            return taught
        check_words(self.tokenizer, [self.backdoor.trigger, self.backdoor.response], "backdoor")
        rank_zero_info(self.backdoor.liars.named(split.train, "backdoor"))
        planted = self.backdoor.plant(self._group_by_client(rows, split))
        return self._plant(taught, planted, BACKDOOR, repeats=1)

    def _plant_canaries(self, taught: Taught) -> Taught:
        _, rows, split = taught
        if self.canaries is None:
            return taught
        planted = self.canaries.plant(self._group_by_client(rows, split))
        self.planted = {client: [*map(self._strip, canaries)] for client, canaries in planted.items()}
        new = [row["response"] for canaries in planted.values() for row in canaries]
        check_words(self.tokenizer, new)
        rank_zero_info(
            f"{len(new):,} canaries planted at {len(planted):,} clients, {self.canaries.repeats:,} times each"
        )
        return self._plant(taught, planted, CANARY, self.canaries.repeats)

    def _plant(self, taught: Taught, planted: FieldsByClient, category: str, repeats: int) -> Taught:
        """Append rows to the clients' training rows, each ``repeats`` times; validation does not change."""
        examples, rows, split = taught
        owners = [client for client, its_rows in planted.items() for _ in its_rows]
        new = [
            dict(row)
            | {name: value for name, value in (("client", client), ("category", category)) if name in rows[0]}
            for client, its_rows in planted.items()
            for row in its_rows
        ]
        if not new:
            return taught
        encoded = self._encode_rows(new)
        what, shorter = PLANTED[category]
        if cut := encoded.trimmed + int((~encoded.kept).sum()):
            raise ValueError(
                f"{cut} of {len(new)} {what} do not fit into max_tokens={self.max_tokens}: raise it, or lower {shorter}"
            )
        train = dict(split.train)
        for at, client in enumerate(owners, start=len(examples)):
            # One example at several positions: it is encoded once, and a pass reads it so many times.
            train[client] = np.concatenate([train[client], np.full(repeats, at)])
        more = ResponseExamples(encoded, np.arange(len(new)))
        return join_examples(examples, more), [*rows, *new], replace(split, train=train)

    def _add_examples(
        self, examples: ResponseExamples, rows: list[dict[str, str]], split: ClientSplit
    ) -> tuple[ResponseExamples, ClientSplit]:
        """Return the examples and the split with added examples; a subclass may add some."""
        return examples, split

    def _find_categories(self, rows: list[dict[str, str]]) -> list[str]:
        if self.pseudo_labels is not None:
            labels = self.pseudo_labels.label(rows, self.seed)
            for row, label in zip(rows, labels, strict=True):
                row["category"] = label
        return [row["category"] for row in rows if "category" in row]

    @property
    def _has_test_rows(self) -> bool:
        return self.test_rows is not None or bool(self.few_shot and self.few_shot.rest_as_test)

    def _read_test_rows(self) -> list[dict[str, str]]:
        if not self._has_test_rows:
            raise ValueError(
                "there are no rows to test on: set test_source, or holdout for held-out rows, or few_shot.rest_as_test for "
                "rows that no client gets"
            )
        if self.test_rows is not None:
            return self._read(*self.test_rows, held_out=True)
        if self._left_over is None:
            self._read_shared_rows()
        return self._left_over or []

    def _read_test_only_rows(self) -> list[dict[str, str]]:
        """Return rows of ``source`` that must not reach any client."""
        held_out = self._read(*self.train_rows, held_out=True) if self.holdout is not None else []
        return held_out + (self._left_over or [])

    def _list_trained_rows(self) -> list[Fields]:
        """Return all rows that clients train on in every round."""
        return [row for rows in self.client_rows.values() for row in rows]

    def _strip(self, row: Fields) -> dict[str, str]:
        """Return the template's slots and the response alone."""
        return {name: row[name] for name in (*self.template.slots, "response")}

    def _group_by_client(
        self, rows: list[dict[str, str]], split: ClientSplit
    ) -> dict[str, list[dict[str, str]]]:
        return {client: [self._strip(rows[k]) for k in indices] for client, indices in split.train.items()}

    def _drop_known(self, rows: list[dict[str, str]], known: set[tuple[str, ...]]) -> list[dict[str, str]]:
        return [row for row in map(self._strip, rows) if make_row_key(row) not in known]

    def _check_sources(self) -> None:
        """Raise ValueError for two settings that define a row's category or the test rows."""
        settings = [name for name in ("pseudo_labels", "few_shot") if getattr(self, name) is not None]
        if self.columns.get("category"):
            settings.insert(0, f"columns.category={self.columns['category']}")
        if len(settings) > 1:
            raise ValueError(
                f"{settings[0]} and {settings[1]} both define a row's category: remove one of them"
            )
        if self.few_shot is not None and self.few_shot.rest_as_test and self.test_rows is not None:
            raise ValueError(
                f"few_shot.rest_as_test={self.few_shot.rest_as_test} and {'holdout' if self.holdout else 'test_source'} "
                "both define the test rows: set rest_as_test to 0, or remove the other"
            )

    def _encode(
        self, rows: list[dict[str, str]], source: str | GivenRows
    ) -> tuple[ResponseExamples, list[dict[str, str]], tuple[int, int]]:
        """Return examples that fit, their rows, and the numbers of too long and of truncated examples."""
        encoded = self._encode_rows(rows)
        fits = np.flatnonzero(encoded.kept)
        refuse_too_long(len(fits), "example", source, self.max_tokens)
        kept = [rows[example] for example in fits]
        return ResponseExamples(encoded, fits), kept, (len(rows) - len(fits), encoded.trimmed)

    def _choose_folder(self, folder: str | None, name: str) -> Path | None:
        """Return a folder for a record: the given one, or one in the run's folder; None without either."""
        if folder is not None or self.trainer is None:
            return None if folder is None else Path(folder)
        return Path(self.trainer.default_root_dir) / name

    def _encode_rows(self, rows: Sequence[Fields]) -> Encoded:
        responses = [row["response"] for row in rows]
        return encode_responses(
            self.tokenizer, self.template, rows, responses, self.max_tokens, taught_turns=self.taught_turns
        )

    def _read(self, source: str | GivenRows, split: str, held_out: bool) -> list[dict[str, str]]:
        raw = load_rows(source, split)
        if self.holdout is not None:
            raw = self.holdout.side(raw, str(source), held_out)
        columns = {name: path for name, path in self.columns.items() if not held_out or name not in OWNERS}
        by_client = not held_out and (self.partition is None or self.partition.by == "client")
        return read_instructions(raw, columns, self.template, source, by_client=by_client)
