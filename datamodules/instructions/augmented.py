"""Instructions by client, with added rows: training data of FedDCA and its baselines.

Wang et al., "Federated Instruction Tuning of LLMs with Domain Coverage Augmentation" (FedDCA),
https://arxiv.org/abs/2409.20135. In the paper's setting 1,000 rows of a domain are drawn as private and divided among ten
clients (``private_rows: 1000``); the server holds the domain's other rows and rows of other domains. An augmentation selects
public rows for each client once, before the first round.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any, TypeVar

import numpy as np
from lightning.pytorch.utilities import rank_zero_info

from fedlight.datamodules.clients.splits import ClientSplit
from fedlight.datamodules.instructions.augmentation import Added, Augmentation
from fedlight.datamodules.instructions.augmentation_record import AugmentationRecord, digest_rows
from fedlight.datamodules.instructions.datamodule import InstructionDataModule
from fedlight.datamodules.rows.fields import OWNERS, make_question_key, make_row_key
from fedlight.datamodules.rows.given import GivenRows, RowsError, Source
from fedlight.datamodules.rows.instruction_rows import PublicRows, check_slots, read_instructions
from fedlight.datamodules.rows.rows import load_rows
from fedlight.datamodules.text.examples import ResponseExamples, join_examples
from fedlight.processes.work import is_first, once
from fedlight.support.checks import refuse_below
from fedlight.support.seeding import derive_seed
from fedlight.support.types import Fields, FieldsByClient

Columns = dict[str, str]
T = TypeVar("T")


class AugmentedInstructionDataModule(InstructionDataModule):
    """Each client's own rows and the rows that an augmentation adds.

    The augmentation sees the clients' training rows, never their validation rows. It selects from public rows that fit into
    ``max_tokens``, without those that `PublicRows` drops. No added row asks a question of the validation or held-out rows.
    A client's weight in the average counts its added rows, too.

    Args:
        source: source of the clients' rows; see `fedlight.datamodules.rows.rows`.
        public_source: one source or several of the server's rows; None: only the rest of ``source``.
        public_split: split of a hub dataset, one for all sources or one for each.
        public_columns: columns of ``response`` and the template's slots, and of ``category`` to record it; one mapping for
            all sources or one for each. None: ``columns`` without client and category.
        private_rows: number of random rows of ``source`` that the clients hold; the server holds the rest. None: the
            clients hold all.
        augmentation: for example ``FedDCA``; None: nothing is added.
        augmentation_folder: folder of the record of added rows, see `AugmentationRecord`. None: the folder
            ``augmentation`` in the trainer's ``default_root_dir``.
        kwargs: further arguments of `InstructionDataModule`.

    Attributes:
        added: client -> its added rows, best first; after ``setup``.
        public: the rows that the augmentation selected from; after ``setup``.
    """

    def __init__(
        self,
        source: Source,
        public_source: str | list[str] | None = None,
        public_split: str | list[str] = "train",
        public_columns: Columns | list[Columns] | None = None,
        private_rows: int | None = None,
        augmentation: Augmentation | None = None,
        augmentation_folder: str | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(source, **kwargs)
        names = [public_source] if isinstance(public_source, str) else public_source or []
        private_columns = {name: path for name, path in self.columns.items() if name not in OWNERS}
        splits = _expand(public_split, len(names), "public_split")
        columns = _expand(public_columns or private_columns, len(names), "public_columns")
        numbered = isinstance(public_columns, list)
        settings = [
            f"public_columns.{number}" if numbered else "public_columns" for number in range(len(names))
        ]
        for each, setting in zip(columns, settings, strict=True):
            check_slots(each, self.template, setting if public_columns else "columns")
        refuse_below(1, private_rows=private_rows)
        if augmentation is not None and augmentation.needs_public and not names and private_rows is None:
            raise ValueError(describe_missing_public(augmentation))
        if private_rows is not None and self.few_shot is not None:
            raise ValueError(
                f"private_rows={private_rows} and few_shot both select the clients' rows: remove one of them"
            )
        self.public_rows = list(zip(names, splits, columns, settings, strict=True))
        self.private_rows, self.augmentation = private_rows, augmentation
        self.augmentation_folder = augmentation_folder
        self.added: dict[str, list[Added]] = {}
        self.public = PublicRows()
        self._rest: list[dict[str, str]] = []

    def draw_by_lot(self) -> None:
        """Draw batches by lot alone; raise ValueError where a client's rows decide which rows are added."""
        if self.augmentation is not None:
            raise ValueError(
                f"DPSGD does not protect what {type(self.augmentation).__name__} learns from a client's rows: leave "
                "data.augmentation out"
            )
        super().draw_by_lot()

    def _read_own_rows(self) -> list[dict[str, str]]:
        rows = super()._read_own_rows()
        if self.private_rows is None:
            return rows
        order = np.random.default_rng(derive_seed(self.seed, "private rows")).permutation(len(rows))
        chosen: list[int] = []
        while len(chosen) < self.private_rows and len(order):  # replaces too long rows by the next ones
            drawn, order = np.split(order, [self.private_rows - len(chosen)])
            chosen += drawn[self._encode_rows([rows[row] for row in drawn]).kept].tolist()
        if len(chosen) < self.private_rows:
            raise ValueError(
                f"private_rows={self.private_rows}, but {len(chosen):,} of the {len(rows):,} rows of {self.train_rows[0]} "
                f"fit into max_tokens={self.max_tokens}: lower private_rows or raise max_tokens"
            )
        self._rest = [rows[row] for row in sorted({*range(len(rows))} - {*chosen})]
        return [rows[row] for row in sorted(chosen)]

    def _add_examples(
        self, examples: ResponseExamples, rows: list[dict[str, str]], split: ClientSplit
    ) -> tuple[ResponseExamples, ClientSplit]:
        private = {client: [rows[row] for row in indices] for client, indices in split.train.items()}
        asked: list[dict[str, str]] = [rows[row] for indices in (split.val or {}).values() for row in indices]
        asked += self._read_test_only_rows()  # a public source may hold them, too
        self.public = PublicRows.gather(self._read_public(), rows, asked)
        self._rest = []  # in `public` from now on
        self.added = self._augment(private, {make_question_key(row) for row in asked})
        if not any(self.added.values()):
            return examples, split
        # A row that several clients get is encoded once.
        distinct = {make_row_key(row.fields): row.fields for row in chain.from_iterable(self.added.values())}
        place = {key: len(examples) + number for number, key in enumerate(distinct)}
        more = ResponseExamples(self._encode_rows(list(distinct.values())), np.arange(len(distinct)))
        train = {
            client: np.array(
                [*indices, *(place[make_row_key(row.fields)] for row in self.added[client])], dtype=np.int64
            )
            for client, indices in split.train.items()
        }
        return join_examples(examples, more), replace(split, train=train)

    def _list_trained_rows(self) -> list[Fields]:
        added = [row.fields for rows in self.added.values() for row in rows]
        return [*super()._list_trained_rows(), *added]

    def _read_public(self) -> list[tuple[str | GivenRows, Sequence[Fields]]]:
        """Return name and rows of each source; the rest of the clients' source comes first."""
        sources: list[tuple[str | GivenRows, Sequence[Fields]]] = []
        if self._rest:
            rest = [{name: text for name, text in row.items() if name != "client"} for row in self._rest]
            sources.append((self.train_rows[0], rest))
        for source, split, columns, setting in self.public_rows:
            raw = load_rows(source, split)
            sources.append((source, read_instructions(raw, columns, self.template, source, setting)))
        return sources

    def _augment(self, private: FieldsByClient, asked: set[tuple[str, ...]]) -> dict[str, list[Added]]:
        """Return each client's added rows, from a valid record of an earlier run or from the augmentation."""
        settings, record = self._describe_settings(private, asked), self._record()
        saved = once(lambda: _read_valid(record, settings))  # one process reads for all
        if saved is None:
            if record is not None and self.augmentation is not None:
                self.augmentation.keep_in(record.folder / "unfinished")
            chosen, notes = self._choose(private, asked)
            if record is not None and is_first():
                record.write(settings, private, chosen, self.public.sources, notes)
            # Also from a user's augmentation, all processes of a team have the rows that the record has.
            saved = once(lambda: _plain(chosen))
        added = {client: [Added(*row) for row in saved.get(client, [])] for client in private}
        if self.augmentation is not None:
            rank_zero_info(describe_added(self.augmentation, added, len(self.public.rows)))
        return added

    def _choose(
        self, private: FieldsByClient, asked: set[tuple[str, ...]]
    ) -> tuple[dict[str, list[Added]], dict[str, object]]:
        """Return each client's added rows by the augmentation, and its notes for the record."""
        if self.augmentation is None:
            return {client: [] for client in private}, {}
        fits = np.arange(0)
        if self.augmentation.needs_public:
            fits = np.flatnonzero(self._encode_rows(self.public.rows).kept)
            too_long = len(self.public.rows) - len(fits)
            rank_zero_info(f"{self.public}, {too_long:,} longer than max_tokens={self.max_tokens}")
            if not len(fits):
                raise RowsError(
                    f"{describe_missing_public(self.augmentation)}; left out: {self.public}, {too_long:,} too long"
                )
        selected = self.augmentation.augment(private, [self.public.rows[row] for row in fits], self.seed)
        check_added(self.augmentation, selected, private, len(fits))  # it may be a user's
        added, known, too_long = {}, 0, 0
        for client in private:
            rows = [self._complete(row, fits) for row in selected[client]]
            new = [row for row in rows if make_question_key(row.fields) not in asked]
            kept = self._encode_rows([row.fields for row in new]).kept
            known, too_long = known + len(rows) - len(new), too_long + int(len(new) - kept.sum())
            added[client] = [row for row, fit in zip(new, kept, strict=True) if fit]
        if known or too_long:
            rank_zero_info(
                f"left out of the generated rows: {known:,} asked in validation or held out, {too_long:,} longer than "
                f"max_tokens={self.max_tokens}"
            )
        return added, {"public_rows": len(fits), **self.augmentation.record()}

    def _complete(self, row: Added, fits: np.ndarray) -> Added:
        """Return the row as plain values, with a text for every slot and its index in `public`."""
        fields = {**dict.fromkeys(self.template.slots, ""), **row.fields}
        index = None if row.row is None else int(fits[row.row])
        return Added(fields, index, None if row.score is None else float(row.score))

    def _describe_settings(self, private: FieldsByClient, asked: set[tuple[str, ...]]) -> dict[str, object]:
        private_rows = [{"client": client, **row} for client, rows in private.items() for row in rows]
        augmentation = self.augmentation
        needs_public = augmentation is not None and augmentation.needs_public
        settings: dict[str, object] = {}
        if augmentation is not None and not needs_public:
            # Only generated rows are compared with validation rows; public rows are filtered before the selection.
            settings["validation rows"] = digest_rows({"asked": "\n".join(row)} for row in sorted(asked))
        return {
            **settings,
            "augmentation": None if augmentation is None else augmentation.settings(),
            "seed": self.seed,
            "tokenizer": self.tokenizer_name,
            "max_tokens": self.max_tokens,
            "template": self.template.text,
            "private rows": digest_rows(private_rows),
            "public rows": digest_rows(self.public.rows) if needs_public else None,
        }

    def _record(self) -> AugmentationRecord | None:
        folder = self._choose_folder(self.augmentation_folder, "augmentation")
        return None if folder is None else AugmentationRecord(folder)


def _read_valid(
    record: AugmentationRecord | None, settings: dict[str, object]
) -> dict[str, list[tuple[Any, ...]]] | None:
    """Return the rows of a record with these settings; None without one, after a check that one can be written."""
    if record is None:
        return None
    why_not = record.why_not(settings)
    if why_not is None:
        rank_zero_info(f"{record.folder}: rows added by an earlier run with the same settings and texts")
        return _plain(record.read())
    if record.settings.exists():
        rank_zero_info(f"{record.folder}: its rows are not used: {why_not}")
    record.make_folder()
    return None


def _plain(added: Mapping[str, Sequence[Added]]) -> dict[str, list[tuple[Any, ...]]]:
    """Return added rows as tuples, which processes exchange."""
    return {client: [tuple(row) for row in rows] for client, rows in added.items()}


def _expand(given: T | list[T], number: int, setting: str) -> list[T]:
    """Return a value for each source, from one for all or one for each."""
    each = given if isinstance(given, list) else [given] * number
    if len(each) != number:
        raise ValueError(
            f"{setting} has {len(each)} entries, but public_source has {number}: give one for all or one for each"
        )
    return each


def describe_added(augmentation: Augmentation, added: Mapping[str, Sequence[Added]], num_public: int) -> str:
    """Return one line about the clients' added rows: numbers, scores, and why a client got fewer than ``number``."""
    name, wanted = type(augmentation).__name__, augmentation.number
    sizes = np.array([len(rows) for rows in added.values()])
    scores = np.array([row.score for rows in added.values() for row in rows if row.score is not None])
    chosen = {row.row for rows in added.values() for row in rows if row.row is not None}
    parts = [f"{name}: {sizes.min():,} to {sizes.max():,} rows for each client (mean {sizes.mean():,.1f})"]
    if len(chosen):
        parts.append(f"{len(chosen):,} different public rows in total")
    if len(scores):
        parts.append(f"scores {scores.min():.3f} to {scores.max():.3f}")
    if fewer := int((sizes < wanted).sum()):
        small = augmentation.needs_public and num_public < wanted
        reason = f"only {num_public:,} rows are public" if small else augmentation.why_fewer()
        parts.append(f"fewer than number={wanted} for {fewer:,} of {len(sizes):,} clients: {reason}")
    return "; ".join(parts)


def check_added(
    augmentation: Augmentation, added: Mapping[str, Sequence[Added]], clients: Iterable[str], num_public: int
) -> None:
    """Raise ValueError unless every client gets at most ``number`` rows, all of them existing, no public row twice."""
    name = type(augmentation).__name__
    for client in clients:
        if client not in added:
            raise ValueError(f"{name} gave nothing for client {client}: return an empty list for no rows")
        rows = [row.row for row in added[client] if row.row is not None]
        if len(added[client]) > augmentation.number:
            raise ValueError(
                f"{name} gave client {client} {len(added[client])} rows, more than number={augmentation.number}"
            )
        if len(set(rows)) < len(rows):
            raise ValueError(f"{name} gave client {client} a public row twice")
        if rows and not 0 <= min(rows) <= max(rows) < num_public:
            raise ValueError(
                f"{name} gave client {client} row {max(rows)} of {num_public} public rows, counted from 0"
            )


def describe_missing_public(augmentation: Augmentation) -> str:
    """Return the error message for an augmentation without public rows."""
    return (
        f"{type(augmentation).__name__} selects from public rows, but there are none: set public_source, or private_rows "
        "so that the rest of source is public, or augmentation to null"
    )
